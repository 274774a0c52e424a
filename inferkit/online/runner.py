"""What the parent of an online instance does: bind, serve, supervise, drain.

`run_workers` supervises in the main thread; HTTP and the dispatcher live in a second one.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from inferkit.config.provenance import record
from inferkit.config.schema import DisaggMode, InferenceConfig
from inferkit.core.errors import AddressError, InferkitError, WorkerError
from inferkit.core.listening import listening
from inferkit.core.place import LOOPBACK
from inferkit.core.secrets import hide
from inferkit.online.errors import GenerationFailed, ServiceError, Unavailable
from inferkit.runtime.instances import InstancePlace, find_instance
from inferkit.runtime.secret import read_secret
from inferkit.runtime.worker_group import run_workers

if TYPE_CHECKING:
    from inferkit.online.instance import ParentAddress
    from inferkit.online.leg_role import LegRole

logger = logging.getLogger(__name__)

ENTRYPOINT = "inferkit.online.worker:online_worker"
DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STACK_GRACE_S = 0.5
"""A rank that hangs gets so long to write where it does."""
EXIT_LIMIT_S = 30.0
"""Ranks that were told to stop have so long to leave."""
HTTP_KEYS = ("disagg.http_host", "disagg.http_port")
BOOTSTRAP_KEYS = ("address", "disagg.bootstrap_port")


class OnlineRunner:
    """Serves until it is told to stop (SIGTERM, Ctrl-C) or its workers die.

    Args:
        drain_limit_s: how long running requests may go on after that; a second signal ends them.
        watchdog_s: a loop that has not ticked for so long is taken for dead. A step of a big
            model on a slow device, or its first compilation, takes a while.
    """

    def __init__(self, *, drain_limit_s: float = 60.0, watchdog_s: float = 300.0) -> None:
        self.drain_limit_s = drain_limit_s
        self.watchdog_s = watchdog_s

    def run(self, config: InferenceConfig, *, run_dir: Path) -> dict[str, Any]:
        """Returns when the last request has ended after a signal.

        Raises:
            ConfigError, ModelLoadError: this configuration cannot serve here.
            WorkerError: a rank failed or died; requests that ran were told.
        """
        place = find_instance(config)
        if not place.is_leader:
            return self._follow(config, place, run_dir)
        # Web framework, sockets and tokenizers are not needed to check a configuration.
        import zmq

        from inferkit.online.instance import Instance
        from inferkit.online.model_side import read_model
        from inferkit.online.server import ServerThread

        disagg = config.disagg
        host = place.node.local_ip
        secret = read_secret(disagg)
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(
                listening(disagg.http_host or host, disagg.http_port, keys=HTTP_KEYS)
            )
            model = read_model(config)
            config = model.config
            url = url_of(listener, any_host=host)
            instance = Instance.draw(str(config.role))
            watch = _Watch(url=url, run_dir=run_dir, drain_limit_s=self.drain_limit_s)
            bootstrap_url, beside = "", None
            if disagg.mode is DisaggMode.prefill:
                from inferkit.online.bootstrap_server import bootstrap_server

                bootstrap = stack.enter_context(
                    listening(host, disagg.bootstrap_port, keys=BOOTSTRAP_KEYS)
                )
                bootstrap_url = url_of(bootstrap)
                beside = bootstrap_server(
                    instance,
                    bootstrap,
                    register_interval_s=disagg.register_interval_s,
                    secret=secret,
                )
            watch.server = server = ServerThread(
                instance=instance,
                model=model.served,
                tokenizer=model.tokenizer,
                dp_size=config.parallel.attn_dp_size,
                listener=listener,
                zmq_host=host if place.node.num_nodes > 1 else LOOPBACK,
                zmq_port=disagg.zmq_port,
                secret=secret,
                timeout_s=config.router.request_timeout_s,
                watchdog_s=self.watchdog_s,
                facts={
                    "instance_id": instance.instance_id,
                    "role": config.role,
                    "model": config.model.name,
                    "max_model_len": model.served.max_model_len,
                    "pid": os.getpid(),
                },
                sampling_defaults={
                    name: getattr(config.data, name)
                    for name in ("temperature", "top_p", "top_k", "min_p", "seed")
                },
                on_ready=watch.on_ready,
                on_trouble=watch.end,
                leg_role=_leg_role(config, url, bootstrap_url, secret),
                beside=beside,
            )
            try:
                parent = replace(server.start(), bootstrap_url=bootstrap_url)
            except zmq.ZMQError as error:
                raise AddressError(
                    f"disagg.zmq_port={disagg.zmq_port}",
                    f"cannot be used ({error}): workers find their parent there and at the next "
                    "port; choose another, or 0 for free ones",
                    key="disagg.zmq_port",
                    fix="disagg.zmq_port=0",
                ) from error
            urls = {"url": url, "zmq_urls": [parent.request_url, parent.output_url]}
            if bootstrap_url:
                urls["bootstrap_url"] = bootstrap_url
            record(run_dir, **urls, max_model_len=config.engine.max_model_len, pid=os.getpid())
            watch.tell(f"inferkit: {config.model.name} at {url} (loading)")
            try:
                _run_ranks(config, place, run_dir, parent, watch)
            except (InferkitError, SystemExit, KeyboardInterrupt) as error:
                watch.is_over = True
                failure = watch.failure(error)
                server.fail(for_clients(failure))
                if isinstance(failure, InferkitError):
                    raise failure from None
                raise
            finally:
                watch.is_over = True
                server.close()
            if not watch.is_draining:
                raise WorkerError(f"the ranks have ended by themselves; see {run_dir}")
        return {}

    def _follow(
        self, config: InferenceConfig, place: InstancePlace, run_dir: Path
    ) -> dict[str, Any]:
        """Hold ranks of an instance that another node leads; ends with it."""
        watch = _Watch(url=place.leader_ip, run_dir=run_dir, drain_limit_s=self.drain_limit_s)
        watch.tell(
            f"inferkit: node {place.node.node_rank} of instance {place.index}, led by "
            f"{place.leader_ip}, which drains it too"
        )
        _run_ranks(config, place, run_dir, None, watch)
        return {}


def _run_ranks(
    config: InferenceConfig,
    place: InstancePlace,
    run_dir: Path,
    parent: "ParentAddress | None",
    watch: "_Watch",
) -> None:
    level = logging.getLevelName(logging.getLogger().level)
    with place.node.reserved_port(config.parallel) as port:
        places = place.node.places(config.parallel, master_port=port)
        run_workers(
            ENTRYPOINT,
            {p.rank: (p, config, run_dir, level, parent) for p in places},
            log_dir=run_dir / "workers",
            on_event=watch.on_event,
        )


def _leg_role(
    config: InferenceConfig, url: str, bootstrap_url: str, secret: bytes
) -> "LegRole | None":
    """What a prefill or decode instance is to routers."""
    from inferkit.online.facts import Side
    from inferkit.online.leg_role import LegRole

    disagg = config.disagg
    if disagg.mode is DisaggMode.none:
        return None
    # With port 0 each has its own, which the router knows.
    hosts = (disagg.prefill_ips or [LOOPBACK]) if disagg.bootstrap_port else []
    return LegRole(
        side=Side(disagg.mode),
        url=url,
        bootstrap_url=bootstrap_url,
        bootstrap_urls=tuple(f"http://{host}:{disagg.bootstrap_port}" for host in hosts),
        router_url=disagg.router_url,
        secret=secret,
    )


class _Watch:
    """What the parent knows of its ranks, and how it ends them."""

    def __init__(self, *, url: str, run_dir: Path, drain_limit_s: float) -> None:
        self.url = url
        self.run_dir = run_dir
        self.drain_limit_s = drain_limit_s
        self.server: Any = None
        self.is_draining = False
        self.is_over = False
        self.trouble = ""
        """What made this process end its ranks."""
        self.console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        self._pids: list[int] = []
        self._before: dict[int, Any] = {}

    def on_event(self, event: dict[str, Any]) -> None:
        """Events of the ranks, in the main thread."""
        # After run_workers has set its own handlers, which would end the ranks at once.
        if not self._before and threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._on_signal)
                for number in DRAIN_SIGNALS
                if signal.getsignal(number) is not signal.SIG_IGN
            }
        kind = event["event"]
        if kind == "process":
            self._pids.append(event["pid"])
        elif kind == "stage":
            logger.info("%s", event["text"])
        elif kind == "ready" and event["facts"]:
            record(self.run_dir, **event["facts"])

    def on_ready(self) -> None:
        self.tell(f"inferkit: ready at {self.url}")

    def tell(self, text: str) -> None:
        self.console.print(text)

    def end(self, cause: str) -> None:
        """End the ranks, after they have written where they are; in a thread of its own."""
        if self.is_over:
            return
        self.trouble = self.trouble or cause
        threading.Thread(target=self._kill, name="end of the ranks", daemon=True).start()

    def failure(self, error: BaseException) -> BaseException:
        """Why the run ended."""
        if not self.trouble:
            return error
        return WorkerError(f"{self.trouble}; see {self.run_dir / 'workers'}")

    def _kill(self) -> None:
        self._signal_ranks(signal.SIGUSR1)
        time.sleep(STACK_GRACE_S)
        self._signal_ranks(signal.SIGKILL)

    def _signal_ranks(self, number: signal.Signals) -> None:
        for pid in self._pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _on_signal(self, number: int, frame: Any) -> None:
        """The first one drains; a second one, or one before anything is served, ends at once."""
        if self.is_draining or self.server is None or not self.server.is_ready:
            self._before[number](number, frame)
            return
        self.is_draining = True
        self.tell(
            f"inferkit: takes no new request; those that run have {self.drain_limit_s:g} s "
            "(a second signal ends them)"
        )
        self.server.drain(self.drain_limit_s, then=self._after_drain)

    def _after_drain(self) -> None:
        timer = threading.Timer(EXIT_LIMIT_S, self._end_late_ranks)
        timer.daemon = True
        timer.start()

    def _end_late_ranks(self) -> None:
        self.end(f"ranks have not stopped within {EXIT_LIMIT_S:g} s")


def for_clients(error: BaseException) -> ServiceError:
    """What clients are told of the end: its cause without paths and tracebacks of this machine."""
    if isinstance(error, InferkitError):
        return GenerationFailed(hide(str(error).splitlines()[0].partition(";")[0]))
    return Unavailable("the service was stopped")


def url_of(listener: socket.socket, *, any_host: str = LOOPBACK) -> str:
    """By which others reach it; `any_host` stands for a socket that listens on every address."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = any_host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
