"""The offline loop on a tiny random model: what a user may ask of `generate`."""

import pytest

from inferkit import OfflineInference, RequestError, SamplingParams, load_config

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def model(tiny_hf_model):
    return tiny_hf_model("llama", eos_token_id=None)


def make(model, *overrides):
    return OfflineInference(
        load_config(
            ["model=llama", f"model.path={model}", "model.dtype=float32", *overrides],
        )
    )


@pytest.fixture(scope="module")
def llm(model):
    return make(model, "kv_cache.block_size=8")


def test_one_prompt_of_each_kind(llm):
    messages = [{"role": "user", "content": "hi"}]
    results = [llm.generate(prompt, GREEDY)[0] for prompt in ("hi", messages, [5, 6, 7])]
    assert [result.prompt for result in results] == ["hi", messages, [5, 6, 7]]
    assert results[2].prompt_token_ids == [5, 6, 7]
    assert all(len(result.token_ids) == 12 for result in results)


def test_order_and_number_of_results(llm):
    prompts = [[10 + i] * (1 + i % 7) for i in range(50)]
    results = llm.generate(prompts, GREEDY)
    assert [result.prompt for result in results] == prompts
    alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts[:5]]
    assert [result.token_ids for result in results[:5]] == alone


def test_each_result_is_told_once_as_soon_as_it_is_there(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 1, 5)]
    told, finished = [], []
    results = llm.generate(
        [[5, 6], [5, 7], [5, 8]],
        params,
        on_step=lambda record, num_finished: finished.append((num_finished, len(told))),
        on_result=told.append,
    )
    assert told == [results[1], results[2], results[0]]
    assert finished == [(1, 1)] * 4 + [(2, 2)] * 4 + [(3, 3)]


def test_no_prompts_give_no_results(llm):
    assert llm.generate([]) == []


def test_parameters_of_each_prompt(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 5, 9)]
    results = llm.generate([[5, 6]] * 3, params)
    assert [len(result.token_ids) for result in results] == [1, 5, 9]
    assert results[2].token_ids[:5] == results[1].token_ids
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate([[5, 6]] * 3, params[:2])


def test_stop_string_cuts_the_text_and_keeps_its_token(llm):
    (whole,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=20))
    printable = [i for i, c in enumerate(whole.text) if c.isascii() and c.isprintable()]
    stop = whole.text[printable[2]]
    (cut,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=20, stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert stop in llm.parts.tokenizer.decode(cut.token_ids)


def test_stop_string_within_min_tokens_does_not_count(llm):
    (whole,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=20))
    early = llm.parts.tokenizer.decode(whole.token_ids[:4])
    stop = next(c for c in early if c.isascii() and c.isprintable())
    params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=20, stop=(stop,))
    (result,) = llm.generate([[5, 6, 7]], params)
    assert result.token_ids == whole.token_ids and result.text == whole.text


def test_stop_token_and_min_tokens(llm):
    (whole,) = llm.generate([[5, 6, 7]], GREEDY)
    stop = whole.token_ids[3]
    first = whole.token_ids.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,))
    (cut,) = llm.generate([[5, 6, 7]], params)
    assert cut.token_ids == whole.token_ids[: first + 1] and cut.finish_reason == "stop"
    params = SamplingParams(
        temperature=0.0, max_tokens=12, min_tokens=first + 3, stop_token_ids=(stop,)
    )
    (longer,) = llm.generate([[5, 6, 7]], params)
    assert len(longer.token_ids) >= first + 3
    assert stop not in longer.token_ids[: first + 2]


def test_logprobs_of_every_token(llm):
    (result,) = llm.generate([[5, 6]], SamplingParams(temperature=0.0, max_tokens=4, logprobs=3))
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    assert all(entry.rank == 1 and len(entry.top) == 3 for entry in result.logprobs)


