"""The command line of the service that a load is put on, and what is said of the load."""

from inferkit.config.arguments import Arguments
from inferkit.config.check import Checker
from inferkit.config.cluster_roles import CLUSTER, INSTANCES
from inferkit.config.faults import key_of
from inferkit.config.load_rules import SERVICE_PORTS
from inferkit.config.preflight import MULTIRUN
from inferkit.config.schema import InferenceConfig, LoadConfig

OWN_NODES = ("runner", "load", "sweep")
"""What the command line says of these is for this process, not for the service."""
KEPT = ("hydra.verbose", "hydra.searchpath")
NO_SWEEP = "hydra.mode=RUN"
"""A file of conf/sweep would make the service a sweep of its own."""


def service_words(arguments: Arguments, config: InferenceConfig) -> list[str]:
    """Flags and overrides of the service; its port is a free one unless one was chosen.

    Args:
        arguments: of this run.
        config: of this run.
    """
    words = [text for text in arguments.overrides if _is_passed_on(text)]
    key = SERVICE_PORTS[str(config.role)]
    node, _, name = key.partition(".")
    port: int = getattr(getattr(config, node), name)
    default: int = getattr(type(getattr(config, node))(), name)
    if port == default and not any(key_of(text) == key for text in words):
        words.append(f"{key}=0")
    flags = [flag for flag in arguments.flags if flag not in MULTIRUN]
    return [*flags, *words, NO_SWEEP]


def _is_passed_on(text: str) -> bool:
    key = key_of(text)
    if key.startswith(("hydra.", "hydra/")):
        return key in KEPT
    node, _, rest = key.partition(".")
    # The group of that name (`+sweep=NAME`) sets keys of any node.
    return node not in OWN_NODES or (key == "sweep" and not rest)


def count_ranks(arguments: Arguments, config: InferenceConfig) -> int:
    """Ranks of all instances.

    Raises:
        ConfigError: no cluster can be made of this command line.
    """
    if config.role != CLUSTER:
        return config.parallel.world_size
    plan = Checker(arguments.space()).plan(arguments.overrides, config)
    return sum(
        int(getattr(config.cluster, role)) * plan.configs[role].parallel.world_size
        for role in INSTANCES
    )


def count_pairs(config: InferenceConfig) -> int:
    """Pairs of prefill and decode instances; 0 where nothing is handed over."""
    return config.cluster.prefill * config.cluster.decode if config.role == CLUSTER else 0


def load_text(load: LoadConfig) -> str:
    """`64 requests of 128 + 64 tokens, 8 at a time`."""
    how = f"{load.concurrency} at a time" if load.rate is None else f"{load.rate:g} per second"
    return f"{load.num_requests} requests of {load.prompt_len} + {load.output_len} tokens, {how}"
