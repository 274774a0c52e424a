"""The supervisor with real, small processes: restarts, drains, signals, and nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from inferkit.core.errors import WorkerError
from inferkit.online.cluster.child import ChildSpec, describe_exit
from inferkit.online.cluster.restart import RestartPolicy
from inferkit.online.cluster.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60
SERVES = """
import signal, sys, time
def end(number, frame):
    print("inferkit: drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("inferkit: ready at http://127.0.0.1:1", flush=True)
print("  at 127.0.0.1", flush=True)
print("a detail", flush=True)
print("  of it", flush=True)
while True:
    time.sleep(0.05)
"""


def spec(folder, name, code, *, stage=0):
    """A child that runs `code`; `LIFE` in it is the number of its life."""
    return ChildSpec(
        name=name,
        command=lambda life: [sys.executable, "-c", f"LIFE = {life}\n{textwrap.dedent(code)}"],
        log=folder / f"{name}.log",
        stage=stage,
    )


class Run:
    """A supervisor that this thread runs; its lines, and who was started."""

    def __init__(self, specs, **options):
        self.lines = []
        self.starts = []
        quick = {"first_delay_s": 0.01, "max_delay_s": 0.02, "max_quick_deaths": 3}
        options = {"make_policy": lambda: RestartPolicy(**quick)} | options
        self.supervisor = Supervisor(
            specs,
            tell=self.tell,
            on_start=lambda name, pid, life: self.starts.append((name, pid, life)),
            **options,
        )
        self.when = {}

    def tell(self, text):
        self.lines.append(text)
        for needle, act in list(self.when.items()):
            if needle in text:
                del self.when[needle]
                act()

    def on(self, needle, act):
        """Do something once a line holds `needle`."""
        self.when[needle] = act
        return self

    def run(self):
        late = threading.Timer(DEADLINE_S, os.kill, [os.getpid(), signal.SIGTERM])
        late.start()
        try:
            self.supervisor.run()
        finally:
            late.cancel()
        for _, pid, _ in self.starts:
            assert not psutil.pid_exists(pid)


def send(number):
    return lambda: os.kill(os.getpid(), number)


def test_a_child_s_lines_are_kept_and_the_important_ones_are_shown(tmp_path):
    run = Run([spec(tmp_path, "prefill0", SERVES)]).on("ready at", send(signal.SIGTERM))
    run.run()

    # What the supervisor says of the end itself may come between them.
    told = [line for line in run.lines if line.startswith("[")]
    assert told[:2] == ["[prefill0] ready at http://127.0.0.1:1", "[prefill0]   at 127.0.0.1"]
    assert "[prefill0] drained" in run.lines
    assert not any("a detail" in line or "of it" in line for line in run.lines)
    assert (tmp_path / "prefill0.log").read_text().splitlines() == [
        "inferkit: ready at http://127.0.0.1:1",
        "  at 127.0.0.1",
        "a detail",
        "  of it",
        "inferkit: drained",
    ]


def test_stages_are_drained_one_after_the_other(tmp_path):
    instance = SERVES.replace("ready", "instance ready")
    specs = [
        spec(tmp_path, "router", SERVES, stage=0),
        spec(tmp_path, "prefill0", instance, stage=1),
        spec(tmp_path, "decode0", instance, stage=1),
    ]
    run = Run(specs)
    ready = set()

    def all_ready(text, tell=run.tell):
        tell(text)
        if "ready at" in text:
            ready.add(text)
            if len(ready) == 3:
                os.kill(os.getpid(), signal.SIGINT)

    run.supervisor.tell = all_ready
    run.run()

    drained = [line for line in run.lines if "drained" in line]
    assert drained[0] == "[router] drained"
    assert sorted(drained[1:]) == ["[decode0] drained", "[prefill0] drained"]


def test_a_child_that_dies_is_started_again(tmp_path):
    code = f"""
    if LIFE < 3:
        print("inferkit: the device is gone; see the log\\n  more of it", flush=True)
        raise SystemExit(1)
    {textwrap.indent(SERVES, "    ").strip()}
    """
    run = Run([spec(tmp_path, "decode0", code)]).on("ready at", send(signal.SIGTERM))
    run.run()

    assert [(name, life) for name, _, life in run.starts] == [("decode0", n) for n in (1, 2, 3)]
    assert run.supervisor.num_restarts() == {"decode0": 2}
    assert [line for line in run.lines if "starts again" in line] == [
        f"[decode0] ended (exit code 1); starts again in {delay:g} s: the device is gone; see the "
        "log"
        for delay in (0.01, 0.02)
    ]


def test_a_killed_child_is_started_again_and_leaves_no_child_of_its_own(tmp_path):
    code = """
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("warning: child", child.pid, flush=True)
    time.sleep(600)
    """
    run = Run([spec(tmp_path, "prefill0", code)])
    pids = []

    def first():
        pids.append(int(run.lines[-1].split()[-1]))
        run.on("warning: child", send(signal.SIGTERM))
        os.kill(run.starts[0][1], signal.SIGKILL)

    run.on("warning: child", first)
    run.run()

    assert run.supervisor.num_restarts() == {"prefill0": 1}
    assert any("ended (killed by SIGKILL)" in line for line in run.lines)
    assert not psutil.pid_exists(pids[0]) or psutil.Process(pids[0]).status() == "zombie"


def test_a_child_that_ends_again_and_again_ends_the_cluster_with_its_error(tmp_path):
    broken = """
    print("inferkit: an older word", flush=True)
    print("inferkit: rank 0: no memory\\n  at line 3\\n", flush=True)
    raise SystemExit(1)
    """
    specs = [spec(tmp_path, "router", SERVES), spec(tmp_path, "decode1", broken, stage=1)]
    run = Run(specs)

    with pytest.raises(WorkerError) as caught:
        run.run()

    assert str(caught.value) == (
        f"decode1 ends again and again (exit code 1 after 3 starts; log {tmp_path}/decode1.log): "
        "rank 0: no memory\n  at line 3"
    )
    assert "[router] drained" in run.lines
    assert len([start for start in run.starts if start[0] == "decode1"]) == 3


def test_a_refused_configuration_is_not_tried_again(tmp_path):
    code = 'print("inferkit: 1 fault in the configuration", flush=True)\nraise SystemExit(2)'
    run = Run([spec(tmp_path, "prefill0", code)])
    with pytest.raises(WorkerError, match="prefill0 cannot start .* 1 fault in the configuration"):
        run.run()
    assert len(run.starts) == 1


def test_a_child_without_a_word_names_its_log(tmp_path):
    run = Run([spec(tmp_path, "prefill0", "raise SystemExit(2)")])
    with pytest.raises(WorkerError, match="it told no reason; see .*prefill0.log"):
        run.run()


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("inferkit: ready at x", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_second_signal_ends_all_at_once(tmp_path, number, error):
    run = Run([spec(tmp_path, "decode0", STUBBORN)])
    run.on("ready at", send(number)).on("the cluster ends", send(number))
    start_s = time.monotonic()
    with pytest.raises(error):
        run.run()
    assert time.monotonic() - start_s < 20


def test_a_drain_has_a_limit(tmp_path):
    run = Run([spec(tmp_path, "decode0", STUBBORN)], drain_limit_s=0.2)
    run.on("ready at", send(signal.SIGTERM)).run()
    assert "inferkit: decode0 did not end within 0.2 s" in run.lines


def test_the_end_comes_also_while_a_child_waits_for_its_restart(tmp_path):
    slow = {"first_delay_s": 600.0, "max_delay_s": 600.0}
    run = Run(
        [spec(tmp_path, "decode0", "raise SystemExit(1)")],
        make_policy=lambda: RestartPolicy(**slow),
    )
    run.on("starts again", send(signal.SIGTERM)).run()
    assert len(run.starts) == 1


def test_a_child_that_closes_its_output_is_still_watched(tmp_path):
    code = """
    import os, time
    print("inferkit: ready at x", flush=True)
    os.close(1)
    os.close(2)
    time.sleep(0.2)
    os._exit(2)
    """
    run = Run([spec(tmp_path, "decode0", code)])
    with pytest.raises(WorkerError, match="exit code 2"):
        run.run()


def test_handlers_of_signals_come_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    Run([spec(tmp_path, "a", SERVES)]).on("ready at", send(signal.SIGTERM)).run()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


PARENT = """
import sys
from pathlib import Path
from inferkit.online.cluster.child import ChildSpec
from inferkit.online.cluster.supervisor import Supervisor
spec = ChildSpec(
    name="child",
    command=lambda life: [sys.executable, "-c", {code!r}],
    log=Path({log!r}),
)
Supervisor([spec], tell=print, on_start=lambda name, pid, life: print(pid, flush=True)).run()
"""


def test_a_killed_parent_leaves_no_child_behind(tmp_path):
    code = PARENT.format(code=STUBBORN, log=str(tmp_path / "child.log"))
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    with parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not alive


def test_exits_are_described():
    assert describe_exit(0) == "exit code 0"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-99) == "killed by signal 99"
