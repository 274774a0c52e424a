"""Registered families (tests/families.py) under every schedule equal transformers, in float32."""

import pytest
import torch

from inferkit import OfflineInference, SamplingParams, load_config
from tests.e2e.equality import record_logits
from tests.e2e.schedules import SCHEDULES, check, prompts, run
from tests.families import FAMILIES, VARIANTS

FIRST = {option: next(iter(family.variants)) for option, family in FAMILIES.items()}
"""Option -> the variant that runs every schedule by default."""
LIKE_OTHERS = {"llama": "qwen3", "gemma3": "qwen2", "mixtral": "qwen3_moe"}
"""Families that a schedule reaches by no other code than one of the others."""
REFUSED = {("llama_dynamic_rope", "prefix_cache")}
"""tests/e2e/test_random_models.py has why."""


def is_default(variant: str, schedule: str) -> bool:
    option, _ = VARIANTS[variant]
    return schedule == "small_chunks" or (variant == FIRST[option] and option not in LIKE_OTHERS)


CELLS = [
    pytest.param(variant, schedule, marks=[] if is_default(variant, schedule) else pytest.mark.full)
    for variant in VARIANTS
    for schedule in SCHEDULES
    if (variant, schedule) not in REFUSED
]


def generate(option, folder, prompt_ids, num_new_tokens, *overrides):
    """Greedy, with the folder's model; the logits of every request."""
    overrides = [f"model={option}", f"model.path={folder}", "engine.max_model_len=72", *overrides]
    llm = OfflineInference(load_config(overrides))
    recorder = record_logits(llm)
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
    llm.generate(prompt_ids, params)
    return [torch.stack(recorder.logits[request.request_id]) for request in llm.requests]


@pytest.mark.parametrize("variant,schedule", CELLS)
def test_every_schedule_equals_transformers(references, variant, schedule):
    option, folder, reference = references(variant)
    llm, recorder, results = run(folder, option, schedule)
    check(llm, recorder, results, reference, f"{variant} {schedule}")
    if schedule == "small_chunks":
        assert "mixed" in {record.kind for record in llm.step_records}
    if schedule == "waiting_for_blocks":
        assert any(record.num_waiting for record in llm.step_records)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
@pytest.mark.parametrize("option", FAMILIES)
def test_short_types_stay_near_float32(references, option, dtype):
    _, folder, reference = references(FIRST[option])
    ours = torch.cat(generate(option, folder, prompts(), 1, f"model.dtype={dtype}"))
    theirs = torch.stack([logits[0] for _, _, logits in reference])
    # The median: a token whose best experts are nearly tied may take another one.
    assert (ours - theirs).abs().median() < 0.05 * theirs.abs().mean()


@pytest.mark.parametrize("option", FAMILIES)
def test_random_weights_need_no_weight_files(tiny_hf_model, option):
    config = FAMILIES[option].variants[FIRST[option]]
    folder = tiny_hf_model(option, **config)
    (logits,) = generate(option, folder, [[5, 6, 7]], 3, "model.with_ckpt=false")
    assert logits.isfinite().all()
