"""The sampler against a full computation, exact keep sets and the softmax distribution."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferkit.core.batch import BatchRow
from inferkit.core.errors import InferkitError
from inferkit.core.sampling_params import MAX_SEED
from inferkit.engine.sampler import Sampler, first_max
from inferkit.engine.sampling.noise import gumbel, random_bits, row_key
from tests.engine.rows import make_row

EOS = 2
VECTOR = [0.03, 0.09, 0.24, 0.64]


def sample(logits_SV: torch.Tensor, rows: list[BatchRow]) -> list[int]:
    before = logits_SV.clone()
    token_ids = Sampler(frozenset({EOS})).sample(logits_SV, rows).token_ids
    assert torch.equal(logits_SV.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))
    return token_ids


# -- greedy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [3, 130, 256, 300, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_lowest_id_among_the_highest_logits(
    vocab_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    # Few distinct values make ties, most of them far apart.
    logits = torch.randint(0, 4, (64, vocab_size), generator=generator).to(dtype).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits, [make_row(temperature=0.0)] * 64) == expected


@pytest.mark.parametrize("places", [[5, 900], [127, 128], [895, 896, 999], [896, 999], [999]])
def test_greedy_takes_the_first_of_equal_maxima_in_any_block(places: list[int]) -> None:
    logits = torch.full((1, 1000), -1.0)
    logits[0, places] = 3.0
    assert sample(logits, [make_row(temperature=0.0)]) == [places[0]]


def test_first_max_passes_nan_on_from_blocks_and_from_the_rest() -> None:
    logits = torch.zeros(3, 1000)
    logits[0, 500] = logits[1, 999] = float("nan")
    assert first_max(logits)[0].isnan().tolist() == [True, True, False]


def test_greedy_rows_do_not_see_the_sampled_rows_of_their_batch() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    alone = sample(logits, [make_row(temperature=0.0)] * 6)
    mixed = [
        make_row(temperature=0.0),
        make_row(temperature=2.0, seed=1),
        make_row(temperature=0.0),
        make_row(temperature=1.0, top_k=5, seed=2),
        make_row(temperature=1.0, repetition_penalty=1.3, top_p=0.5, seed=3),
        make_row(temperature=0.0),
    ]
    together = sample(logits, mixed)
    assert [together[i] for i in (0, 2, 5)] == [alone[i] for i in (0, 2, 5)]


# -- distribution ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, -0.5, 2.0, 0.0, 0.3, -2.0, 1.9, 0.8])
    num_draws = 20_000
    rows = [make_row(temperature=temperature, seed=seed) for seed in range(num_draws)]
    counts = Counter(sample(logits.expand(num_draws, -1), rows))
    expected = (logits / temperature).softmax(-1) * num_draws
    chi_square = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected.tolist()))
    assert chi_square < 24.3  # the 99.9 % quantile for 7 degrees of freedom


@pytest.mark.parametrize("varied", ["position", "sample_index", "seed"])
def test_draws_of_one_seed_are_independent_of_each_other(varied: str) -> None:
    """Pairs of neighbouring draws fill all 16 combinations of four equal tokens evenly."""
    num_draws = 8_000
    rows = [
        make_row(
            prompt=[0] * (i + 1) if varied == "position" else [0],
            sample_index=i if varied == "sample_index" else 0,
            seed=i if varied == "seed" else 11,
        )
        for i in range(num_draws if varied != "position" else 2_000)
    ]
    tokens = sample(torch.zeros(len(rows), 4), rows)
    counts = Counter(itertools.pairwise(tokens))
    expected = (len(rows) - 1) / 16
    chi_square = sum(
        (counts[p] - expected) ** 2 / expected for p in itertools.product(range(4), repeat=2)
    )
    assert chi_square < 37.7  # the 99.9 % quantile for 15 degrees of freedom


# -- same seed, same tokens --------------------------------------------------------------------

SAMPLINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"min_p": 0.1},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 0.95, "temperature": 4.0},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.01, "temperature": 1.5},
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    {"min_tokens": 9, "stop_token_ids": (4, 5), "temperature": 0.0},
]


def test_a_row_gets_the_same_token_in_a_batch_and_alone() -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1)) * 2
    rows = [
        make_row(
            request_id=i,
            prompt=[i, i + 1],
            output=[3] * (i % 5),
            seed=i * 7919,
            **SAMPLINGS[i % len(SAMPLINGS)],
        )
        for i in range(40)
    ]
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2)).tolist()
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_seed_sample_index_and_position_each_change_the_draw() -> None:
    logits = torch.zeros(1, 10_000)
    base = sample(logits, [make_row(seed=MAX_SEED)])
    assert sample(logits, [make_row(seed=MAX_SEED)]) == base
    assert sample(logits, [make_row(seed=MAX_SEED - 1)]) != base
    assert sample(logits, [make_row(seed=MAX_SEED, sample_index=1)]) != base
    assert sample(logits, [make_row(seed=MAX_SEED, prompt=[0, 0])]) != base
    # Only the number of tokens counts, so a request that is computed again goes on as before.
    moved = make_row(seed=MAX_SEED, prompt=[9], output=[])
    assert sample(logits, [moved]) == base


# -- the bound changes nothing -----------------------------------------------------------------


def full_computation(logits: list[float], row: BatchRow) -> int:
    """Sampling by its definition: sort, filter, add noise to every kept token, take the best."""
    request, p = row.request, row.request.sampling
    best = max(logits)
    scaled = [(value - best) / p.temperature for value in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order if math.exp(scaled[i]) >= p.min_p]
    if p.top_k > 0:
        order = order[: p.top_k]
    total = math.fsum(math.exp(scaled[i]) for i in order)
    kept, reached = [], 0.0
    for i in order:
        if p.top_p < 1.0 and reached >= p.top_p * total:
            break
        kept.append(i)
        reached += math.exp(scaled[i])
    key = torch.tensor([row_key(request.seed, request.sample_index, request.num_tokens)])
    noise = gumbel(random_bits(key, torch.arange(len(logits)).unsqueeze(0)))[0].tolist()
    return min(kept, key=lambda i: (-(scaled[i] + noise[i]), i))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, MAX_SEED),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 15.0, 60.0]),
    levels=st.sampled_from([None, 8, 64]),
    vocab_size=st.sampled_from([2, 30, 1000, 2500]),
    temperature=st.sampled_from([1e-30, 0.05, 0.7, 1.0, 2.5, 50.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.03]),
    top_k=st.sampled_from([0, 0, 1, 20, 1200]),
    top_p=st.sampled_from([1.0, 1.0, 0.1, 0.9, 0.999]),
)
def test_the_result_is_that_of_the_full_computation(
    seed: int,
    spread: float,
    levels: int | None,
    vocab_size: int,
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
) -> None:
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(seed % 2**31))
    logits = logits * spread
    if levels is not None:  # ties, as a narrow dtype makes them
        logits = (logits * levels / 8).round() * 8 / levels
    rows = [
        make_row(seed=seed, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p),
        make_row(seed=seed, sample_index=1, temperature=temperature),
    ]
    expected = [full_computation(logits[i].tolist(), row) for i, row in enumerate(rows)]
    assert sample(logits, rows) == expected


# -- penalties and suppressed tokens -----------------------------------------------------------


def test_penalties_touch_only_their_rows_and_come_before_greedy() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0], [1.0, 0.9, 0.0], [1.0, 0.9, 0.0]])
    rows = [
        make_row(prompt=[0], temperature=0.0),
        make_row(prompt=[0], temperature=0.0, repetition_penalty=1.2),
        make_row(prompt=[0], temperature=0.0, presence_penalty=1.0),
    ]
    assert sample(logits, rows) == [0, 1, 0]
    rows[2] = make_row(prompt=[1], output=[0], temperature=0.0, presence_penalty=1.0)
    assert sample(logits, rows) == [0, 1, 1]


def test_min_tokens_suppresses_what_would_end_the_request() -> None:
    logits = torch.tensor([[0.0, 1.0, 4.0, 3.0, 2.0]])  # EOS is the best, then 3, then 4

    def first(**kwargs: Any) -> int:
        return sample(logits, [make_row(temperature=0.0, **kwargs)])[0]

    assert first() == EOS
    assert first(min_tokens=2) == 3
    assert first(min_tokens=2, output=[1]) == 3
    assert first(min_tokens=2, output=[1, 1]) == EOS
    assert first(min_tokens=2, stop_token_ids=(3,)) == 4
    assert first(min_tokens=2, stop_token_ids=(3, 900)) == 4
    assert first(min_tokens=2, stop_token_ids=(3,), ignore_eos=True) == EOS
    assert first(min_tokens=2, stop_token_ids=(EOS,), ignore_eos=True) == 3


# -- log-probabilities -------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = torch.tensor([VECTOR, VECTOR, VECTOR]).log() + 3.0
    rows = [
        make_row(temperature=0.0),
        make_row(temperature=0.0, logprobs=2, prompt=[3], repetition_penalty=100.0),
        make_row(temperature=0.1, top_k=1, logprobs=0),
    ]
    output = Sampler(frozenset()).sample(logits, rows)
    none, second, third = output.logprobs
    assert none is None
    assert second is not None and third is not None
    assert second.token_id == output.token_ids[1] != 3
    assert second.rank == 4 - second.token_id
    assert second.logprob == pytest.approx(math.log(VECTOR[second.token_id]), abs=1e-6)
    assert [token_id for token_id, _ in second.top] == [3, 2]
    assert [p for _, p in second.top] == pytest.approx([math.log(0.64), math.log(0.24)], abs=1e-6)
    assert (third.token_id, third.rank, third.top) == (3, 1, ())


def test_logprobs_of_more_tokens_than_there_are() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0]])
    (entry,) = Sampler().sample(logits, [make_row(temperature=0.0, logprobs=20)]).logprobs
    assert entry is not None
    assert [token_id for token_id, _ in entry.top] == [0, 1, 2]
    assert entry.rank == 1


# -- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_p": 0.5}])
def test_broken_logits_name_their_requests(value: float, sampling: dict[str, Any]) -> None:
    logits = torch.randn(4, 300)
    logits[1, 7] = logits[3, 299] = value
    rows = [make_row(request_id=10 + i, **sampling) for i in range(4)]
    with pytest.raises(InferkitError, match=r"request\(s\) \[11, 13\] hold NaN"):
        sample(logits, rows)


def test_a_suppressed_token_does_not_hide_a_nan() -> None:
    logits = torch.zeros(1, 300)
    logits[0, EOS] = float("nan")
    with pytest.raises(InferkitError, match=r"request\(s\) \[0\]"):
        sample(logits, [make_row(temperature=0.0, min_tokens=1)])


def test_rows_and_logits_must_agree() -> None:
    with pytest.raises(ValueError, match=r"float32 \[1, vocabulary\]"):
        Sampler().sample(torch.zeros(2, 5), [make_row()])
    with pytest.raises(ValueError, match="float16"):
        Sampler().sample(torch.zeros(1, 5, dtype=torch.float16), [make_row()])


def test_no_rows_give_no_tokens() -> None:
    output = Sampler().sample(torch.zeros(0, 5), [])
    assert output.token_ids == [] and output.logprobs == []
