"""Incremental text: whole characters, stop strings over token borders, nothing lost."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferkit.offline.text_stream import TextStream, decode, find_stop
from tests.offline.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"


def byte_ids(text: str) -> list[int]:
    """One token per byte, whatever merges the tokenizer has."""
    table = byte_to_character()
    return [TOKENIZER.convert_tokens_to_ids(table[byte]) for byte in text.encode()]


def byte_to_character() -> dict[int, str]:
    """The alphabet of byte-level tokenizers: printable bytes stand for themselves."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


def random_ids(text: str, seed: int) -> list[int]:
    """Tokens of `text` in a random split: some words as tokens, some as bytes."""
    generator = random.Random(seed)
    ids: list[int] = []
    start = 0
    while start < len(text):
        end = start + generator.randint(1, 5)
        piece = text[start:end]
        encode = byte_ids if generator.random() < 0.5 else TOKENIZER.encode
        ids += encode(piece)
        start = end
    return ids


def run(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """All deltas of a stream that is fed token by token until it stops."""
    stream = TextStream(TOKENIZER, stop)
    deltas = []
    for token_id in ids:
        is_stopped = stream.append([token_id])
        deltas.append(stream.delta())
        if is_stopped:
            break
    deltas.append(stream.finish())
    return deltas, stream


TEXTS = st.text(
    alphabet=st.sampled_from("ab .\n\u4f60\u597d\u4e16\u00e9\U0001f600\u200d\U0001f469"),
    max_size=40,
)
STOPS = st.lists(
    st.text(alphabet="ab .\n\u4f60\u597d\U0001f600", min_size=1, max_size=4), max_size=3
).map(tuple)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, seed=st.integers(0, 2**32), stop=STOPS)
def test_deltas_together_are_the_final_text(text: str, seed: int, stop: tuple[str, ...]) -> None:
    ids = random_ids(text, seed)
    assert decode(TOKENIZER, ids) == text
    deltas, stream = run(ids, stop)
    place = find_stop(text, stop)
    kept = ids if stream.stop_len is None else ids[: stream.stop_len]
    assert "".join(deltas) == decode(TOKENIZER, kept, stop)
    assert (stream.stop_len is None) == (place < 0)
    if place < 0:
        assert "".join(deltas) == text
    # A stop string that ends earlier wins, though another one may begin before it.
    assert text.startswith("".join(deltas))
    assert all(string not in "".join(deltas) for string in stop)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30),
    cut=st.integers(0, 30),
    stop=st.sampled_from([(), ("e",), ("he", "\ufffd"), ("ab", "b")]),
)
def test_any_tokens_stream_to_their_decoded_text(
    ids: list[int], cut: int, stop: tuple[str, ...]
) -> None:
    """Broken characters and special tokens included, at any point of the end."""
    ids = ids[:cut]
    deltas, stream = run(ids, stop)
    kept = ids if stream.stop_len is None else ids[: stream.stop_len]
    assert "".join(deltas) == decode(TOKENIZER, kept, stop)
    if not stop:
        assert "".join(deltas) == TOKENIZER.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["\u4f60\u597d", "\U0001f600!", FAMILY, "caf\u00e9"])
def test_a_character_comes_whole(text: str) -> None:
    deltas, _ = run(byte_ids(text))
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)


def test_an_output_that_ends_inside_a_character_ends_as_decode_has_it() -> None:
    ids = byte_ids("ok\u4f60")[:-1]
    deltas, _ = run(ids)
    assert deltas[:-1] == ["o", "k", "", ""]
    assert "".join(deltas) == TOKENIZER.decode(ids, skip_special_tokens=True) == "ok\ufffd"


def test_the_rest_of_a_character_that_the_prompt_began_brings_no_prompt_text() -> None:
    prompt, output = byte_ids("secret \u4f60")[:-1], byte_ids("\u4f60 yes")[-5:]
    assert TOKENIZER.decode(prompt + output) == "secret \u4f60 yes"
    deltas, _ = run(output)
    assert "".join(deltas) == "\ufffd yes"


def test_a_stop_string_is_found_over_tokens_and_nothing_of_it_is_delivered() -> None:
    deltas, stream = run(byte_ids("one\n\nHuman: two"), ("\n\nHuman:",))
    assert "".join(deltas) == "one"
    assert stream.stop_len == len("one\n\nHuman:")


def test_text_that_only_looked_like_a_stop_string_is_delivered_later() -> None:
    deltas, stream = run(byte_ids("a<stx"), ("<stop>",))
    assert deltas == ["a", "", "", "", "<stx", ""]
    assert stream.stop_len is None
    deltas, _ = run(byte_ids("a<st"), ("<stop>",))
    assert deltas == ["a", "", "", "", "<st"]


def test_the_earliest_of_several_stop_strings_in_one_token_counts() -> None:
    text = max((TOKENIZER.decode([i]) for i in range(4, len(TOKENIZER))), key=len)
    (token_id,) = TOKENIZER.encode(text)
    assert len(text) > 3
    deltas, stream = run([token_id], (text[2:], text[1:], text[-1]))
    assert "".join(deltas) == text[:1]
    assert stream.stop_len == 1


def test_tokens_after_a_stop_string_are_ignored() -> None:
    stream = TextStream(TOKENIZER, ("b",))
    assert stream.append(byte_ids("abab"))
    assert not stream.append(byte_ids("b"))
    assert stream.stop_len == 2
    assert stream.delta() + stream.finish() == "a"


def test_special_tokens_are_skipped_and_do_not_break_a_stop_string() -> None:
    (end,) = TOKENIZER.encode("</s>")
    deltas, stream = run([*byte_ids("xEN"), end, *byte_ids("D!")], ("END",))
    assert "".join(deltas) == "x"
    assert stream.stop_len == 5


def test_find_stop() -> None:
    assert find_stop("abcabc", ["c", "bc"]) == 1
    assert find_stop("abcabc", ["c", "bc"], 2) == 2
    assert find_stop("abc", ["x"]) == find_stop("abc", []) == -1


def test_no_tokens_give_no_text() -> None:
    stream: Any = TextStream(TOKENIZER, ("a",))
    assert (stream.delta(), stream.finish()) == ("", "")
