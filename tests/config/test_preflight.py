"""One command, or every cell of a sweep: all faults, and a command line that really works."""

import itertools
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig

from inferkit.config.faults import Cell, Command
from inferkit.config.grid import with_load
from inferkit.config.preflight import Verdict, check_composition, preflight
from inferkit.config.space import ConfigSpace

TINY = (
    "model=llama",
    "model.with_ckpt=false",
    "+model.arch={hidden_size:64,intermediate_size:128,num_hidden_layers:2,"
    "num_attention_heads:4,num_key_value_heads:2,vocab_size:259}",
)


def run(space: ConfigSpace, *words: str) -> Verdict:
    flags = tuple(word for word in words if word == "-m")
    overrides = tuple(word for word in words if word != "-m")
    return preflight(Command(flags=flags, overrides=overrides), space)


def suggestion(verdict: Verdict) -> list[str]:
    """Words of the suggested command after `python -m inferkit`."""
    lines = verdict.message.splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("this works"))
    words = shlex.split(lines[place + 1])
    assert words[:3] == ["python", "-m", "inferkit"]
    return words[3:]


def on_one_line(verdict: Verdict) -> str:
    return " ".join(verdict.message.split())


def test_a_good_command(space: ConfigSpace) -> None:
    verdict = run(space, *TINY, "data.top_k=4")

    assert verdict.is_good
    assert not verdict.is_multirun
    assert [warning.key for warning in verdict.warnings] == ["data.top_k"]


@pytest.mark.parametrize(
    ("words", "works"),
    [
        (["scheduler.bath_size=3"], ["scheduler.batch_size=3"]),
        (["+scheduler.bath_size=3"], ["scheduler.batch_size=3"]),
        (["parallel=tp1x", "data.limit=3"], ["parallel=tp1", "data.limit=3"]),
        (["parallel=dp3"], ["parallel.world_size=3"]),
        (
            ["parallel=cp3", "data.limit=3"],
            [f"parallel.{n}_size=3" for n in ("world", "cp")] + ["data.limit=3"],
        ),
        (["parallel.attn_tp_size=2.5"], ["parallel.attn_tp_size=2", "parallel.world_size=2"]),
        (["scheduler.batch_size=abc", "data.limit=3"], ["scheduler.batch_size=0", "data.limit=3"]),
        (["parallel.foo=1", "data.limit=3"], ["data.limit=3"]),
        (["++data={topp:0.3}", "data.limit=3"], ["data.top_p=0.3", "data.limit=3"]),
        (["seed=3"], ["data.seed=3"]),
        (["scheduler.batch_size", "~data.limit", "=3"], []),
        (["+platform=cpu"], ["platform=cpu"]),
        (["+scheduler.batch_size=3"], ["scheduler.batch_size=3"]),
        (["scheduler.batch_size=8.0"], ["scheduler.batch_size=8"]),
        (["model.dtype=fp32"], ["model.dtype=float32"]),
        (["scheduler.batch_size=1,2"], ["-m", "scheduler.batch_size=1,2"]),
        (["parallel.cp_size=3"], ["parallel.cp_size=3", "parallel.world_size=3"]),
        (["router.port=9", "data.limit=1"], ["data.limit=1"]),
        (["engine.max_model_len=32"], ["engine.max_model_len=288"]),
        (["data.top_p=2", "data.top_k=-9"], ["data.top_p=1.0", "data.top_k=0"]),
        # the first correction brings a second fault to light
        (
            ["scheduler.maxnewtokens=500", "engine.max_model_len=300"],
            ["scheduler.max_new_tokens=500", "engine.max_model_len=756"],
        ),
        (["exe_mode.batch_buckets=[4,2,0]"], ["exe_mode.batch_buckets=[2,4]"]),
    ],
)
def test_the_suggested_command_works(
    space: ConfigSpace, words: list[str], works: list[str]
) -> None:
    verdict = run(space, *words)

    assert suggestion(verdict) == works
    assert run(space, *works).is_good


