"""What single random-weight models show: both caches, prefixes, types of weights.

That every family equals transformers is in test_families.py.
"""

import pytest
import torch

from inferkit import ConfigError, OfflineInference, SamplingParams, load_config
from tests.e2e.equality import record_logits
from tests.e2e.schedules import MAX_MODEL_LEN, NUM_NEW_TOKENS, check, prompts, run

LEGACY_MODEL = ["model._target_=tests.legacy.model.LlamaForCausalLM", "allowed_targets=[tests]"]
"""A model without cache specs, whose layers declare `cache_unit`."""


def test_second_generate_hits_the_prefix_cache_and_gives_the_same(references):
    option, folder, reference = references("qwen3")
    llm, _, first = run(folder, option, "prefix_cache")
    assert sum(request.num_cached_tokens for request in llm.requests) == 8
    recorder = record_logits(llm)
    second = llm.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS))
    assert [result.token_ids for result in first] == [result.token_ids for result in second]
    assert sum(request.num_cached_tokens for request in llm.requests) > 80
    check(llm, recorder, second, reference, "second")


def test_prefix_cache_is_refused_where_keys_depend_on_the_prompt_length(references):
    option, folder, _ = references("llama_dynamic_rope")
    with pytest.raises(ConfigError, match=r"enable_prefix_cache=true\s+cannot be used up to"):
        run(folder, option, "prefix_cache")


def test_contiguous_cache_refuses_the_prefix_cache(tiny_hf_model):
    overrides = ["model=llama", f"model.path={tiny_hf_model('llama')}", *LEGACY_MODEL]
    with pytest.raises(ConfigError, match="contiguous cache has one block per request"):
        OfflineInference(load_config([*overrides, "kv_cache.enable_prefix_cache=true"]))


@pytest.mark.parametrize("schedule", ["one_batch", "alone", "small_chunks"])
def test_contiguous_cache_equals_transformers(references, schedule):
    option, folder, reference = references("llama")
    llm, recorder, results = run(folder, option, schedule, *LEGACY_MODEL)
    check(llm, recorder, results, reference, f"contiguous {schedule}")
    layer = llm.parts.engine.engine.worker.model.model.layers[0].self_attn.attention
    num_rows = llm.config.scheduler.batch_size + 1
    assert layer.k_cache.shape == (num_rows, MAX_MODEL_LEN, *layer.cache_unit)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_honoured_and_logits_are_float32(tiny_hf_model, dtype):
    directory = tiny_hf_model("llama")
    llm = OfflineInference(
        load_config(["model=llama", f"model.path={directory}", f"model.dtype={dtype}"])
    )
    recorder = record_logits(llm)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=3))
    worker = llm.parts.engine.engine.worker
    layer = worker.model.model.layers[0].self_attn.attention
    assert layer.k_cache.dtype is getattr(torch, dtype)
    assert worker.model.model.norm.weight.dtype is getattr(torch, dtype)
    assert recorder.logits[0][0].dtype is torch.float32
