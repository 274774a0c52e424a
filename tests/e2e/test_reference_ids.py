"""The embedded model against committed ids of transformers (reference/make_reference_ids.py)."""

import json
from pathlib import Path

import pytest

from inferkit import OfflineInference, SamplingParams, load_config
from inferkit.offline.prompts import render_prompt
from tests.e2e.equality import assert_same_tokens, hf_generate

REFERENCE = json.loads(Path(__file__).with_name("reference").joinpath("reference.json").read_text())
CASES = REFERENCE["cases"]
SOME = [*CASES[:40:3], *CASES[44:56:3], CASES[60]]
"""Every kind of prompt, up to 700 tokens, for the schedules that repeat the work."""


def make(*overrides):
    return OfflineInference(
        load_config(
            [
                "model.dtype=float32",
                "data.input_truncated_len=1600",
                f"scheduler.max_new_tokens={REFERENCE['num_new_tokens']}",
                "allowed_targets=[tests]",
                "scheduler._target_=tests.components.CheckedScheduler",
                *overrides,
            ]
        )
    )


def check(llm, cases, num_tokens=REFERENCE["num_new_tokens"]):
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    results = llm.generate([case["prompt"] for case in cases], params)
    for case, result in zip(cases, results, strict=True):
        name = f"{len(case['prompt_token_ids'])} tokens, {str(case['prompt'])[:30]!r}"
        expected = case["token_ids"][:num_tokens]
        assert_same_tokens(result.token_ids, expected, case["gaps"], case=name)
    assert llm.parts.kv_cache.num_used_blocks == 0
    return results


def test_the_prompts_are_as_varied_as_they_should_be():
    lens = [len(case["prompt_token_ids"]) for case in CASES]
    assert len(CASES) == 64 and min(lens) == 1 and 1400 < max(lens) <= 1600


def test_prompts_render_to_the_same_ids(embedded_model_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir)
    for case in CASES:
        ids = render_prompt(tokenizer, case["prompt"])
        assert ids == case["prompt_token_ids"]


def test_64_prompts_in_one_batch_of_mixed_lengths():
    check(make("scheduler.batch_size=64"), CASES)


@pytest.mark.parametrize(
    "num_tokens", [8, pytest.param(REFERENCE["num_new_tokens"], marks=pytest.mark.full)]
)
def test_64_prompts_alone(num_tokens):
    check(make("scheduler.batch_size=1"), CASES, num_tokens=num_tokens)


SETS = pytest.mark.parametrize(
    "cases",
    [pytest.param(SOME, id="some"), pytest.param(CASES, id="all", marks=pytest.mark.full)],
)


@SETS
@pytest.mark.parametrize(
    "overrides",
    [
        ["kv_cache.block_size=1"],
        ["kv_cache.block_size=16", "scheduler.max_prefill_tokens=100"],
        ["kv_cache.block_size=128", "scheduler.enable_chunked_prefill=false"],
    ],
    ids=["blocks_of_1", "blocks_of_16_small_chunks", "blocks_of_128_no_chunks"],
)
def test_block_sizes_and_chunks(overrides, cases):
    check(make("scheduler.batch_size=8", *overrides), cases)


@SETS
def test_prefix_hits_give_the_same_tokens(cases):
    llm = make("kv_cache.block_size=16", "kv_cache.enable_prefix_cache=true")
    check(llm, cases)
    check(llm, cases)
    cached = sum(request.num_cached_tokens for request in llm.requests)
    total = sum(request.num_prompt_tokens for request in llm.requests)
    assert cached > 0.8 * total


@SETS
def test_a_pool_so_small_that_requests_wait(cases):
    longest = max(len(case["prompt_token_ids"]) for case in cases)
    num_blocks = (longest + REFERENCE["num_new_tokens"]) // 16 + 4
    llm = make(
        "scheduler.batch_size=8", "kv_cache.block_size=16", f"kv_cache.num_blocks={num_blocks}"
    )
    check(llm, cases)
    assert any(record.num_waiting and record.num_running < 8 for record in llm.step_records[:-1]), (
        "nothing had to wait for blocks"
    )


def test_four_prompts_live_against_transformers(embedded_model_dir):
    cases = [CASES[i] for i in (4, 25, 37, 47)]
    live = hf_generate(
        embedded_model_dir,
        [case["prompt_token_ids"] for case in cases],
        REFERENCE["num_new_tokens"],
    )
    for case, (tokens, _, _) in zip(cases, live, strict=True):
        assert tokens == case["token_ids"]
