"""Random-weight models of every dense family against transformers, in float32."""

import random

import pytest
import torch

from inferkit import ConfigError, OfflineInference, SamplingParams, load_config
from tests.e2e.equality import assert_same_tokens, hf_generate, record_logits

NUM_NEW_TOKENS = 10
PROMPT_LENS = (1, 2, 5, 17, 33, 60, 9, 9)

FAMILIES = {
    "llama": ("llama", {}),
    "llama_tied_biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_half_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2_yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama_dynamic_rope": (
        "llama",
        {
            "max_position_embeddings": 40,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "qwen2_yarn_beyond_its_positions": (
        "qwen2",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_wide_heads": ("qwen3", {"head_dim": 32, "num_key_value_heads": 4}),
}

SCHEDULES = {
    "one_batch": ["kv_cache.block_size=16"],
    "alone": ["scheduler.batch_size=1", "kv_cache.block_size=16"],
    "small_chunks": ["kv_cache.block_size=4", "scheduler.max_prefill_tokens=11"],
    "no_chunks": ["kv_cache.block_size=128", "scheduler.enable_chunked_prefill=false"],
    "waiting_for_blocks": ["kv_cache.block_size=4", "kv_cache.num_blocks=25"],
    "prefix_cache": ["kv_cache.block_size=4", "kv_cache.enable_prefix_cache=true"],
    "padded_decodes": ["kv_cache.block_size=1", "exe_mode.batch_buckets=[2,8]"],
}


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    ids = [[rng.randrange(3, 259) for _ in range(n)] for n in PROMPT_LENS]
    ids[-1] = ids[3][:8] + ids[-1][8:]  # a shared prefix of two blocks of 4
    return ids


def run(directory, family, schedule):
    config = load_config(
        [
            f"model={family}",
            f"model.path={directory}",
            "model.dtype=float32",
            "scheduler.batch_size=4",
            "engine.max_model_len=72",
            "allowed_targets=[tests]",
            "scheduler._target_=tests.components.CheckedScheduler",
            *SCHEDULES[schedule],
        ]
    )
    llm = OfflineInference(config)
    recorder = record_logits(llm)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
    results = llm.generate(prompts(), params)
    assert llm.parts.kv_cache.num_used_blocks == 0
    return llm, recorder, results


def check(llm, recorder, results, expected, case):
    for request, result, (tokens, gaps, logits) in zip(
        llm.requests, results, expected, strict=True
    ):
        assert_same_tokens(result.token_ids, tokens, gaps, case=f"{case} {len(tokens)}")
        ours = torch.stack(recorder.logits[request.request_id])
        if result.token_ids == tokens:
            torch.testing.assert_close(ours[: len(logits)], logits, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def expected(tiny_hf_model):
    """What transformers generates, made once per family."""
    made = {}

    def get(name):
        if name not in made:
            family, overrides = FAMILIES[name]
            directory = tiny_hf_model(family, **overrides)
            made[name] = (family, directory, hf_generate(directory, prompts(), NUM_NEW_TOKENS))
        return made[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_transformers(expected, name):
    family, directory, reference = expected(name)
    check(*run(directory, family, "small_chunks"), reference, name)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["qwen3", "qwen2_half_window", "mistral_window"])
def test_every_schedule_equals_transformers(expected, name, schedule):
    family, directory, reference = expected(name)
    llm, recorder, results = run(directory, family, schedule)
    check(llm, recorder, results, reference, f"{name} {schedule}")
    if schedule == "small_chunks":
        kinds = {record.kind for record in llm.step_records}
        assert "mixed" in kinds
    if schedule == "waiting_for_blocks":
        assert any(record.num_waiting for record in llm.step_records)
    if schedule == "prefix_cache" and name == "qwen3":
        assert sum(request.num_cached_tokens for request in llm.requests) == 8


def test_second_generate_hits_the_prefix_cache_and_gives_the_same(expected):
    family, directory, reference = expected("qwen3")
    llm, _, first = run(directory, family, "prefix_cache")
    recorder = record_logits(llm)
    second = llm.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS))
    assert [result.token_ids for result in first] == [result.token_ids for result in second]
    assert sum(request.num_cached_tokens for request in llm.requests) > 80
    check(llm, recorder, second, reference, "second")


def test_prefix_cache_is_refused_where_keys_depend_on_the_prompt_length(expected):
    family, directory, _ = expected("llama_dynamic_rope")
    with pytest.raises(ConfigError, match="enable_prefix_cache=true cannot be used up to"):
        run(directory, family, "prefix_cache")


def test_contiguous_cache_refuses_the_prefix_cache(expected):
    _, directory, _ = expected("llama")
    with pytest.raises(ConfigError, match="contiguous cache has one block per request"):
        OfflineInference(
            load_config(
                [
                    "model=llama",
                    f"model.path={directory}",
                    "model._target_=tests.legacy.model.LlamaForCausalLM",
                    "allowed_targets=[tests]",
                    "kv_cache.enable_prefix_cache=true",
                ]
            )
        )


@pytest.mark.parametrize("schedule", ["one_batch", "alone", "small_chunks"])
def test_contiguous_cache_equals_transformers(expected, schedule):
    """The legacy path: a model without cache specs, whose layers declare `cache_unit`."""
    _, directory, reference = expected("llama")
    config = load_config(
        [
            "model=llama",
            f"model.path={directory}",
            "model._target_=tests.legacy.model.LlamaForCausalLM",
            "allowed_targets=[tests]",
            "model.dtype=float32",
            "scheduler.batch_size=4",
            "engine.max_model_len=72",
            *SCHEDULES[schedule],
        ]
    )
    llm = OfflineInference(config)
    layer = llm.parts.engine.worker.model.model.layers[0].self_attn.attention
    num_rows = config.scheduler.batch_size + 1
    assert layer.k_cache.shape == (num_rows, 72, *layer.cache_unit)
    recorder = record_logits(llm)
    results = llm.generate(prompts(), SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS))
    check(llm, recorder, results, reference, f"contiguous {schedule}")
    llm.parts.kv_cache.check_integrity()


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