def test_seeded_tokens_do_not_depend_on_batch_or_preemption(model):
    prompts = [[20 + i] * 6 for i in range(8)]
    params = [SamplingParams(temperature=1.0, seed=100 + i, max_tokens=14) for i in range(8)]
    wide = make(model, "kv_cache.block_size=4")
    narrow = make(
        model, "kv_cache.block_size=4", "kv_cache.num_blocks=12", "scheduler.batch_size=4"
    )
    expected = [result.token_ids for result in wide.generate(prompts, params)]
    assert [result.token_ids for result in narrow.generate(prompts, params)] == expected
    assert sum(request.num_preemptions for request in narrow.requests) > 0


def test_an_unseeded_result_can_be_repeated_from_its_recorded_seed(llm):
    (first,) = llm.generate([[5, 6]], SamplingParams(max_tokens=12))
    (again,) = llm.generate([[5, 6]], SamplingParams(max_tokens=12, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_requests_of_one_run_seed_have_seeds_of_their_own_that_come_again(model):
    params = SamplingParams(temperature=1.0, max_tokens=6)
    first = make(model, "data.run_seed=5").generate([[5, 6], [5, 6]], params)
    again = make(model, "data.run_seed=5").generate([[5, 6], [5, 6]], params)
    assert [result.seed for result in again] == [result.seed for result in first]
    assert [result.token_ids for result in again] == [result.token_ids for result in first]
    assert first[0].seed != first[1].seed


def test_a_long_prompt_is_cut_and_says_so(model, caplog):
    llm = make(model, "data.input_truncated_len=10")
    cut, short = llm.generate([list(range(5, 30)), [5]], GREEDY)
    assert cut.prompt_token_ids == list(range(5, 15)) and cut.num_truncated_tokens == 15
    assert short.num_truncated_tokens == 0
    assert caplog.messages == [
        "a prompt of 25 tokens is cut to data.input_truncated_len=10; its end is lost"
    ]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[5], []], GREEDY, "prompt"),
        (["ok", ""], GREEDY, "no token|empty"),
        ([[5], [99999]], GREEDY, "outside the model's vocabulary"),
        ([[5]], SamplingParams(stop_token_ids=(99999,)), "outside the model's vocabulary"),
    ],
)
def test_a_wrong_prompt_generates_nothing_and_harms_nobody(llm, prompts, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert not llm.parts.scheduler.has_work
    assert llm.parts.kv_cache.num_used_blocks == 0
    assert len(llm.generate([[5]], GREEDY)[0].token_ids) == 12


@pytest.mark.parametrize("prompts", [b"abc", {"prompt": "hi"}, None, 5])
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(RequestError, match="prompts is .*; allowed is text"):
        llm.generate(prompts, GREEDY)


def test_an_error_in_the_middle_leaves_a_usable_engine(llm):
    def fail(record, num_finished):
        if record.step % 3 == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6]] * 4, GREEDY, on_step=fail)
    assert not llm.parts.scheduler.has_work
    assert llm.parts.kv_cache.num_used_blocks == 0
    assert len(llm.generate([[5]], GREEDY)[0].token_ids) == 12


def test_fixed_steps_time_every_step(model):
    llm = make(model, "scheduler.fixed_steps=true", "scheduler.max_new_tokens=7")
    results = llm.generate([[5, 6], [7]], SamplingParams(temperature=0.0, max_tokens=3))
    assert [len(result.token_ids) for result in results] == [3, 3]
    assert [record.kind for record in llm.step_records] == ["prefill"] + ["decode"] * 7


def test_shape_only_model_runs_on_bytes():
    config = load_config(
        [
            "model=llama",
            "model.path=null",
            "model.with_ckpt=false",
            "+model.arch={hidden_size:64,intermediate_size:96,num_hidden_layers:2,"
            "num_attention_heads:4,vocab_size:300,max_position_embeddings:512,eos_token_id:299}",
        ]
    )
    results = OfflineInference(config).generate(["h\u00e9llo", "\u4f60\u597d"], GREEDY)
    assert [len(result.prompt_token_ids) for result in results] == [6, 6]
    assert all(result.token_ids for result in results)