def test_a_value_that_only_the_user_knows_is_an_example(space: ConfigSpace) -> None:
    verdict = run(space, "model=llama", "data.limt=2")

    assert "set model.path=..." in verdict.message
    assert "this works with a value of yours:" in verdict.message
    assert suggestion(verdict) == [
        "model=llama", "data.limit=2", "model.path=/path/to/model",
    ]  # fmt: skip


def test_no_command_is_suggested_where_none_is_known(space: ConfigSpace) -> None:
    verdict = run(space, "+role=training", "scheduler.bath_size=3")

    assert not verdict.is_good
    assert "this works" not in verdict.message
    assert verdict.message == (
        "inferkit: 2 faults in the configuration; nothing was started\n"
        "\n"
        "  +role=training\n"
        "      there is no such option\n"
        "      options of role: cluster, decode, prefill, router, serve\n"
        "\n"
        "  scheduler.bath_size=3\n"
        "      there is no such key; did you mean scheduler.batch_size?"
    )


def test_ranks_that_no_node_can_start_are_refused(
    space: ConfigSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("platform.device_memory=0", *TINY, "engine.max_model_len=8", "kv_cache.block_size=1")
    sizes += ("scheduler.max_new_tokens=4", "data.input_truncated_len=4")
    assert run(space, *sizes, "parallel.world_size=80").is_good

    verdict = run(space, *sizes, "parallel.world_size=81")

    assert "parallel.world_size=81\n      puts 81 ranks on one node, where a command starts at" in (
        verdict.message
    )
    assert "it takes 2 nodes or more, listed in parallel.node_ips" in on_one_line(verdict)
    assert suggestion(verdict) == list(sizes)
    assert "puts 128 ranks" in run(space, *sizes, "parallel=dp128").message
    assert "1 of 2 cells" in run(space, "-m", *sizes, "parallel.world_size=1,81").message
    assert preflight(Command(verb="check", overrides=(*sizes, "parallel=dp128")), space).is_good
    monkeypatch.setenv("RANK", "3")  # torchrun has started the ranks, here or elsewhere
    assert run(space, *sizes, "parallel=dp128").is_good


def test_flags_of_the_command_are_kept_in_the_suggestion(space: ConfigSpace) -> None:
    command = Command(
        program="inferkit", verb="check", flags=("--config-dir", "a b"), overrides=("data.limt=2",)
    )

    assert "  inferkit check --config-dir 'a b' data.limit=2" in preflight(command, space).message


# -- sweeps ------------------------------------------------------------------------------------


def test_every_cell_is_checked_and_numbered_as_hydra_does(space: ConfigSpace) -> None:
    verdict = run(space, "-m", *TINY, "scheduler.batch_size=1,2,4", "kv_cache.block_size=16,32")

    assert verdict.is_good
    expected = itertools.product((1, 2, 4), (16, 32))
    assert [cell.overrides[-2:] for cell in verdict.cells] == [
        (f"scheduler.batch_size={batch}", f"kv_cache.block_size={block}")
        for batch, block in expected
    ]
    assert [cell.number for cell in verdict.cells] == list(range(6))


def test_bad_cells_are_listed_and_the_rest_is_suggested(space: ConfigSpace) -> None:
    verdict = run(space, "-m", *TINY, "kv_cache.block_size=0,16", "scheduler.batch_size=1,2")

    assert verdict.message.startswith(
        "inferkit: 2 of 4 cells cannot run; nothing was started\n"
        "\n"
        "  cell #0 [kv_cache.block_size=0 scheduler.batch_size=1]\n"
        "  cell #1 [kv_cache.block_size=0 scheduler.batch_size=2]\n"
        "      kv_cache.block_size=0: is out of range; allowed is >= 1\n"
    )
    works = suggestion(verdict)
    assert works[-2:] == ["kv_cache.block_size=16", "scheduler.batch_size=1,2"]
    assert run(space, *works).is_good


def test_a_misspelt_axis_is_told_once_and_renamed(space: ConfigSpace) -> None:
    verdict = run(space, "-m", "scheduler.bath_size=1,2", "exe_mode=eagr,eager", "data.min_p=7")

    assert "every cell: scheduler.bath_size\n" in verdict.message
    assert "every cell: data.min_p=7" in verdict.message
    assert suggestion(verdict) == [
        "-m", "scheduler.batch_size=1,2", "exe_mode=eager", "data.min_p=0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "works"),
    [
        (["scheduler.batch_size=1,abc"], ["scheduler.batch_size=1"]),
        (["scheduler.batch_size=a,b", "data.seed=1,2"], ["data.seed=1,2"]),
        (["parallel.foo=1,2", "data.seed=1,2"], ["data.seed=1,2"]),
        (["parallel=tp2,tp3", "data.seed=1,2"], ["parallel=tp2", "data.seed=1,2"]),
        # what the first correction brings to light is corrected too, and no axis is lost
        (
            ["data.seed=1,2", "parallel.attn_tp_size=2.5"],
            ["data.seed=1,2", "parallel.attn_tp_size=2", "parallel.world_size=2"],
        ),
        # every cell has a fault of its own: the first alone
        (["parallel=dp3,dp5", "data.seed=1,2"], ["parallel.world_size=3", "data.seed=1"]),
    ],
)
def test_the_suggested_sweep_works(space: ConfigSpace, words: list[str], works: list[str]) -> None:
    verdict = run(space, "-m", *words)

    assert suggestion(verdict) == ["-m", *works]
    assert run(space, "-m", *works).is_good


def test_groups_may_be_swept(space: ConfigSpace) -> None:
    verdict = run(space, "-m", *TINY[1:], "model=llama,qwen2", "platform=glob(*)")

    assert verdict.is_good
    assert len(verdict.cells) == 4


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["hydra.verbose=true,false"], "Hydra's own settings are the same in every cell"),
        (["data.top_p=interval(0,1)"], "has no single values; name them (0.5,0.9)"),
        (["data.limit=1,2", "model.path=~"], "the value needs quotes of its own"),
        (["data.limit=1,2", "hydra.runn.dir=x"], "did you mean hydra.run.dir?"),
    ],
)
def test_faults_of_the_sweep_itself(space: ConfigSpace, words: list[str], problem: str) -> None:
    verdict = run(space, "-m", *words)

    assert problem in verdict.message
    assert "1 fault in the configuration" in verdict.message


