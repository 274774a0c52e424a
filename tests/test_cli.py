"""The command line as a user meets it: exit codes, what is printed, what is left behind."""

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferkit import cli

ROOT = Path(__file__).resolve().parent.parent
# A runner of a user's own package. It leaves a file, or fails as it is told to.
RUNNER = """
import os
from inferkit.core.errors import WorkerError

class Runner:
    def __init__(self, *, fail="", size=None):
        self.fail, self.size = fail, size
        if fail == "constructor":
            raise ValueError("broken constructor")

    def run(self, config, *, run_dir):
        if self.size is None or config.scheduler.batch_size == self.size:
            if self.fail == "known":
                raise WorkerError("worker 0 died: out of memory")
            if self.fail == "bug":
                raise RuntimeError("a bug")
            if self.fail == "interrupt":
                raise KeyboardInterrupt
        (run_dir / "ran.txt").write_text(config.model.name)
        return {"tokens": 3, "batch": config.scheduler.batch_size}
"""
OWN = ["runner._target_=own_runner.parts.Runner", "allowed_targets=[own_runner]"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs; holds the user's own package."""
    package = tmp_path / "own_runner"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(textwrap.dedent(RUNNER))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Hydra configures logging for the whole process; this gives it back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def process(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inferkit", *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_dirs(folder: Path, kind: str = "outputs") -> list[Path]:
    return sorted(path.parent.parent for path in (folder / kind).rglob(".hydra/config.yaml"))


# -- in fresh processes ------------------------------------------------------------------------


def test_cfg_job_prints_the_configuration_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from inferkit import cli\n"
        "code = cli.run(['--cfg', 'job'])\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HYDRA_DEPRECATION_WARNINGS_AS_ERRORS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert result.returncode == 0, result.stderr
    assert "scheduler:\n  _target_: inferkit.scheduler.scheduler.Scheduler\n" in result.stdout
    assert result.stderr.split() == ["False", "False"]
    assert list(tmp_path.iterdir()) == []


def test_a_faulty_command_ends_with_2_and_leaves_nothing(tmp_path: Path) -> None:
    result = process("scheduler.bath_size=3", "data.top_p=7", cwd=tmp_path)

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "inferkit: 2 faults in the configuration; nothing was started\n"
        "\n"
        "  scheduler.bath_size=3\n"
        "      there is no such key; did you mean scheduler.batch_size?\n"
        "\n"
        "  data.top_p=7.0\n"
        "      is out of range; allowed is in [0.0, 1.0]\n"
        "\n"
        "this works:\n"
        "  python -m inferkit scheduler.batch_size=3 data.top_p=1.0\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_check_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from inferkit import cli\n"
        "code = cli.run(['check', 'model=llama', 'model.with_ckpt=false', '+model.arch={"
        "hidden_size:64,intermediate_size:128,num_hidden_layers:2,num_attention_heads:4,"
        "vocab_size:259}'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("ok: ")
    assert "parameters)" in result.stdout


def test_eight_runs_of_one_instant_have_eight_folders(folder: Path) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "inferkit", *OWN],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=folder,
        )
        for _ in range(8)
    ]
    assert [child.wait(timeout=120) for child in running] == [0] * 8

    assert len(run_dirs(folder)) == 8
    assert all((run_dir / "ran.txt").exists() for run_dir in run_dirs(folder))


