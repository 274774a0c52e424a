from pathlib import Path

import pytest

from inferkit.config.arguments import Arguments, parse_arguments
from inferkit.config.preflight import preflight
from inferkit.core.errors import ConfigError
from inferkit.sweep.plan import PlannedCell, compose_multirun, plan_cells, sweep_dir_of

TINY = [
    "model=llama",
    "model.with_ckpt=false",
    "+model.arch={hidden_size:64,intermediate_size:128,num_hidden_layers:2,"
    "num_attention_heads:4,num_key_value_heads:2,vocab_size:259}",
]


def plan(*words: str, sweep_dir: Path | None = None) -> list[PlannedCell]:
    arguments = parse_arguments([*TINY, *words])
    verdict = preflight(arguments.command("inferkit"), arguments.space())
    assert verdict.is_good, verdict.message
    cfg = compose_multirun(arguments, sweep_dir)
    return plan_cells(arguments, verdict, cfg, sweep_dir_of(cfg))


def arguments_of(cell: PlannedCell) -> Arguments:
    return parse_arguments(cell.words)


def test_a_cell_is_the_command_of_a_single_run(tmp_path: Path) -> None:
    sweep_dir = tmp_path / "it's, [a] folder=x"

    cells = plan(
        "-m", "data.limit=1,2", "sweep.on_failure=stop", "hydra.verbose=true", sweep_dir=sweep_dir
    )  # fmt: skip

    assert [cell.folder for cell in cells] == [sweep_dir / "0", sweep_dir / "1"]
    assert "sweep.on_failure=stop" in cells[0].overrides
    run = arguments_of(cells[1])
    assert not run.is_multirun
    assert run.overrides[-4:-2] == ("data.limit=2", "hydra.verbose=true")
    assert not any(text.startswith("sweep.") for text in run.overrides)
    assert preflight(run.command("inferkit"), run.space()).is_good
    hydra = run.space().compose(run.overrides).hydra
    assert hydra.run.dir == str(sweep_dir / "1")


def test_a_cell_of_a_declared_sweep_begins_no_sweep(tmp_path: Path) -> None:
    cells = plan("+sweep=batch", "scheduler.batch_size=2,4", sweep_dir=tmp_path)

    assert [cell.config.scheduler.batch_size for cell in cells if cell.config] == [2, 4]
    run = arguments_of(cells[0])
    assert "+sweep=batch" in run.overrides
    assert not preflight(run.command("inferkit"), run.space()).is_multirun


def test_flags_and_folders_of_the_users_own_are_those_of_the_cells(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "two.yaml").write_text("limit: 2\n")

    (cell,) = plan("-m", "--config-dir", str(tmp_path), "+data=two", sweep_dir=tmp_path)

    assert cell.config is not None
    assert cell.config.data.limit == 2
    assert cell.words[:2] == ("--config-dir", str(tmp_path))


def test_the_folder_of_the_sweep_may_be_computed(tmp_path: Path) -> None:
    cells = plan("-m", "data.limit=1,2", f"hydra.sweep.dir={tmp_path}/${{hydra:job.name}}")

    assert cells[1].folder == tmp_path / "inferkit" / "1"


def test_folders_by_hydras_name_of_the_overrides(tmp_path: Path) -> None:
    words = ["-m", "data.limit=1,2", "hydra.sweep.subdir='${hydra.job.override_dirname}'"]
    words.append(
        "hydra.job.config.override_dirname.exclude_keys=[model,model.arch,model.with_ckpt]"
    )

    cells = plan(*words, sweep_dir=tmp_path)

    assert [cell.folder.name for cell in cells] == ["data.limit=1", "data.limit=2"]
    run = arguments_of(cells[1])
    assert run.space().compose(run.overrides).hydra.run.dir == str(tmp_path / "data.limit=2")


@pytest.mark.parametrize(
    ("subdir", "message"),
    [
        ("same", "gives cell #1 the folder same, where cell #0 has same"),
        ("'a/${hydra:job.num}/../..'", "which is not below that of the sweep"),
        ("/elsewhere", "which is not below that of the sweep"),
        ("'${nope}'", "hydra.sweep.subdir cannot be resolved"),
        ("x" * 300, "a name that no file system takes.*override_dirname.exclude_keys"),
    ],
)
def test_every_cell_needs_a_folder_of_its_own(tmp_path: Path, subdir: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan("-m", "data.limit=1,2", f"hydra.sweep.subdir={subdir}", sweep_dir=tmp_path)