def test_a_sweep_of_one_cell_is_told_as_one_run(space: ConfigSpace) -> None:
    assert "cell" not in run(space, "-m", "data.limit=0").message


def test_a_sweep_that_a_file_declares(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "grid.yaml").write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"
        '      scheduler.batch_size: "1,2"\n      kv_cache.block_size: "0,16"\n'
    )
    space = ConfigSpace(config_dir=tmp_path)

    verdict = run(space, "+sweep=grid", *TINY)
    replaced = run(space, "+sweep=grid", *TINY, "kv_cache.block_size=32")

    assert "2 of 4 cells cannot run" in verdict.message
    assert replaced.is_good
    assert replaced.is_multirun
    assert len(replaced.cells) == 2


def test_many_cells_cost_one_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ConfigLoaderImpl.load_configuration
    composed: list[list[str]] = []

    def counting(self: ConfigLoaderImpl, *args: Any, **kwargs: Any) -> DictConfig:
        composed.append(kwargs["overrides"])
        return load(self, *args, **kwargs)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counting)

    verdict = run(ConfigSpace(), "-m", *TINY, "scheduler.batch_size=range(1,61)")

    assert len(verdict.cells) == 60
    assert verdict.is_good
    assert composed == [["model=llama"]]


def test_nothing_is_created(
    space: ConfigSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    run(space)
    run(space, "data.limit=0")
    run(space, "-m", "data.limit=0,1")

    assert list(tmp_path.iterdir()) == []


def test_check_composition_looks_at_the_overrides_only(space: ConfigSpace) -> None:
    assert check_composition(Command(overrides=("data.limit=0",)), space).is_good
    assert not check_composition(Command(overrides=("data.limt=0",)), space).is_good


def test_check_composition_resolves_where_asked(space: ConfigSpace) -> None:
    command = Command(overrides=("data.limit=${nope}",))

    assert check_composition(command, space).is_good
    message = check_composition(command, space, resolves=True).message
    assert "there is no key nope to take the value from" in message


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("hydra.run.dir", ["data.limit=1"]),
        ("hydra.sweep.dir", ["-m", "data.limit=1,2"]),
    ],
)
def test_a_run_folder_that_cannot_be_is_a_fault(
    space: ConfigSpace, tmp_path: Path, key: str, words: list[str]
) -> None:
    (tmp_path / "file").write_text("")

    verdict = run(space, *words, f"{key}={tmp_path}/file/runs")

    assert f"{key}={tmp_path}/file/runs" in verdict.message
    assert f"cannot be a folder: {tmp_path}/file is a file" in on_one_line(verdict)
    assert suggestion(verdict) == words
    assert run(space, *words, f"{key}={tmp_path}/runs/${{now:%Y}}").is_good
    assert run(space, *words, f"{key}={tmp_path}/${{hydra:job.name}}").is_good


