"""`+role=cluster`: composes every role, checks them together, then keeps their processes alive."""

import contextlib
import json
import logging
import os
import shlex
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from inferkit.config.arguments import Arguments, parse_arguments
from inferkit.config.check import Checker
from inferkit.config.check_cluster import ClusterPlan
from inferkit.config.cluster_roles import INSTANCES, ROUTER
from inferkit.config.faults import render
from inferkit.config.provenance import PROVENANCE_FILE, record
from inferkit.config.schema import InferenceConfig
from inferkit.core.errors import ConfigError
from inferkit.core.listening import reserved
from inferkit.core.place import LOOPBACK
from inferkit.online.cluster.child import ChildSpec
from inferkit.online.cluster.devices import shared_out
from inferkit.online.cluster.restart import RestartPolicy
from inferkit.online.cluster.supervisor import Supervisor

logger = logging.getLogger(__name__)

PROGRAM = ("python", "-m", "inferkit")
ANY_HOSTS = {"0.0.0.0": LOOPBACK, "": LOOPBACK, "::": "::1"}
ROUTER_KEYS = ("router.host", "router.port")
READY_INTERVAL_S = 0.25
READY_LIMIT_S = 5.0


class ClusterRunner:
    """Serves until it is told to stop (SIGTERM, Ctrl-C) or a role cannot be kept alive.

    Args:
        drain_limit_s: how long first the router, then the instances may take to end; a second
            signal ends all at once.
        max_quick_deaths: a role whose process ends so often within a minute of its start, each
            time anew, is given up.
    """

    def __init__(self, *, drain_limit_s: float = 120.0, max_quick_deaths: int = 5) -> None:
        self.drain_limit_s = drain_limit_s
        self.max_quick_deaths = max_quick_deaths
        self._console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)

    def run(self, config: InferenceConfig, *, run_dir: Path) -> dict[str, Any]:
        """Returns when all roles have ended after a signal.

        Raises:
            ConfigError: the roles do not fit one another, or this host.
            WorkerError: a role was given up; holds its last error.
        """
        arguments = typed_arguments(run_dir)
        plan = Checker(arguments.space()).plan(arguments.overrides, config)
        if plan.faults:
            title = f"the cluster has {len(plan.faults)} faults"
            raise ConfigError(render(plan.faults, title=title))
        router = config.router
        with reserved(router.host, router.port, keys=ROUTER_KEYS) as port:
            url = url_of(router.host, port)
            specs = child_specs(plan, config, arguments.flags, url=url, port=port, run_dir=run_dir)
            record(run_dir, url=url, pid=os.getpid())
            counts = ", ".join(f"{getattr(config.cluster, role)} {role}" for role in INSTANCES)
            self._tell(f"inferkit: {config.model.name} at {url} (router, {counts}; starting)")
            supervisor = Supervisor(
                specs,
                tell=self._tell,
                on_start=lambda name, pid, life: record(
                    run_dir, processes={name: {"pid": pid, "run_dir": _dir_of(name, life)}}
                ),
                make_policy=lambda: RestartPolicy(max_quick_deaths=self.max_quick_deaths),
                drain_limit_s=self.drain_limit_s,
            )
            with _told_when_ready(url, lambda: self._tell(f"inferkit: ready at {url}")):
                supervisor.run()
        return {"restarts": supervisor.num_restarts()}

    def _tell(self, text: str) -> None:
        self._console.print(text)


def child_specs(
    plan: ClusterPlan,
    config: InferenceConfig,
    flags: Sequence[str],
    *,
    url: str,
    port: int,
    run_dir: Path,
) -> list[ChildSpec]:
    """The router, then all instances; each has a run directory and a log in that of the cluster.

    Args:
        flags: Hydra's, of the cluster's own command line.
        url: by which instances reach the router, which listens at `port`.
    """
    names = {
        f"{role}{index}": role
        for role in INSTANCES
        for index in range(getattr(config.cluster, role))
    }
    num_ranks = [plan.configs[role].parallel.world_size for role in names.values()]
    target = plan.configs[INSTANCES[0]].platform._target_
    devices = shared_out(target, num_ranks, variables=os.environ)
    router_words = [*plan.words[ROUTER], f"router.port={port}"]
    specs = [_spec(ROUTER, router_words, flags, run_dir=run_dir, variables={}, stage=0)]
    for (name, role), variables in zip(names.items(), devices, strict=True):
        words = [f"disagg.router_url={url}", *plan.words[role]]
        specs.append(_spec(name, words, flags, run_dir=run_dir, variables=variables, stage=1))
    return specs


def _spec(
    name: str,
    words: Sequence[str],
    flags: Sequence[str],
    *,
    run_dir: Path,
    variables: Mapping[str, str],
    stage: int,
) -> ChildSpec:
    base = run_dir.absolute()

    def command(life: int) -> list[str]:
        folder = quoted(str(base / _dir_of(name, life)))
        program = [sys.executable, "-m", "inferkit"]
        # A file of conf/sweep would make a sweep of it.
        own = [f"hydra.run.dir={folder}", "hydra.mode=RUN"]
        return [*program, *flags, *words, *own]

    return ChildSpec(
        name=name,
        command=command,
        log=base / f"{name}.log",
        variables=variables,
        stage=stage,
    )


def _dir_of(name: str, life: int) -> str:
    """What an earlier life has left stays: it may tell why it ended."""
    return name if life == 1 else f"{name}.{life}"


def quoted(text: str) -> str:
    """A value that Hydra takes as it is."""
    return "'" + text.replace("'", "\\'") + "'"


def typed_arguments(run_dir: Path) -> Arguments:
    """The command line of this run.

    Raises:
        ConfigError: the run directory does not tell it.
    """
    path = run_dir / PROVENANCE_FILE
    if not path.exists():
        raise ConfigError(
            f"{path} is missing, which tells the command line that the roles of a cluster share; "
            "start a cluster as `python -m inferkit +role=cluster ...`"
        )
    words = shlex.split(json.loads(path.read_text("utf-8"))["command"])
    is_module = tuple(words[: len(PROGRAM)]) == PROGRAM
    return parse_arguments(words[len(PROGRAM) if is_module else 1 :])


def url_of(host: str, port: int) -> str:
    """By which processes of this host reach the router."""
    host = ANY_HOSTS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _told_when_ready(url: str, tell: Callable[[], None]) -> Iterator[None]:
    """Meanwhile a thread asks the router until it is ready once."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(READY_INTERVAL_S):
            if is_ready(url):
                tell()
                return

    thread = threading.Thread(target=watch, name="ready", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(READY_LIMIT_S + 1)


def is_ready(url: str) -> bool:
    """Whether the router has a pair that has generated."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/ready", timeout=READY_LIMIT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