def test_a_console_script_finds_modules_where_it_is_started(folder: Path) -> None:
    """Its sys.path begins with its own folder, not with the current one."""
    script = folder / "bin" / "inferkit"
    script.parent.mkdir()
    script.write_text("from inferkit.cli import main\nmain()\n")
    result = subprocess.run(
        [sys.executable, str(script), "data.limt=2", *OWN],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert result.returncode == 2
    assert "own_runner" in result.stderr
    assert "this works:\n  inferkit data.limit=2 runner._target_=" in result.stderr


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    for words in ("--info defaults", "--help", "--cfg job"):
        result = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m inferkit {words} | head -c 1"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.stderr == ""


def test_tab_completion_lists_options(tmp_path: Path) -> None:
    result = process("-sc", "query=bash", cwd=tmp_path, COMP_LINE="inferkit platform=")

    assert result.returncode == 0, result.stderr
    assert "platform=auto" in result.stdout
    assert "platform=cpu" in result.stdout


def test_components_of_the_users_own_run(
    tmp_path: Path, tiny_hf_model: Callable[..., Path]
) -> None:
    """A loader, scheduler, KV cache manager and platform, swapped by configuration alone."""
    bases = {
        "Loader": "inferkit.loader.default_loader.DefaultModelLoader",
        "Scheduler": "inferkit.scheduler.scheduler.Scheduler",
        "Cache": "inferkit.kv_cache.kv_cache_manager.KVCacheManager",
        "Platform": "inferkit.platforms.cpu.CpuPlatform",
    }
    source = "import logging\n"
    for name, base in bases.items():
        module, _, base_class = base.rpartition(".")
        source += (
            f"from {module} import {base_class}\n"
            f"class {name}({base_class}):\n"
            "    def __init__(self, *, mark, **kwargs):\n"
            "        super().__init__(**kwargs)\n"
            f"        logging.getLogger('own').warning('{name} mark=%s', mark)\n"
        )
    (tmp_path / "own_parts.py").write_text(source)
    nodes = {
        "model.loader": "Loader",
        "scheduler": "Scheduler",
        "kv_cache": "Cache",
        "platform": "Platform",
    }
    words = ["allowed_targets=[own_parts]", "data.limit=1", "scheduler.max_new_tokens=2"]
    for node, name in nodes.items():
        words += [f"{node}._target_=own_parts.{name}", f"+{node}.params.mark={name.lower()}"]

    result = process("model=llama", f"model.path={tiny_hf_model('llama')}", *words, cwd=tmp_path)

    assert result.returncode == 0, result.stderr
    (run_dir,) = run_dirs(tmp_path)
    log = (run_dir / "rank0.log").read_text()
    for name in nodes.values():
        assert f"{name} mark={name.lower()}" in log
    assert len((run_dir / "generations.jsonl").read_text().splitlines()) == 1


# -- one run, in this process ------------------------------------------------------------------


def test_a_run_leaves_a_folder_that_explains_itself(folder: Path) -> None:
    assert cli.run([*OWN, "data.seed=5"]) == 0

    (run_dir,) = run_dirs(folder)
    assert (run_dir / "ran.txt").read_text() == "SmolLM2-135M-Instruct"
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.resolved.yaml", "provenance.json", "result.json", "inferkit.log"} <= names
    facts = json.loads((run_dir / "provenance.json").read_text())
    assert facts["overrides"] == [*OWN, "data.seed=5"]
    assert facts["choices"]["model"] == "smollm2_135m"
    assert "data.seed=5" in facts["command"]
    assert "hydra.run.dir" not in facts["command"]
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "ok"
    assert result["metrics"] == {"tokens": 3, "batch": 32}


def test_a_folder_of_the_users_choice(folder: Path) -> None:
    assert cli.run([*OWN, "hydra.run.dir=mine"]) == 0

    assert (folder / "mine" / "ran.txt").exists()
    assert not (folder / "outputs").exists()


def test_flags_may_stand_between_overrides(folder: Path) -> None:
    options = folder / "options" / "scheduler"
    options.mkdir(parents=True)
    (options / "small.yaml").write_text("defaults: [default, _self_]\nbatch_size: 2\n")

    code = cli.run([OWN[0], "--config-dir", "options", OWN[1], "scheduler=small"])

    assert code == 0
    result = json.loads((run_dirs(folder)[0] / "result.json").read_text())
    assert result["metrics"]["batch"] == 2


def test_a_known_failure_is_one_message_and_exit_1(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*OWN, "+runner.params.fail=known"]) == 1

    shown = capfd.readouterr()
    assert shown.err == "inferkit: worker 0 died: out of memory\n"
    assert "Traceback" not in shown.out
    (run_dir,) = run_dirs(folder)
    assert "Traceback" in (run_dir / "inferkit.log").read_text()
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", "worker 0 died: out of memory")


@pytest.mark.parametrize(
    ("fail", "shown"),
    [
        ("bug", "inferkit: RuntimeError: a bug"),
        (
            "constructor",
            "inferkit: runner._target_=own_runner.parts.Runner failed while it was built: "
            "ValueError: broken constructor",
        ),
    ],
)
def test_an_unknown_failure_shows_its_place_and_keeps_its_traceback(
    folder: Path, capfd: pytest.CaptureFixture[str], fail: str, shown: str
) -> None:
    assert cli.run([*OWN, f"+runner.params.fail={fail}"]) == 1

    (run_dir,) = run_dirs(folder)
    captured = capfd.readouterr()
    first, place, log = captured.err.splitlines()
    assert first == shown
    assert re.fullmatch(r"  at \S*own_runner/parts\.py:\d+ in \w+", place)
    assert log == f"  the whole traceback is in {run_dir.relative_to(folder)}/inferkit.log"
    assert "Traceback" in (run_dir / "inferkit.log").read_text()
    assert "parts.py" in json.loads((run_dir / "result.json").read_text())["traceback"]
    assert "Traceback" not in captured.out


def test_params_are_checked_against_the_users_own_class(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*OWN, "+runner.params.fial=bug"]) == 2

    assert "did you mean fail?" in capfd.readouterr().err
    assert not (folder / "outputs").exists()


