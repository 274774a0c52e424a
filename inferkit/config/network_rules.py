"""Rules of what a role listens on and whom it talks to: ports, addresses, secret, timers."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

from inferkit.config.faults import Findings, Fix, show
from inferkit.config.schema import DisaggConfig, InferenceConfig, RouterConfig

MAX_PORT = 65535
ZMQ_PORTS = 2
"""Workers find their parent at `disagg.zmq_port` and the next one."""
EXAMPLE_SECRET = "INFERKIT_SECRET"
ENGINES: Final = "inferkit.kv_transfer.engines"
SHARED_MEMORY: Final = f"{ENGINES}.shared_memory.SharedMemoryEngine"
TCP: Final = f"{ENGINES}.tcp.TcpEngine"
IN_PROCESS: Final = f"{ENGINES}.in_process.InProcessEngine"
LIBRARIES: Mapping[str, tuple[str, str]] = {
    f"{ENGINES}.mooncake.MooncakeEngine": ("mooncake", "mooncake"),
    f"{ENGINES}.memfabric.MemFabricEngine": ("memfabric_hybrid", "memfabric"),
}
"""Engine -> the package that it drives, and the extra of inferkit that installs it."""
INSTANCE_PORTS: Mapping[str, tuple[str, ...]] = {
    "serve": ("disagg.http_port", "disagg.zmq_port"),
    "prefill": ("disagg.http_port", "disagg.bootstrap_port", "disagg.zmq_port"),
    "decode": ("disagg.http_port", "disagg.zmq_port"),
    "router": ("router.port",),
    "cluster": ("router.port",),
}
"""Role -> keys of the ports that it listens on."""


def network(cfg: InferenceConfig, findings: Findings) -> None:
    """Of every role."""
    _ports(cfg, findings)
    _addresses(cfg, findings)
    _urls(cfg, findings)
    _secret(cfg, findings)
    _times(cfg, findings)
    if cfg.router.retries < 0:
        findings.refuse(
            "router.retries", cfg.router.retries, "is out of range; allowed is >= 0", use=0
        )


def hand_off(cfg: InferenceConfig, findings: Findings) -> None:
    """Of both sides of a hand-off: an engine that reaches the other side."""
    transfer, key = cfg.disagg.transfer, "disagg.transfer._target_"
    if transfer.num_threads < 1:
        findings.refuse(
            "disagg.transfer.num_threads",
            transfer.num_threads,
            "is out of range; allowed is >= 1",
            use=DisaggConfig().transfer.num_threads,
        )
    hosts = sorted({*cfg.disagg.prefill_ips, *cfg.disagg.decode_ips})
    if not transfer._target_:
        problem = "has no value, but prefill hands its KV cache to decode; choose an engine: "
        problem += "disagg/transfer=shared_memory (one host) or disagg/transfer=tcp"
        findings.refuse(key, "", problem, fix=_engine("shared_memory"))
    elif transfer._target_ == IN_PROCESS:
        problem = "moves bytes within one process, and a role is a process of its own"
        findings.refuse(key, transfer._target_, problem, fix=_engine("shared_memory"))
    elif transfer._target_ == SHARED_MEMORY and len(hosts) > 1:
        problem = "stays on one host, and disagg.prefill_ips and disagg.decode_ips name "
        problem += f"{len(hosts)} ({', '.join(hosts)})"
        findings.refuse(key, transfer._target_, problem, fix=_engine("tcp"))


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # it is half imported, or barred
        return False


def check_library(cfg: InferenceConfig, findings: Findings, *, is_run: bool) -> None:
    """An engine that drives a library needs it on this machine; found without importing it.

    Args:
        is_run: it is needed now; else another machine may have it.
    """
    target = cfg.disagg.transfer._target_
    if cfg.role not in ("prefill", "decode", "cluster") or target not in LIBRARIES:
        return
    package, extra = LIBRARIES[target]
    if _is_installed(package):
        return
    problem = f"needs the package {package}, which is not installed here; install "
    problem += f"'inferkit[{extra}]', or choose disagg/transfer=shared_memory (one host) or "
    problem += "disagg/transfer=tcp"
    key, hosts = "disagg.transfer._target_", {*cfg.disagg.prefill_ips, *cfg.disagg.decode_ips}
    if is_run:
        option = "tcp" if len(hosts) > 1 else "shared_memory"
        findings.refuse(key, target, problem, fix=_engine(option))
    else:
        findings.warn(key, target, problem)


def _engine(option: str) -> Fix:
    return Fix(add=(f"disagg/transfer={option}",), drop=("disagg.transfer._target_",))


def ports(cfg: InferenceConfig) -> Iterator[tuple[str, int]]:
    """(key, number) of the fixed ports of a role; those that are chosen free are left out."""
    for key in INSTANCE_PORTS.get(cfg.role or "", ()):
        node, _, name = key.partition(".")
        port: int = getattr(getattr(cfg, node), name)
        if port:
            yield key, port


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name other than localhost may be anything."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _ports(cfg: InferenceConfig, findings: Findings) -> None:
    users: dict[int, str] = {}
    port = cfg.parallel.master_port
    if port and cfg.parallel.world_size > 1 and cfg.role in ("serve", "prefill", "decode"):
        users[port] = "parallel.master_port"
    for key in INSTANCE_PORTS[str(cfg.role)]:
        node, _, name = key.partition(".")
        port = getattr(getattr(cfg, node), name)
        width = ZMQ_PORTS if name == "zmq_port" else 1
        highest = MAX_PORT + 1 - width
        if not 0 <= port <= highest:
            problem = f"is out of range; allowed is 0 (a free one is chosen) to {highest}"
            findings.refuse(key, port, problem, use=0)
            continue
        taken = [n for n in range(port, port + width) if n in users] if port else []
        if taken:
            also = "" if taken[0] == port else f"takes {taken[0]} as well, which "
            problem = f"{also}is {users[taken[0]]} too; every port has one use"
            findings.refuse(key, port, f"{problem} (0 = a free one is chosen)", use=0)
        elif port:
            users |= dict.fromkeys(range(port, port + width), key)


def _addresses(cfg: InferenceConfig, findings: Findings) -> None:
    """Lists of nodes name each once; several nodes per instance meet at a fixed port."""
    if cfg.role not in ("prefill", "decode"):
        return
    for name in ("prefill_ips", "decode_ips"):
        ips: list[str] = getattr(cfg.disagg, name)
        known = [ip for ip in dict.fromkeys(ips) if ip.strip()]
        if known != ips:
            problem = "must name every node once, instance by instance, each leader first"
            findings.refuse(f"disagg.{name}", ips, problem, use=known)
    parallel, key = cfg.parallel, f"disagg.{cfg.role}_ips"
    listed: list[str] = getattr(cfg.disagg, f"{cfg.role}_ips")
    num_nodes = -(-parallel.world_size // max(1, parallel.ranks_per_node))
    if listed and len(listed) % num_nodes:
        problem = (
            f"has {len(listed)} addresses, but one instance takes {num_nodes} nodes "
            f"(parallel.world_size={parallel.world_size} / devices_per_node="
            f"{parallel.devices_per_node}); list every node of every instance"
        )
        related = ("parallel.devices_per_node", "parallel.world_size")
        use = listed[: len(listed) // num_nodes * num_nodes] or None
        findings.refuse(key, listed, problem, use=use, drop=use is None, related=related)
    if num_nodes > 1 and parallel.master_port == 0:
        problem = "nodes of one instance cannot choose a free port together; set one that is free "
        problem += "on every leader"
        findings.refuse("parallel.master_port", 0, problem, use=29500)


def _urls(cfg: InferenceConfig, findings: Findings) -> None:
    if cfg.role in ("prefill", "decode") and cfg.disagg.router_url is not None:
        problem = _url_problem(cfg.disagg.router_url)
        if problem:
            use = _meant_url(cfg.disagg.router_url) or "http://127.0.0.1:8000"
            findings.refuse("disagg.router_url", cfg.disagg.router_url, problem, use=use)
    if cfg.role != "router":
        return
    seen: dict[str, str] = {}
    for name in ("prefill_urls", "decode_urls"):
        urls: list[str] = getattr(cfg.router, name)
        key = f"router.{name}"
        problems: list[str] = []
        usable: list[str] = []
        for url in urls:
            problem, meant = _url_problem(url), _meant_url(url)
            if not problem and url.rstrip("/") in seen:
                other = seen[url.rstrip("/")]
                problem = "is named twice" if other == key else f"is in {other} too"
            if problem:
                problems.append(f"{url} {problem}")
            if meant and meant.rstrip("/") not in seen:
                seen[meant.rstrip("/")] = key
                usable.append(meant)
        if problems:
            findings.refuse(key, urls, "\n".join(problems), use=usable)


def _url_problem(url: str) -> str:
    """Why this cannot be the address of a role; empty = it can."""
    allowed = "; write http://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no address ({error}){allowed}"
    if parts.scheme != "http":
        return f"is no http address{allowed}"
    if not parts.hostname or port == 0 or any(c.isspace() for c in url):
        return f"names no host and port{allowed}"
    if parts.username or parts.password or parts.query or parts.fragment:
        return f"is more than a host and a port{allowed}"
    return "" if parts.path in ("", "/") else f"has a path{allowed}"


def _meant_url(url: str) -> str:
    """`https://a:8000/v1`, `a:8000` -> `http://a:8000`; empty where nothing can be made of it."""
    host = url.partition("://")[2] or url
    meant = f"http://{host.partition('/')[0].rpartition('@')[2]}"
    return "" if _url_problem(meant) else url if not _url_problem(url) else meant


def off_loopback(cfg: InferenceConfig) -> list[str]:
    """Addresses beyond this machine at which a role listens, or looks for other roles."""
    if cfg.role in ("prefill", "decode"):
        own: list[str] = getattr(cfg.disagg, f"{cfg.role}_ips")
        hosts: Sequence[str] = [cfg.disagg.http_host] if cfg.disagg.http_host else own
    elif cfg.role == "router":
        urls = [*cfg.router.prefill_urls, *cfg.router.decode_urls]
        named = [urlsplit(url).hostname or "" for url in urls if not _url_problem(url)]
        hosts = [cfg.router.host, *named]
    else:
        hosts = []
    return [host for host in dict.fromkeys(hosts) if not is_loopback(host)]


def _secret(
    cfg: InferenceConfig, findings: Findings, variables: Mapping[str, str] = os.environ
) -> None:
    """Control messages beyond this machine are signed."""
    name, key, hosts = cfg.disagg.secret_env, "disagg.secret_env", off_loopback(cfg)
    if cfg.role not in ("prefill", "decode", "router", "cluster"):
        return
    if name is None and hosts:
        fix = Fix(add=(f"{key}={EXAMPLE_SECRET}",), is_example=True)
        problem = (
            f"has no value, but this role talks to other roles at {', '.join(hosts)}, where "
            "control messages are signed with a shared secret; name an environment variable that "
            "holds it on every node"
        )
        findings.refuse(key, None, problem, fix=fix)
    elif name is not None and not variables.get(name):
        problem = (
            f"the environment variable {show(name)} is not set here, or empty; it holds the "
            "secret that signs control messages, the same on every node"
        )
        fix = Fix(environment=(f"{name}=VALUE",), is_example=True)
        findings.refuse(key, name, problem, fix=fix if name.isidentifier() else Fix(drop=(key,)))


def _times(cfg: InferenceConfig, findings: Findings) -> None:
    times: list[tuple[str, Any, Any, str]]
    times = [("disagg", cfg.disagg, DisaggConfig(), entry.name) for entry in fields(DisaggConfig)]
    times += [("router", cfg.router, RouterConfig(), "request_timeout_s")]
    for prefix, node, default, name in times:
        value = getattr(node, name)
        if name.endswith("_s") and not 0 < value < math.inf:
            problem = "is out of range; allowed is > 0"
            findings.refuse(f"{prefix}.{name}", value, problem, use=getattr(default, name))
    if cfg.disagg.heartbeat_misses < 1:
        problem = "is out of range; allowed is >= 1"
        misses = cfg.disagg.heartbeat_misses
        findings.refuse("disagg.heartbeat_misses", misses, problem, use=3)
