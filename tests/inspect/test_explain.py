"""The verb `explain`, called as the command line calls it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from inferkit.config.arguments import UsageError, parse_arguments
from inferkit.config.provenance import write_run
from inferkit.config.recorded import origins_of_job, write_origins
from inferkit.config.space import ConfigSpace
from inferkit.core.errors import ConfigError
from inferkit.inspect import explain
from inferkit.inspect.snapshot import Snapshot

pytestmark = pytest.mark.usefixtures("empty_cache")

MEANING = (
    "  Output tokens of a request that asks for no other number; "
    "in a role 0 = to the end of the context.\n"
)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`told(*words)` is what `inferkit explain WORDS` prints."""

    def run(*words: str) -> str:
        assert explain.run(parse_arguments(words, explain.add_options)) == 0
        text = capsys.readouterr().out
        assert all(len(line) <= 130 for line in text.splitlines() if "--format" not in words)
        return re.sub(r"(schema\.py|conf/role/\w+\.yaml):\d+", r"\1:N", text)

    return run


def test_a_key_with_all_who_set_it(told: Callable[..., str]) -> None:
    assert told("scheduler.max_new_tokens", "+role=decode", "scheduler.max_new_tokens=7") == (
        "scheduler.max_new_tokens = 7\n"
        f"{MEANING}"
        "  set by      command line, scheduler.max_new_tokens=7\n"
        "  instead of  0   +role=decode, conf/role/decode.yaml:N\n"
        "  instead of  32  default, inferkit/config/schema.py:N\n"
    )


def test_an_automatic_value_with_its_rule_and_a_text_with_interpolation(
    told: Callable[..., str],
) -> None:
    text = told("engine.max_model_len", "model.name", "model.name=${data.dataset}")

    assert "engine.max_model_len = 288\n" in text
    assert (
        "  set by      automatic, data.input_truncated_len + scheduler.max_new_tokens = 256 + 32\n"
        "  instead of  0  default, inferkit/config/schema.py:N\n"
    ) in text
    assert "model.name = default\n  Shown in logs and reports.\n" in text
    assert "  set by      command line, model.name=${data.dataset}\n" in text


def test_a_derived_value_with_its_formula_and_what_it_is_used_for(
    told: Callable[..., str],
) -> None:
    text = told("rank.weight_bytes", "kv_cache.block_size", "model=qwen3_8b", "parallel=tp2")

    block = text.split("\n\n")[0].splitlines()
    assert re.fullmatch(r"rank\.weight_bytes = [\d,]+ MiB \([\d,]+ bytes\)", block[0])
    assert re.match(r"  derived     rank\.parameters \* bytes of bfloat16 = [\d,]+ \* 2", block[1])
    assert "  used by     kv_cache.block_bytes, kv_cache.blocks_per_request\n" in text
    pool = told("kv_cache.blocks", "model=qwen3_8b", "platform.device_memory=64000000000")
    assert "  used by     kv_cache.pool_bytes, kv_cache.concurrent_requests\n" in pool


def test_a_group_with_who_chose_it_and_all_keys_below(told: Callable[..., str]) -> None:
    text = told("parallel", "+experiment=qwen3_8b_tp2")

    lines = text.splitlines()
    assert lines[0] == "parallel = tp2  (a group; the keys that it sets are below)"
    assert lines[1].startswith("  How ranks divide the work: ")
    assert re.search(
        r"^  set by      \+experiment=qwen3_8b_tp2, conf/experiment/qwen3_8b_tp2.yaml:\d+$",
        text,
        re.M,
    )
    assert re.search(r"^  instead of  tp1  conf/config.yaml:\d+$", text, re.M)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line}
    assert re.fullmatch(
        r"1 conf/experiment/qwen3_8b_tp2.yaml:\d+, over conf/parallel/tp2.yaml:\d+",
        rows["parallel.embed_tp_size"],
    )
    assert rows["parallel.cp_size"] == "1 default"
    assert rows["parallel.attn_dp_size"] == "1 = world_size / attn_tp_size = 2 / 2"