def test_a_place_that_cannot_be_written_is_told(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "outputs").write_text("a file")

    assert cli.run(OWN) == 2

    assert "set hydra.run.dir=/a/writable/folder" in capfd.readouterr().err


def test_what_a_single_run_does_not_read_is_told(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*OWN, "sweep.on_failure=stop", "hydra.sweep.dir=x"]) == 0

    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert [line.partition(": has no effect in a single run")[0] for line in warnings] == [
        "warning: sweep.on_failure=stop",
        "warning: hydra.sweep.dir=x",
    ]


# -- sweeps ------------------------------------------------------------------------------------


def test_a_failing_cell_ends_nothing_else(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    params = ["+runner.params={fail:known,size:2}"]

    assert cli.run(["-m", *OWN, *params, "scheduler.batch_size=1,2,4"]) == 1

    cells = run_dirs(folder, "outputs/sweeps")
    assert [cell.name for cell in cells] == ["0", "1", "2"]
    results = [json.loads((cell / "result.json").read_text()) for cell in cells]
    assert [result["status"] for result in results] == ["ok", "failed", "ok"]
    assert [result["number"] for result in results] == [0, 1, 2]
    assert "WorkerError" in results[1]["traceback"]
    assert "Traceback" in (cells[1] / "inferkit.log").read_text()
    shown = capfd.readouterr()
    assert "cell #1 failed after" in shown.err
    assert ": worker 0 died: out of memory; see outputs/sweeps/" in shown.err
    assert "2 of 3 cells ended ok; 1 failed" in shown.out


def test_a_good_sweep_ends_with_0(folder: Path) -> None:
    assert cli.run([*OWN, "scheduler.batch_size=1,2", "-m"]) == 0

    assert len(run_dirs(folder, "outputs/sweeps")) == 2


def test_bad_cells_are_found_before_the_first_starts(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["-m", *OWN, "kv_cache.block_size=16,0"]) == 2

    shown = capfd.readouterr().err
    assert "1 of 2 cells cannot run; nothing was started" in shown
    assert "cell #1 [kv_cache.block_size=0]" in shown
    assert not (folder / "outputs").exists()


# -- words, flags, verbs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chek"], "chek is no verb; did you mean check?\nverbs are check, "),
        (["scheduler.batch_size"], "scheduler.batch_size has no value; write scheduler.batch_size"),
        (["-m", "--cfg", "job"], "-m starts a sweep and --cfg shows one configuration"),
        (["--batch-size", "8"], "--batch-size is no flag; options are written KEY=VALUE"),
        (["--cfg", "job", "data.limt=2"], "did you mean data.limit?"),
        (["check", "data.limt=2"], "did you mean data.limit?"),
        (["+role=training"], "options of role: cluster, decode, prefill, router, serve"),
        (["-m", "+role=prefill"], "a role serves until it is stopped"),
        (["runner=online"], "serves a role; choose one, such as +role=serve"),
        (["--config-name", "other"], "--config-name other: there is no other.yaml in conf/"),
    ],
)
def test_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli.run(words) == 2

    shown = capfd.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert not (folder / "outputs").exists()


def test_check_shows_derived_values_and_warnings(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["check", "data.top_p=0.5", "scheduler.batch_size=8"]) == 0

    shown = capfd.readouterr()
    assert shown.out.startswith("ok: ")
    assert "batch_size_per_dp_rank=8" in shown.out
    assert shown.err == (
        "warning: data.top_p=0.5: has no effect with data.temperature=0 (greedy)\n"
    )
    assert not (folder / "outputs").exists()


def test_check_of_a_sweep(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", "-m", "scheduler.batch_size=1,2,3"]) == 0

    assert "3 cells, none of them has a fault" in capfd.readouterr().out


def test_help_and_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    assert "Start here:" in capfd.readouterr().out
    assert cli.run(["check", "-h"]) == 0
    assert "Usage: inferkit check" in capfd.readouterr().out
    assert cli.run(["--version"]) == 0
    assert "(hydra 1.3" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("level", "overrides", "expected"),
    [
        ("debug", [], logging.DEBUG),
        ("WARNING", [], logging.WARNING),
        ("WARNING", ["hydra.verbose=true"], logging.DEBUG),
        ("", [], logging.INFO),
    ],
)
def test_log_level(
    folder: Path, monkeypatch: pytest.MonkeyPatch, level: str, overrides: list[str], expected: int
) -> None:
    monkeypatch.setenv("INFERKIT_LOG_LEVEL", level)

    assert cli.run([*OWN, *overrides]) == 0

    assert logging.getLogger().level == expected


def test_an_unknown_log_level_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERKIT_LOG_LEVEL", "verbose")

    assert cli.run([]) == 2

    assert "INFERKIT_LOG_LEVEL=verbose is no log level" in capfd.readouterr().err
