"""Whether a run can listen where its configuration says, before anything of it is started."""

from collections.abc import Iterator
from dataclasses import replace

from inferkit.config.faults import Fault, Fix
from inferkit.config.network_rules import ZMQ_PORTS
from inferkit.config.schema import InferenceConfig
from inferkit.core.errors import AddressError
from inferkit.core.listening import listening
from inferkit.core.place import LOOPBACK
from inferkit.online.cluster.runner import ROUTER_KEYS
from inferkit.online.runner import BOOTSTRAP_KEYS, HTTP_KEYS
from inferkit.runtime.instances import find_instance
from inferkit.runtime.place import MASTER_KEYS, find_node

OWN_RUNNERS = {
    "inferkit.online.runner.OnlineRunner",
    "inferkit.online.router.runner.RouterRunner",
    "inferkit.online.cluster.runner.ClusterRunner",
    "inferkit.offline.runner.OfflineRunner",
}
"""Others may listen elsewhere, or choose ports of their own."""
ZMQ_KEYS = ("address", "disagg.zmq_port")
Place = tuple[str, int, tuple[str, str]]


def port_faults(config: InferenceConfig) -> list[Fault]:
    """A fault for each port that is in use, and each address that is not of this machine.

    Raises:
        ConfigError: this machine is no node of the run.
    """
    if config.runner._target_ not in OWN_RUNNERS:
        return []
    faults: dict[str, Fault] = {}
    for host, port, keys in _places(config):
        try:
            listening(host, port, keys=keys).close()
        except AddressError as error:
            fault = Fault(
                key=error.key,
                given=error.given,
                problem=error.problem,
                fix=Fix(add=(error.fix,)) if error.fix else None,
            )
            if keys == ZMQ_KEYS and port != config.disagg.zmq_port:
                given = f"disagg.zmq_port={config.disagg.zmq_port}"
                problem = f"takes {port} as well, which {error.problem}"
                fault = replace(fault, given=given, problem=problem)
            faults.setdefault(error.key, fault)
    return list(faults.values())


def _places(config: InferenceConfig) -> Iterator[Place]:
    """(host, port, keys of both) of every fixed port that this node listens on, or reserves."""
    if config.role in ("router", "cluster"):
        yield config.router.host, config.router.port, ROUTER_KEYS
        return
    if config.role is None:
        node = find_node(config.parallel)
    else:
        place = find_instance(config)
        node = place.node
        if place.is_leader:
            yield from _of_leader(config, node.local_ip, is_one_node=node.num_nodes == 1)
    port = config.parallel.master_port
    if port and node.num_nodes == 1 and config.parallel.world_size > 1:
        yield LOOPBACK, port, MASTER_KEYS


def _of_leader(config: InferenceConfig, host: str, *, is_one_node: bool) -> Iterator[Place]:
    disagg = config.disagg
    yield disagg.http_host or host, disagg.http_port, HTTP_KEYS
    if config.role == "prefill":
        yield host, disagg.bootstrap_port, BOOTSTRAP_KEYS
    if disagg.zmq_port:
        for number in range(ZMQ_PORTS):
            at = LOOPBACK if is_one_node else host
            yield at, disagg.zmq_port + number, ZMQ_KEYS