def test_everything_is_shown_where_no_key_is_named(told: Callable[..., str]) -> None:
    text = told("+role=prefill", "parallel=tp3")
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]

    assert titles[:2] == ["group choices", "keys"]
    assert (
        titles[2].startswith("cannot run (`inferkit check` with these words shows")
        and titles[3:] == []
    )
    assert re.search(r"^  scheduler +prefill +conf/role/prefill.yaml:N, over", text, re.M)
    assert re.search(
        r"^  kv_cache.enable_prefix_cache +true +conf/role/prefill.yaml:N$", text, re.M
    )
    assert "parallel=tp3: there is no such option" in text


def test_a_misspelt_key_is_told_with_the_right_one(told: Callable[..., str]) -> None:
    with pytest.raises(UsageError) as caught:
        told(
            "scheduler.bath_size",
            "batch_size",
            "rank.weight_byte",
            "schedule",
            "xyz",
            "model=qwen3_8b",
        )

    assert str(caught.value).splitlines() == [
        "scheduler.bath_size: there is no such key, group or derived value; did you mean "
        "scheduler.batch_size?",
        "batch_size: there is no such key, group or derived value; did you mean "
        "scheduler.batch_size?",
        "rank.weight_byte: there is no such key, group or derived value; did you mean "
        "rank.weight_bytes?",
        "schedule: there is no such key, group or derived value; did you mean scheduler?",
        "xyz: there is no such key, group or derived value; `inferkit explain` shows all of them",
    ]


def test_why_a_derived_value_is_not_known(told: Callable[..., str]) -> None:
    with pytest.raises(UsageError, match="the model's files are not here"):
        told("rank.weight_bytes")
    with pytest.raises(UsageError) as caught:
        told("rank.weight_bytes", "parallel=tp3")
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "rank.weight_bytes: is not known: it follows from sizes, which have a fault",
        "the faults of the configuration:",
    ]
    assert lines[2].startswith("  parallel=tp3: there is no such option")
    with pytest.raises(UsageError, match="parallel.world_size=1, one rank has no groups"):
        told("groups")
    with pytest.raises(UsageError, match="nowhere: there is no such .*, and no such folder; "):
        told("nowhere")


def test_sizes_are_told_where_only_memory_is_too_small(told: Callable[..., str]) -> None:
    words = ("model=qwen3_8b", "parallel=tp2", "platform.device_memory=1000000000")
    text = told("rank.heads", "rank.weight_bytes", *words)

    assert text.startswith("rank.heads = 16 of 32 query heads\n  derived ")
    assert re.search(r"^rank\.weight_bytes = 7,81\d MiB \([\d,]+ bytes\)$", text, re.M)
    assert "\ncannot run (`inferkit check` with these words" in text
    assert "  model: its weights take 7,81" in text


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("disagg/transfer", "+role=cluster"), {"disagg.transfer._target_"}),
        (("experiment", "+experiment=qwen3_8b_tp2"), {"parallel.embed_tp_size"}),
        (("role", "+role=serve"), {"role", "kv_cache.enable_prefix_cache"}),
    ],
)
def test_the_keys_that_a_group_sets_are_below(
    told: Callable[..., str], words: tuple[str, ...], keys: set[str]
) -> None:
    text = told(*words)

    assert text.count("(a group; the keys that it sets are below)") == 1
    assert text.count(f"{words[0]} = ") == 1
    assert keys <= {line.split()[0] for line in text.splitlines()}


def test_an_axis_of_a_sweep_is_told(told: Callable[..., str]) -> None:
    text = told("scheduler.batch_size", "parallel", "+sweep=split")

    assert "  swept as    2,4,8: each cell of the sweep has one of these;" in text
    assert "  swept as    tp1,tp2,dp2: each cell" in text
    assert "scheduler.batch_size is an axis of a sweep: 2,4,8" in told("+sweep=split")
    of_group = told("sweep", "+sweep=split")
    assert of_group.startswith("sweep = split  (a group; the axes that it sets are below)\n")
    assert re.search(r"^  scheduler.batch_size  2,4,8$", of_group, re.M)
    assert "swept as" not in told("parallel", "+sweep=split", "parallel=tp2")