def test_a_broken_option_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "model").mkdir()
    broken = tmp_path / "parallel" / "broken.yaml"
    broken.write_text("# A list without an end.\nworld_size: [1\nx: :\n")
    (tmp_path / "parallel" / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "model" / "broken.yaml").write_bytes(broken.read_bytes())
    space = ConfigSpace(config_dir=tmp_path)

    assert f"{broken} line 3 column 2: broken YAML: expected ',' or" in (
        on_one_line(run(space, "parallel=broken"))
    )
    assert "is not written in UTF-8" in on_one_line(run(space, "parallel=binary"))
    # Whoever does not choose it is not bothered.
    assert run(space, "parallel=tp1").is_good
    assert "broken YAML" in on_one_line(run(space, "model=broken"))


def test_cells_with_faults_may_be_left_out(space: ConfigSpace) -> None:
    words = ["-m", "sweep.skip_invalid=true", *TINY, "kv_cache.block_size=16,0", "data.limit=1,2"]

    verdict = run(space, *words)

    assert verdict.is_good
    assert [cell.number for cell in verdict.cells] == [0, 1, 2, 3]
    assert [checked.config is not None for checked in verdict.checked] == [True, True, False, False]
    assert list(verdict.invalid) == [2, 3]
    assert verdict.notice.startswith(
        "inferkit: 2 of 4 cells cannot run and are left out (sweep.skip_invalid=true)\n\n"
        "  cell #2 [kv_cache.block_size=0 data.limit=1]\n"
        "  cell #3 [kv_cache.block_size=0 data.limit=2]\n"
    )


def test_a_sweep_of_which_no_cell_can_run_is_refused(space: ConfigSpace) -> None:
    words = ["-m", "sweep.skip_invalid=true", *TINY, "kv_cache.block_size=-1,0"]

    assert "2 of 2 cells cannot run; nothing was started" in run(space, *words).message


def test_what_concerns_the_whole_sweep_has_one_value(space: ConfigSpace) -> None:
    verdict = run(space, "-m", *TINY, "sweep.on_failure=stop,continue", "data.limit=1,2")

    assert "is the same in every cell; give one value" in on_one_line(verdict)
    assert suggestion(verdict) == ["-m", *TINY, "sweep.on_failure=stop", "data.limit=1,2"]


def test_roles_that_come_to_an_end_get_a_load(space: ConfigSpace) -> None:
    roles = [Cell(number=0, overrides=(f"+role={role}",)) for role in ("serve", "cluster")]
    others = [
        Cell(number=0, overrides=words)
        for words in (("+role=prefill",), ("+role=serve", "runner=online"), ("data.limit=1",))
    ]

    assert [with_load(space, cell).overrides[-1] for cell in roles] == ["runner=load"] * 2
    assert [with_load(space, cell) for cell in others] == others


def test_the_folder_of_the_other_kind_of_run_is_told(space: ConfigSpace) -> None:
    single = run(space, *TINY, "hydra.sweep.dir=x")
    sweep = run(space, "-m", *TINY, "hydra.run.dir=x")

    assert [str(warning) for warning in single.warnings] == [
        "hydra.sweep.dir=x: has no effect in a single run, whose folder is hydra.run.dir; -m makes "
        "a sweep"
    ]
    assert [str(warning) for warning in sweep.warnings] == [
        "hydra.run.dir=x: has no effect in a sweep, whose folder is hydra.sweep.dir"
    ]
