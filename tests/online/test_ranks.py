"""Several ranks in step: one hears, all do; where one computes, all enter."""

import pytest

from inferkit.online.loop import LOCK_STEP_WAIT_MS
from tests.fakes import next_token
from tests.online import rank_cases
from tests.online.looping import generate


def test_ranks_of_a_dp_rank_do_what_its_leader_hears(ranks):
    leader, follower = ranks(2).run(rank_cases.tensor_parallel)
    assert leader["rows"] == follower["rows"] and len(leader["rows"]) > 5
    assert leader["ticks"] == follower["ticks"] == 40
    assert leader["sent"] and not follower["sent"]
    aborted_at = [len(rows) for rows in leader["rows"]]
    assert max(aborted_at) == 2, "both requests ran together before one was over"


@pytest.mark.parametrize(("world_size", "attn_tp_size"), [(2, 1), (4, 2)])
def test_dp_ranks_that_compute_together_step_together(ranks, world_size, attn_tp_size):
    results = ranks(world_size).run(rank_cases.data_parallel, attn_tp_size)
    assert len({len(result["dummies"]) for result in results}) == 1, "a missing rank dead-locks"
    assert {result["ticks"] for result in results} == {26}, "the last one told to stop decides"
    first, last = results[0], results[-attn_tp_size]
    # DP rank 0 begins a tick earlier and has 3 steps, DP rank 1 has 7.
    assert first["dummies"] == [False] * 3 + [True] * 5
    assert last["dummies"] == [True] + [False] * 7
    for dp_rank, result in enumerate((first, last)):
        history = list(generate(dp_rank + 1).token_ids)
        tokens = []
        for _ in range(3 + 4 * dp_rank):
            tokens.append(next_token(history))
            history.append(tokens[-1])
        assert result["tokens"] == tokens
    assert set(first["waits"][:3]) == {0, LOCK_STEP_WAIT_MS}
    assert set(first["waits"][3:11]) == {0}, "a rank without work must not keep the others"
