"""Prompt files and their token ids; every fault is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from inferkit.config.schema import DataConfig, DatasetName
from inferkit.core.errors import ConfigError, RequestError
from inferkit.offline.prompts import load_prompts, render_prompt
from tests.offline.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
MESSAGES = [{"role": "system", "content": ""}, {"role": "user", "content": "Hello world"}]


def write(path: Path, *records: Any) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def load(path: Path, dataset: DatasetName = DatasetName.jsonl, limit: int | None = None) -> Any:
    return load_prompts(DataConfig(dataset=dataset, dataset_path=str(path), limit=limit))


# -- files -------------------------------------------------------------------------------------


def test_default_prompts_are_varied_messages() -> None:
    prompts: Any = load_prompts(DataConfig())
    assert len(prompts) == 16
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    assert sum(prompt[0]["role"] == "system" for prompt in prompts) >= 2
    assert any(not prompt[-1]["content"].isascii() for prompt in prompts)
    assert len({prompt[-1]["content"] for prompt in prompts}) == 16


def test_jsonl_holds_text_ids_and_messages(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "Hello \u2028 world", "id": 7},
        "",
        {"prompt": [1, 2, 3], "messages": None},
        {"messages": MESSAGES},
    )
    assert load(path) == ["Hello \u2028 world", [1, 2, 3], MESSAGES]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", {"prompt": "third"})
    write(tmp_path / "a.jsonl", {"prompt": "first"}, {"prompt": "second"})
    write(tmp_path / "notes.txt", "no prompt")
    assert load(tmp_path) == ["first", "second", "third"]


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"}, "broken")
    assert load(path, limit=2) == ["a", "b"]
    assert len(load_prompts(DataConfig(limit=3))) == 3


def test_long_bench_makes_one_user_message(tmp_path: Path) -> None:
    path = write(
        tmp_path / "qasper.jsonl",
        {"context": "A paper.", "input": "Who?", "dataset": "qasper", "answers": ["me"]},
        {"context": "Only text.", "input": ""},
        {"input": "Only a question?"},
    )
    contents = ["A paper.\n\nWho?", "Only text.", "Only a question?"]
    assert load(path, DatasetName.LongBench) == [
        [{"role": "user", "content": content}] for content in contents
    ]


def test_infinite_bench_appends_options(tmp_path: Path) -> None:
    path = write(
        tmp_path / "choice.jsonl",
        {"context": "A book.", "input": "Who?", "options": ["Ann", "Bob"], "answer": ["Ann"]},
        {"context": "A book.", "input": "Who?", "options": []},
        {"context": "A book.", "input": "Who?"},
    )
    contents = ["A book.\n\nWho?\n\nA. Ann\nB. Bob", "A book.\n\nWho?", "A book.\n\nWho?"]
    assert load(path, DatasetName.InfiniteBench) == [
        [{"role": "user", "content": content}] for content in contents
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{broken", r"a\.jsonl line 2: not JSON .*one JSON object"),
        (["a list"], r"line 2: list found; every line must be one JSON object"),
        ({"text": "a"}, r"line 2: fields \['text'\] found; exactly one of `prompt` and `messages`"),
        ({"prompt": "a", "messages": MESSAGES}, r"line 2: .*exactly one of"),
        ({"prompt": ""}, r"line 2: field `prompt`: the text is empty"),
        ({"prompt": []}, r"field `prompt`: the list is empty"),
        ({"prompt": 5}, r"field `prompt`: int found; allowed is text, a list of messages or"),
        ({"prompt": [1, -2]}, r"field `prompt`: -2 found; .*ids >= 0"),
        ({"prompt": [1, True]}, r"field `prompt`: True found"),
        ({"prompt": ["a", "b"]}, r"field `prompt`: 'a' found; allowed is a list of messages or"),
        ({"prompt": "\ud83d"}, r"character 0 is half of a surrogate pair"),
        ({"messages": "hi"}, r"field `messages` is str; allowed is a list"),
        (
            {"messages": [{"role": "user"}]},
            r"field `messages`: message .* needs a string `content`",
        ),
        ({"messages": [{"content": "a"}]}, r"needs a string `role`"),
        (
            {"prompt": "a", "stop": ["\n"]},
            r"a\.jsonl line 2: field `stop` is not known; allowed is prompt, messages, id$",
        ),
        (
            {"messages": MESSAGES, "max_tokens": 4},
            r"line 2: field `max_tokens` is not known; allowed is prompt, messages, id; for all "
            r"prompts of the run set scheduler\.max_new_tokens$",
        ),
        ({"id": 1, "prompt": "a", "temperature": 0}, r"`temperature` .* set data\.temperature$"),
        ({"messages": [MESSAGES[0], "hi"]}, r"message 'hi' is no object with role and content"),
    ],
)
def test_a_broken_line_names_file_line_field_and_what_is_allowed(
    tmp_path: Path, record: Any, message: str
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "fine"}, record)
    with pytest.raises(ConfigError, match=r"data\.dataset_path: .*" + message):
        load(path)


@pytest.mark.parametrize(
    ("dataset", "record", "message"),
    [
        (DatasetName.LongBench, {"answers": []}, "`context` and `input` are both empty"),
        (DatasetName.LongBench, {"context": 5}, "field `context` is int; allowed is a string"),
        (DatasetName.InfiniteBench, {"input": ["a"]}, "field `input` is list"),
        (DatasetName.InfiniteBench, {"input": "a", "options": "ab"}, "field `options` is 'ab'"),
        (DatasetName.InfiniteBench, {"options": ["a"]}, "both empty"),
    ],
)
def test_a_broken_benchmark_line_is_named(
    tmp_path: Path, dataset: DatasetName, record: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match="line 1: .*" + message):
        load(write(tmp_path / "a.jsonl", record), dataset)


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        load(path)


def test_paths_without_prompts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; give a .jsonl file or a folder"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="holds no .jsonl file"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="holds no prompt"):
        load(write(tmp_path / "a.jsonl", ""))
    with pytest.raises(ConfigError, match="data.dataset=LongBench needs data.dataset_path"):
        load_prompts(DataConfig(dataset=DatasetName.LongBench))
    with pytest.raises(ConfigError, match="data.limit=0"):
        load_prompts(DataConfig(limit=0))


# -- token ids ---------------------------------------------------------------------------------


def test_messages_go_through_the_template_once() -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    token_ids = render_prompt(tokenizer, MESSAGES)
    expected = tokenizer.apply_chat_template(
        MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert token_ids == expected
    assert token_ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(token_ids) == (
        "<s><|im_start|>system\n<|im_end|>\n<|im_start|>user\nHello world<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", ["Hello", "<s>Hello"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_text_gets_the_tokenizers_own_bos_once(text: str, adds_bos: bool) -> None:
    token_ids = render_prompt(make_tokenizer(adds_bos=adds_bos), text)
    assert token_ids[0] == 0 or not (adds_bos or text.startswith("<s>"))
    assert token_ids.count(0) == int(adds_bos or text.startswith("<s>"))
    assert TOKENIZER.decode(token_ids, skip_special_tokens=True) == "Hello"


def test_token_ids_pass_through() -> None:
    assert render_prompt(make_tokenizer(adds_bos=True), [5, 6, 7]) == [5, 6, 7]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: the text is empty"),
        ([], "prompt: the list is empty"),
        ([{"role": "user"}], "needs a string `content`"),
        (["a", "b"], "'a' found"),
        (None, "NoneType found"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_prompt(TOKENIZER, prompt)


def test_messages_without_a_template_say_what_to_do() -> None:
    tokenizer = make_tokenizer(has_chat_template=False)
    with pytest.raises(RequestError, match="no chat template.*give the prompt as text"):
        render_prompt(tokenizer, MESSAGES)


def test_what_a_template_refuses_is_passed_on() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(RequestError, match=r"\['system', 'user'\]: System role not supported"):
        render_prompt(tokenizer, MESSAGES)
