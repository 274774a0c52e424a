"""What reviewers see, as committed files: tests/inspect/diff/golden/<case>.<format>."""

from collections.abc import Callable
from pathlib import Path

import pytest

from inferkit.config.space import ConfigSpace
from inferkit.inspect.diff.compare import Comparison, compare
from inferkit.inspect.diff.sources import take_sides
from inferkit.inspect.diff.verb import FORMATS
from tests.inspect.diff.snapshots import derived, leaf, snapshot

GOLDEN = Path(__file__).parent / "golden"
EXPLICIT_TP2 = " ".join(
    f"parallel.{name}=2"
    for name in (
        "world_size",
        "attn_tp_size",
        "embed_tp_size",
        "lmhead_tp_size",
        "dense_tp_size",
        "shared_tp_size",
        "o_proj_tp_size",
        "moe_tp_size",
    )
)
SOME_KEYS = """\
# What was agreed on.
model:
  _target_: inferkit.models.dense.model.Qwen3ForCausalLM
  name: small
  path: null
  arch:
    architectures: [Qwen3ForCausalLM]
    vocab_size: 151936
    hidden_size: 1024
    intermediate_size: 3072
    num_hidden_layers: 28
    num_attention_heads: 16
    num_key_value_heads: 8
scheduler:
  batch_size: 64
data: {temperature: 0.7}
"""
QWEN = "model=qwen3_8b"
CASES: dict[str, tuple[str, ...]] = {
    "experiments": ("+experiment=qwen3_8b_tp1", "+experiment=qwen3_8b_tp2"),
    "defaults_and_prefill": ("", "+role=prefill parallel=tp16"),
    "no_effect": (f"{QWEN} parallel=tp2", f"{QWEN} {EXPLICIT_TP2}"),
    "same": (f"{QWEN} parallel=tp2", f"parallel=tp2 {QWEN}"),
    "prefill_and_decode": (
        f"+role=prefill {QWEN} parallel=tp4",
        f"+role=decode {QWEN} parallel=dp2tp2 kv_cache.block_size=256",
    ),
    "cluster": (
        f"+role=cluster {QWEN} model.with_ckpt=false "
        'cluster.prefill_overrides="parallel=tp2 scheduler.batch_size=8"',
    ),
    "broken_and_good": (
        f"{QWEN} parallel.world_size=15 scheduler.batch_size=-3 data.limit=-1",
        f"{QWEN} scheduler.batch_size=3",
    ),
    "file": (QWEN, "some.yaml"),
    "qwen3_235b": ("model=qwen3_235b_a22b parallel=tp16", "model=qwen3_235b_a22b parallel=dp8tp2"),
}

Golden = Callable[[Path, str], None]


@pytest.fixture(scope="module")
def space() -> ConfigSpace:
    return ConfigSpace()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("case", CASES)
def test_comparisons(
    case: str,
    golden: Golden,
    space: ConfigSpace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some.yaml").write_text(SOME_KEYS)

    found = compare(*take_sides(CASES[case], space))

    for name in ("text", "markdown"):
        check(golden, case, found, name)


@pytest.mark.parametrize("name", FORMATS)
def test_two_runs(golden: Golden, name: str) -> None:
    check(golden, "runs", compare(A, B), name)


def check(golden: Golden, case: str, comparison: Comparison, name: str) -> None:
    suffix = {"text": "txt", "markdown": "md", "json": "json"}[name]
    text = FORMATS[name](comparison)
    if name == "text":
        assert [line for line in text.splitlines()[2:] if len(line) > 100] == []
    golden(GOLDEN / f"{case}.{suffix}", text + "\n")


A = snapshot(
    "outputs/one",
    choices={"model": "own", "parallel": "tp2"},
    leaves={
        "model.path": leaf("/models/a_folder_of_a_model", ":"),
        "model.name": leaf("a|`b`", "conf/model/own.yaml:3"),
        "data.seed": leaf(None, "default"),
        "parallel.world_size": leaf(2, "conf/parallel/tp2.yaml:2"),
        "data.limit": leaf(3),
        "gone": leaf([1, 2], "default"),
    },
    derived=(
        derived("rank.heads", 4, "heads"),
        derived("rank.weight_bytes", 5 * 2**30, "bytes", "5,120 MiB"),
        derived("kv_cache.block_bytes", 2**20, "bytes", "1 MiB"),
        derived("groups.attn_tp_group", [[0, 1]], "ranks", "{0-1}"),
    ),
    warnings=("data.top_p=1: has no effect",),
    notes=("was recorded by a version without data.limit; the defaults are shown",),
    circumstances={
        "code": "files abcdef0123",
        "commit": "0123456789",
        "version torch": "2.13.0",
        "version python": "3.11.7",
        "host name": "one",
    },
    metrics={
        "num_requests": 8,
        "wall_time_s": 12.5,
        "output_tokens_per_s": 1024.25,
        "ttft_s": {"num": 8, "mean": 0.5, "p50": 0.123456, "p90": 0.7, "p99": 0.75},
        "num_preemptions": 0,
        "peak_memory_bytes": 1234567890,
        "kv_blocks_total": 97,
    },
)
B = snapshot(
    "outputs/two",
    choices={"model": "own", "parallel": "tp1"},
    leaves={
        "model.path": leaf("/models/a_folder_of_another_model_of_which_the_name_is_long", ":"),
        "model.name": leaf("", ":"),
        "data.seed": leaf(7, ":"),
        "parallel.world_size": leaf(1, "default"),
        "data.limit": leaf(4),
        "new": leaf({}, "default"),
    },
    derived=(
        derived("rank.heads", 8, "heads"),
        derived("rank.weight_bytes", 10 * 2**30, "bytes", "10,240 MiB"),
        derived("kv_cache.block_bytes", 2 * 2**20, "bytes", "2 MiB"),
    ),
    circumstances={
        "code": "files 0123abcdef",
        "commit": "9876543210",
        "version torch": "2.14.0",
        "version python": "3.11.7",
        "host name": "one",
        "environment OMP_NUM_THREADS": "2",
    },
    metrics={
        "num_requests": 8,
        "wall_time_s": 15.0,
        "output_tokens_per_s": 2000,
        "ttft_s": {"num": 8, "mean": 0.5, "p50": 0.1, "p90": 0.7, "p99": 0.755},
        "num_preemptions": 2,
        "peak_memory_bytes": 1234567890,
        "kv_blocks_total": 49,
    },
)
