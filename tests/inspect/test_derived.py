"""Derived values against arithmetic by hand."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferkit.config.check import Checker
from inferkit.config.space import ConfigSpace
from inferkit.inspect.derived import DERIVED_NAMES, derived_of, derived_values
from inferkit.inspect.snapshot import Derived

pytestmark = pytest.mark.usefixtures("empty_cache")
SPACE = ConfigSpace()
# Two layers of hidden size 64, 4 query and 2 KV heads of size 16, MLPs of size 128, 260 words.
KEYS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 2048,
}
Derive = Callable[..., dict[str, Derived]]


@pytest.fixture
def derive(tmp_path: Path) -> Derive:
    """`derive(*overrides)` of a tiny Llama, unless the overrides choose another model."""
    (tmp_path / "config.json").write_text(json.dumps(KEYS))

    def run(*overrides: str) -> dict[str, Derived]:
        own = any(word.startswith("model=") for word in overrides)
        words = overrides if own else ("model=llama", f"model.path={tmp_path}", *overrides)
        checked = Checker(SPACE, is_run=False, asks_host=False).check_overrides(words)
        assert checked.faults == ()
        assert checked.config is not None
        return {one.name: one for one in derived_values(checked.config, checked.files.arch)}

    return run


def test_of_one_rank(derive: Derive) -> None:
    found = derive("scheduler.batch_size=8", "scheduler.max_new_tokens=44")

    attention = 64 * (4 + 2 * 2) * 16 + 4 * 16 * 64
    layer = attention + 3 * 64 * 128 + 2 * 64
    weights = 2 * layer + 64 + 2 * 260 * 64  # embedding and head apart
    per_token = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, size, bytes
    assert {name: one.value for name, one in found.items()} == {
        "parallel.attn_dp_size": 1,
        "parallel.moe_ep_size": 1,
        "parallel.embed_dp_size": 1,
        "parallel.ranks_per_node": 1,
        "scheduler.batch_size_per_dp_rank": 8,
        "rank.heads": 4,
        "rank.kv_heads": 2,
        "model.parameters": weights,
        "rank.parameters": weights,
        "rank.weight_bytes": 2 * weights,
        "rank.kv_bytes_per_token": per_token,
        "kv_cache.block_bytes": 128 * per_token,
        "kv_cache.blocks_per_request": 3,  # 256 + 44 tokens in blocks of 128
        "kv_cache.blocks_wanted": 8 * 3 + 1,
        "kv_cache.blocks": 25,
        "kv_cache.pool_bytes": 25 * 128 * per_token,
        "kv_cache.concurrent_requests": 8,
    }
    assert found["rank.parameters"].formula == (
        f"attention {2 * attention:,} + MLPs {2 * 3 * 64 * 128:,} + norms {5 * 64:,} + "
        f"embedding {260 * 64:,} + head {260 * 64:,}"
    )
    assert found["rank.kv_bytes_per_token"].formula.endswith("= 2 * 2 * 2 * 16 * 2")
    assert found["rank.weight_bytes"].formula.endswith(f"= {weights:,} * 2")


def test_heads_are_padded_and_replicated(derive: Derive) -> None:
    found = derive("parallel=tp8", "model.dtype=float32")

    assert (found["rank.heads"].value, found["rank.kv_heads"].value) == (1, 1)
    assert found["rank.heads"].text == "1 of 4 query heads (8 with padding)"
    assert found["rank.heads"].formula == "4 query heads padded to 8 / attn_tp_size = 8 / 8"
    assert found["rank.kv_heads"].text == "1 of 2 KV heads, each on 4 ranks"
    assert found["rank.kv_heads"].formula == "2 KV heads on attn_tp_size = 8 ranks, each on 4"
    assert found["rank.kv_bytes_per_token"].value == 2 * 2 * 1 * 16 * 4


def test_dp_ranks_have_requests_of_their_own(derive: Derive) -> None:
    found = derive("parallel=dp2tp4", "scheduler.batch_size=8", "engine.max_model_len=128")

    assert found["scheduler.batch_size_per_dp_rank"].value == 4
    assert found["kv_cache.blocks"].value == 4 * 1 + 1
    assert found["kv_cache.concurrent_requests"].value == 8
    assert found["groups.attn_tp_group"].value == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found["groups.dp_group"].value == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert found["groups.dp_leader_group"].text == "{0,4}"
    assert found["groups.cp_group"].text == "every rank alone"


def test_a_prefix_cache_wants_twice_the_blocks(derive: Derive) -> None:
    found = derive("kv_cache.enable_prefix_cache=true", "scheduler.batch_size=8")

    assert found["kv_cache.blocks_wanted"].value == 8 * 3 * 2 + 1
    assert found["kv_cache.blocks_wanted"].formula.endswith("= 8 * 3 * 2 + 1")
    assert found["kv_cache.concurrent_requests"].value == 8  # no more than the batch


def test_a_pool_of_the_users_own_size(derive: Derive) -> None:
    found = derive("kv_cache.num_blocks=10", "scheduler.batch_size=8")

    assert found["kv_cache.blocks"].value == 10
    assert found["kv_cache.concurrent_requests"].value == 3  # 9 blocks, 3 for each
    assert found["kv_cache.concurrent_requests"].formula.endswith("= min(8, 9 / 3) * 1")


def test_a_pool_that_memory_limits(derive: Derive) -> None:
    weights = derive()["rank.weight_bytes"].value
    room = 10 * 128 * 256  # of ten blocks
    found = derive(f"platform.device_memory={weights + 2 * room}", "kv_cache.mem_fraction=0.5")

    assert found["kv_cache.blocks_wanted"].value == 32 * 3 + 1
    assert found["kv_cache.blocks"].value == 10
    assert f"min(97, {room:,} / {128 * 256:,})" in found["kv_cache.blocks"].formula
    assert found["kv_cache.concurrent_requests"].value == 3


def test_experts_and_a_latent_cache(derive: Derive) -> None:
    moe = derive("model=qwen3_235b_a22b", "parallel=dp2tp8", "parallel.moe_tp_size=4")
    assert moe["rank.experts"].value == 128 // (16 // 4)
    assert moe["rank.experts"].text == "32 of 128 in a layer, 1/4 of each"

    latent = derive("model=deepseek_r1_671b", "parallel=tp32")
    assert latent["rank.kv_bytes_per_token"].value == 61 * (512 + 64) * 2
    assert latent["rank.kv_bytes_per_token"].formula.endswith("= 61 * (512 + 64) * 2")
    assert latent["rank.heads"].value == 128 // 32
    assert "rank.kv_heads" not in latent


def test_windows_keep_less_of_a_long_request(derive: Derive) -> None:
    found = derive("model=gpt_oss_20b", "engine.max_model_len=4096")

    # 12 of 24 layers keep a window of 128 tokens and a block of 128.
    assert found["kv_cache.blocks_per_request"].value == -(-(12 * 4096 + 12 * 256) // 24 // 128)
    assert "windows included" in found["kv_cache.blocks_per_request"].formula


def test_without_the_models_files_the_sizes_of_the_ranks_are_known(derive: Derive) -> None:
    found = derive("model=smollm2_135m", "parallel=tp2")

    assert {name.split(".")[0] for name in found} == {"parallel", "scheduler", "groups"}


def test_a_router_derives_nothing(derive: Derive) -> None:
    assert derive("+role=router") == {}


def test_a_cluster_derives_its_sides_and_their_ranks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KEYS))
    own = 'cluster.decode_overrides="parallel=dp2"'
    words = ["+role=cluster", "model=llama", f"model.path={tmp_path}", "cluster.prefill=2", own]
    checked = Checker(SPACE, is_run=False, asks_host=False).check_overrides(words)

    found = {one.name: one for one in derived_of(checked)}

    assert found["cluster.ranks"].value == 2 * 1 + 1 * 2
    assert found["cluster.ranks"].formula.endswith("= 2 * 1 + 1 * 2")
    assert found["prefill.parallel.attn_dp_size"].value == 1
    assert found["decode.parallel.attn_dp_size"].value == 2
    assert found["decode.groups.dp_group"].value == [[0, 1]]
    # Both have the model's context, prefill keeps prefixes too.
    assert found["decode.kv_cache.blocks_wanted"].value == 32 * 16 + 1
    assert found["prefill.kv_cache.blocks_wanted"].value == 2 * 32 * 16 + 1


@pytest.mark.parametrize(
    "fault",
    [
        "platform.device_memory=1000",
        "router.port=-1",
        "scheduler._target_=nowhere.Mine",
        "+scheduler.params.api_key=${oc.env:NOT_SET_KEY}",
    ],
)
def test_faults_that_change_no_size_hide_none(tmp_path: Path, fault: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KEYS))
    words = ["model=llama", f"model.path={tmp_path}", fault]
    checked = Checker(SPACE, is_run=False, asks_host=False).check_overrides(words)

    found = {one.name: one.value for one in derived_of(checked)}

    assert checked.faults != ()
    assert found["rank.heads"] == 4
    assert found["kv_cache.blocks_per_request"] == 3


def test_what_has_faults_of_sizes_derives_nothing() -> None:
    assert derived_of(Checker(SPACE, is_run=False).check_overrides(["parallel=tp3"])) == ()


@pytest.mark.parametrize("option", ["dp8tp2", "tp16", "cp4", "dp4tp4", "ep16"])
def test_the_numbers_of_a_group_are_those_of_its_formula(derive: Derive, option: str) -> None:
    for name, one in derive(f"parallel={option}", "parallel.moe_tp_size=2").items():
        if not name.startswith("groups.") or name == "groups.dp_leader_group":
            continue
        size, *apart = map(int, re.findall(r"= (\d+)", one.formula))
        assert {len(ranks) for ranks in one.value} == {size}, name
        steps = {
            right - left
            for ranks in one.value
            for left, right in zip(ranks, ranks[1:], strict=False)
        }
        assert steps <= set(apart or [1]), name


def test_all_names_are_known(derive: Derive) -> None:
    found = derive("parallel=tp2")
    moe = derive("model=qwen3_235b_a22b", "parallel=dp8tp2")

    names = {name for name in found.keys() | moe.keys() if not name.startswith("groups.")}
    assert names == set(DERIVED_NAMES)


def test_a_bound_is_told_where_no_memory_is_looked_at(derive: Derive) -> None:
    names = ("kv_cache.blocks", "kv_cache.pool_bytes", "kv_cache.concurrent_requests")
    of_memory = derive("platform.device_memory=1000000000")
    of_blocks = derive("kv_cache.num_blocks=50")

    assert [one.name for one in derive().values() if one.is_at_most] == list(names)
    assert not any(one.is_at_most for one in (*of_memory.values(), *of_blocks.values()))
