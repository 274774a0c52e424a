from pathlib import Path

import pytest
from omegaconf import OmegaConf

from inferkit.config.arguments import parse_arguments
from inferkit.config.faults import Fault
from inferkit.config.schema import InferenceConfig, ParallelConfig
from inferkit.core.errors import ConfigError
from inferkit.sweep.loop import Sweep, invalid_result, new_record
from inferkit.sweep.plan import PlannedCell
from inferkit.sweep.record import SWEEP_FILE, read_record

CONFIG = InferenceConfig(parallel=ParallelConfig(node_ips=["10.0.0.1", "10.0.0.2"]))


def test_a_cell_that_is_left_out_says_why() -> None:
    faults = (Fault(key="a", problem="is\nwrong"), Fault(key="b", problem="too", given="b=1"))
    cell = PlannedCell(number=3, overrides=("a=1",), folder=Path("3"), faults=faults)

    result = invalid_result(cell)

    assert (result.number, result.status, result.overrides) == (3, "invalid", ("a=1",))
    assert result.error == "a: is wrong b=1: too"


def test_a_record_tells_the_command_without_its_folder(tmp_path: Path) -> None:
    arguments = parse_arguments(["-m", "data.limit=1,2", f"hydra.sweep.dir={tmp_path}"])
    cell = PlannedCell(number=0, overrides=("data.limit=1",), folder=tmp_path / "a" / "0")

    new_record(arguments, tmp_path, cells=[cell], config=CONFIG).write(tmp_path)

    record = read_record(tmp_path)
    assert (record.flags, record.overrides) == (("-m",), ("data.limit=1,2",))
    assert record.cells == ({"number": 0, "folder": "a/0", "overrides": ["data.limit=1"]},)
    assert record.sweep["on_failure"] == "continue"
    assert record.cwd == str(Path.cwd())


def test_a_sweep_over_several_nodes_takes_a_new_folder(tmp_path: Path) -> None:
    """Other nodes may have made folders of cells before; the first one's record tells."""
    (tmp_path / "0" / "node1").mkdir(parents=True)
    cell = PlannedCell(number=0, overrides=(), folder=tmp_path / "0", config=CONFIG)
    sweep = Sweep(
        arguments=parse_arguments(["-m"]),
        cells=[cell],
        cfg=OmegaConf.create(),
        sweep_dir=tmp_path,
    )
    sweep._prepare()
    assert (tmp_path / SWEEP_FILE).exists()

    with pytest.raises(ConfigError, match="a sweep over several nodes cannot be resumed"):
        sweep._prepare()