def test_json_is_a_snapshot_of_all_or_of_what_is_named(told: Callable[..., str]) -> None:
    whole = Snapshot.from_json(json.loads(told("--format", "json", "parallel=tp2")))
    part = Snapshot.from_json(json.loads(told("parallel", "--format", "json", "parallel=tp2")))

    assert whole.leaves["parallel.world_size"].value == 2
    assert len(whole.leaves) > 100
    assert set(part.leaves) == {key for key in whole.leaves if key.startswith("parallel.")}
    assert {one.name for one in part.derived} == {
        one.name for one in whole.derived if one.name.startswith("parallel.")
    }
    assert part.choices == {"parallel": "tp2"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    from inferkit.config.check import Checker

    space, words = ConfigSpace(), ["parallel=tp2", "scheduler.max_new_tokens=4"]
    config = Checker(space, is_run=False).check_overrides(words).config
    assert config is not None
    folder = tmp_path / "run"
    write_run(folder, config, command="x", overrides=words, choices={"parallel": "tp2"})
    write_origins(folder, config, origins_of_job(space.compose(words).hydra))
    return folder


def test_a_run_directory_tells_what_it_has_recorded(
    told: Callable[..., str], run_dir: Path
) -> None:
    text = told(str(run_dir), "scheduler.max_new_tokens", "engine.max_model_len")

    assert (
        f"scheduler.max_new_tokens = 4\n{MEANING}"
        "  set by      command line, scheduler.max_new_tokens=4\n"
        "  instead of  32  default, inferkit/config/schema.py:N\n"
    ) in text
    assert "  set by      automatic, data.input_truncated_len + " in text
    assert re.search(
        r"^parallel = tp2 .*\n.*\n.*\n  set by      command line, parallel=tp2\n"
        r"  instead of  tp1  conf/config.yaml:\d+$",
        told(str(run_dir), "parallel"),
        re.M,
    )
    assert "default" in told(str(run_dir))


def test_a_yaml_file_tells_its_lines(told: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# mine\nscheduler:\n  batch_size: 8\n")

    text = told(str(file), "scheduler.batch_size")

    assert text.startswith("scheduler.batch_size = 8\n")
    assert f"  set by      {file}:3\n  instead of  0  default, " in text

    file.write_text("scheduler:\n  batch_size: abc\n")
    text = told(str(file), "scheduler.batch_size")
    assert text.startswith("scheduler.batch_size = abc\n")
    assert "\ncannot run here as it is\n" in text and "inferkit check" not in text


def test_what_cannot_be_explained_is_refused(told: Callable[..., str], run_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"as it was recorded, so data\.limit=1 cannot change it"):
        told(str(run_dir), "data.limit=1")
    with pytest.raises(UsageError, match="one configuration, not a sweep"):
        told("-m", "data.limit=1,2")
    with pytest.raises(ConfigError, match="is no run directory"):
        told(str(run_dir.parent), "data.limit")
    with pytest.raises(UsageError, match="there is no such folder or file"):
        told("outputs/gone", "data.limit")
    with pytest.raises(UsageError, match="--format yaml: there is no such choice"):
        told("--format", "yaml")


def test_a_group_with_a_slash_is_no_folder(told: Callable[..., str]) -> None:
    text = told("disagg/transfer", "+role=decode")

    assert text.startswith("disagg/transfer = shared_memory  (a group; ")
    assert "  set by      +role=decode, conf/role/decode.yaml:" in text


def test_a_secret_is_never_shown(told: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", "value-of-a-secret")
    key = "model.custom_params.api_key"
    of_variable = (key, f"+{key}=${{oc.env:SERVICE_API_KEY}}")

    assert told(*of_variable).startswith(
        f"{key} = <secret SERVICE_API_KEY>\n"
        f"  set by      command line, +{key}=${{oc.env:SERVICE_API_KEY}}\n"
    )
    for words in (of_variable, (key, f"+{key}=value-of-a-secret")):
        for options in ((), ("--format", "json")):
            assert "value-of-a-secret" not in told(*words, *options)
    assert told(key, f"+{key}=value-of-a-secret").startswith(f"{key} = <secret>\n")
