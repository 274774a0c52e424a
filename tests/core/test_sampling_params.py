"""Ranges, defaults and messages of sampling parameters."""

from typing import Any

import pytest

from inferkit.core.errors import RequestError
from inferkit.core.sampling_params import MAX_SEED, SamplingParams, request_seed


def test_defaults_change_nothing_of_the_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty) == (1.0, 0.0)
    assert not params.is_greedy
    assert SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_p": 1},
        {"top_p": 1e-6},
        {"top_k": -1},
        {"top_k": 10**9},
        {"min_p": 1.0},
        {"seed": MAX_SEED},
        {"seed": 0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"max_tokens": 5, "min_tokens": 5},
        {"logprobs": 0},
        {"logprobs": 20},
    ],
)
def test_values_at_the_edge_are_allowed(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1 is out of range; allowed is >= 0\.0"),
        ({"temperature": float("nan")}, "temperature=nan is out of range"),
        ({"temperature": float("inf")}, "temperature=inf is out of range"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"temperature": True}, "temperature=True must be a number"),
        ({"top_p": 0.0}, "top_p=0.0 keeps no token; allowed is 0 < top_p <= 1"),
        ({"top_p": 1.1}, r"top_p=1\.1 is out of range; allowed is in \[0\.0, 1\.0\]"),
        ({"top_k": -2}, "top_k=-2 is out of range; allowed is >= -1"),
        ({"top_k": 2.0}, "top_k=2.0 must be an integer"),
        ({"min_p": -0.1}, "min_p=-0.1 is out of range"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 is not allowed"),
        ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0 is out of range"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1 is out of range"),
        ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1 is out of range"),
        ({"seed": -1}, "seed=-1 is out of range"),
        ({"seed": 2**63}, "seed=9223372036854775808 is out of range"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range; allowed is >= 1"),
        (
            {"max_tokens": 3, "min_tokens": 4},
            r"min_tokens=4 is out of range; allowed is in \[0, 3\]",
        ),
        ({"stop": ("a", "")}, r"stop=\['a', ''\] must hold non-empty strings"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids=-1 is out of range"),
        ({"logprobs": 21}, r"logprobs=21 is out of range; allowed is in \[0, 20\]"),
    ],
)
def test_values_out_of_range_name_field_value_and_range(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


def test_stop_takes_one_string_a_list_or_nothing() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]


def test_parameters_are_hashable_and_frozen() -> None:
    assert len({SamplingParams(stop="a"), SamplingParams(stop=("a",))}) == 1  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        SamplingParams().seed = 1  # type: ignore[misc]


def test_seeds_of_a_run_are_in_range_and_stay() -> None:
    seeds = [request_seed(7, index) for index in range(100)]

    assert len(set(seeds)) == 100
    assert all(0 <= seed < MAX_SEED for seed in seeds)
    assert request_seed(7, 0) == 6416731137294976416
