"""Registered families (tests/families.py) under every schedule equal transformers, in float32."""

import pytest
import torch

from inferkit import OfflineInference, SamplingParams, load_config
from tests.e2e.equality import hf_generate, record_logits
from tests.e2e.test_random_models import NUM_NEW_TOKENS, SCHEDULES, check, prompts, run
from tests.families import FAMILIES, VARIANTS

FIRST = {option: next(iter(family.variants)) for option, family in FAMILIES.items()}
"""Option -> the variant that runs every schedule by default."""


def is_default(variant: str, schedule: str) -> bool:
    return schedule == "small_chunks" or variant in FIRST.values()


CELLS = [
    pytest.param(variant, schedule, marks=[] if is_default(variant, schedule) else pytest.mark.full)
    for variant in VARIANTS
    for schedule in SCHEDULES
]


@pytest.fixture(scope="module")
def expected(tiny_hf_model):
    """(option, folder, what transformers generates) of each variant, made once."""
    made = {}

    def get(variant):
        if variant not in made:
            option, config = VARIANTS[variant]
            folder = tiny_hf_model(option, **config)
            made[variant] = option, folder, hf_generate(folder, prompts(), NUM_NEW_TOKENS)
        return made[variant]

    return get


@pytest.mark.parametrize("variant,schedule", CELLS)
def test_every_schedule_equals_transformers(expected, variant, schedule):
    option, folder, reference = expected(variant)
    llm, recorder, results = run(folder, option, schedule)
    check(llm, recorder, results, reference, f"{variant} {schedule}")
    llm.parts.kv_cache.check_integrity()
    if schedule == "waiting_for_blocks":
        assert any(record.num_waiting for record in llm.step_records)


@pytest.mark.parametrize("option", FAMILIES)
def test_short_types_stay_near_float32(expected, option):
    _, folder, reference = expected(FIRST[option])
    overrides = [f"model={option}", f"model.path={folder}", "engine.max_model_len=72"]
    llm = OfflineInference(load_config([*overrides, "model.dtype=bfloat16"]))
    recorder = record_logits(llm)
    llm.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=1))
    ours = torch.stack([recorder.logits[request.request_id][0] for request in llm.requests])
    theirs = torch.stack([logits[0] for _, _, logits in reference])
    # The median: a token whose best experts are nearly tied may take another one.
    assert (ours - theirs).abs().median() < 0.05 * theirs.abs().mean()


@pytest.mark.parametrize("option", FAMILIES)
def test_random_weights_need_no_weight_files(expected, option):
    _, folder, _ = expected(FIRST[option])
    overrides = [f"model={option}", f"model.path={folder}", "model.with_ckpt=false"]
    llm = OfflineInference(load_config([*overrides, "engine.max_model_len=72"]))
    recorder = record_logits(llm)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert torch.stack(recorder.logits[0]).isfinite().all()
