"""Ports, addresses, the shared secret and the times of a role."""

from typing import Any

import pytest

from inferkit.config.network_rules import IN_PROCESS, is_loopback, off_loopback, ports
from inferkit.config.schema import TransferConfig
from tests.config.configs import faults_of, in_role

SECRET = "INFERKIT_TEST_SECRET"
TWO_HOSTS = {"disagg__prefill_ips": ["10.0.0.1"], "disagg__decode_ips": ["10.0.0.2"]}
TCP = "inferkit.kv_transfer.engines.tcp.TcpEngine"


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "hush-hush-1")


def refused(role: str, **values: Any) -> list[str]:
    return faults_of(in_role(role, **values))


@pytest.mark.parametrize(
    ("role", "values", "found"),
    [
        (
            "prefill",
            {"disagg__bootstrap_port": 8001},
            "disagg.bootstrap_port=8001: is disagg.http_port too; every port has one use (0 = a "
            "free one is chosen)",
        ),
        (
            "decode",
            {"disagg__zmq_port": 8099},
            "disagg.zmq_port=8099: takes 8100 as well, which is disagg.http_port too; every port "
            "has one use (0 = a free one is chosen)",
        ),
        (
            "decode",
            {
                "disagg__http_port": 29500,
                "parallel__master_port": 29500,
                "parallel__world_size": 2,
            },
            "disagg.http_port=29500: is parallel.master_port too; every port has one use (0 = a "
            "free one is chosen)",
        ),
        (
            "prefill",
            {"disagg__bootstrap_port": 65536},
            "disagg.bootstrap_port=65536: is out of range; allowed is 0 (a free one is chosen) to "
            "65535",
        ),
        (
            "router",
            {"router__port": -1},
            "router.port=-1: is out of range; allowed is 0 (a free one is chosen) to 65535",
        ),
    ],
)
def test_every_port_has_one_use(role: str, values: dict[str, Any], found: str) -> None:
    assert refused(role, **values) == [found]


def test_free_ports_never_collide() -> None:
    free = {"disagg__http_port": 0, "disagg__bootstrap_port": 0, "disagg__zmq_port": 0}
    assert refused("prefill", **free) == []
    assert list(ports(in_role("prefill", **free))) == []
    assert dict(ports(in_role("prefill"))) == {
        "disagg.http_port": 8001,
        "disagg.bootstrap_port": 18800,
        "disagg.zmq_port": 5555,
    }
    assert "disagg.bootstrap_port" not in dict(ports(in_role("decode")))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("node7", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("role", "values", "hosts"),
    [
        ("prefill", {}, []),
        ("prefill", {"disagg__http_host": "0.0.0.0"}, ["0.0.0.0"]),
        ("prefill", {"disagg__prefill_ips": ["10.0.0.1"]}, ["10.0.0.1"]),
        ("prefill", {"disagg__decode_ips": ["10.0.0.1"]}, []),
        ("decode", {"disagg__decode_ips": ["127.0.0.1"]}, []),
        ("router", {"router__host": "0.0.0.0"}, ["0.0.0.0"]),
        ("router", {"router__decode_urls": ["http://10.0.0.2:8100"]}, ["10.0.0.2"]),
        ("serve", {"disagg__http_host": "0.0.0.0"}, []),
        ("cluster", {"router__host": "0.0.0.0"}, []),
    ],
)
def test_hosts_beyond_this_machine(role: str, values: dict[str, Any], hosts: list[str]) -> None:
    assert off_loopback(in_role(role, **values)) == hosts


def test_control_messages_beyond_this_machine_need_a_secret(secret: None) -> None:
    values: dict[str, Any] = {"disagg__prefill_ips": ["10.0.0.1"]}
    (fault,) = refused("prefill", **values)
    assert fault.startswith(
        "disagg.secret_env=null: has no value, but this role talks to other roles at 10.0.0.1, "
        "where control messages are signed with a shared secret"
    )
    assert refused("prefill", **values, disagg__secret_env=SECRET) == []


@pytest.mark.parametrize("value", [None, ""])
def test_the_secret_s_variable_must_hold_one(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    if value is not None:
        monkeypatch.setenv(SECRET, value)
    (fault,) = refused("decode", disagg__secret_env=SECRET)
    assert fault.startswith(
        f"disagg.secret_env={SECRET}: the environment variable {SECRET} is not set here, or empty"
    )


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"prefill_urls": ["10.0.0.1:8001"]}, "10.0.0.1:8001 is no http address; write http://"),
        ({"prefill_urls": ["https://127.0.0.1:1"]}, "https://127.0.0.1:1 is no http address"),
        ({"decode_urls": ["http://"]}, "http:// names no host and port"),
        ({"decode_urls": ["http://h:99999"]}, "http://h:99999 is no address (Port out of range"),
        ({"decode_urls": ["http://127.0.0.1:1/v1"]}, "http://127.0.0.1:1/v1 has a path"),
        ({"decode_urls": ["http://127.0.0.1:1?a"]}, "http://127.0.0.1:1?a is more than a host"),
        (
            {"decode_urls": ["http://127.0.0.1:1", "http://127.0.0.1:1/"]},
            "http://127.0.0.1:1/ is named twice",
        ),
        (
            {"prefill_urls": ["http://127.0.0.1:1"], "decode_urls": ["http://127.0.0.1:1"]},
            "http://127.0.0.1:1 is in router.prefill_urls too",
        ),
    ],
)
def test_addresses_of_instances(values: dict[str, Any], found: str) -> None:
    (fault,) = refused("router", **{f"router__{name}": urls for name, urls in values.items()})
    key, _, problem = fault.partition(": ")
    assert key.startswith(f"router.{list(values)[-1]}=")
    assert problem.startswith(found)


def test_a_router_may_know_no_instance_at_first() -> None:
    assert refused("router", router__prefill_urls=[], router__decode_urls=[]) == []


def test_the_router_that_an_instance_joins() -> None:
    assert refused("decode", disagg__router_url="http://127.0.0.1:8000") == []
    assert refused("decode", disagg__router_url="127.0.0.1:8000") == [
        "disagg.router_url=127.0.0.1:8000: is no http address; write http://HOST:PORT"
    ]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"disagg__lease_s": 0.0}, "disagg.lease_s=0.0: is out of range; allowed is > 0"),
        ({"disagg__stash_s": float("nan")}, "disagg.stash_s=nan: is out of range; allowed is > 0"),
        (
            {"disagg__fence_timeout_s": float("inf")},
            "disagg.fence_timeout_s=inf: is out of range; allowed is > 0",
        ),
        (
            {"disagg__heartbeat_misses": 0},
            "disagg.heartbeat_misses=0: is out of range; allowed is >= 1",
        ),
    ],
)
def test_times_are_positive(values: dict[str, Any], found: str) -> None:
    assert refused("decode", **values) == [found]


def test_numbers_of_a_router() -> None:
    assert refused("router", router__retries=-1, router__request_timeout_s=-1.0) == [
        "router.request_timeout_s=-1.0: is out of range; allowed is > 0",
        "router.retries=-1: is out of range; allowed is >= 0",
    ]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (
            {"disagg__prefill_ips": ["10.0.0.1", "10.0.0.1"]},
            "disagg.prefill_ips=[10.0.0.1,10.0.0.1]: must name every node once, instance by "
            "instance, each leader first",
        ),
        (
            {
                "parallel__world_size": 4,
                "parallel__devices_per_node": 2,
                "parallel__master_port": 29500,
                "disagg__prefill_ips": ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
            },
            "disagg.prefill_ips=[10.0.0.1,10.0.0.2,10.0.0.3]: has 3 addresses, but one instance "
            "takes 2 nodes (parallel.world_size=4 / devices_per_node=2); list every node of every "
            "instance",
        ),
        (
            {
                "parallel__world_size": 4,
                "parallel__devices_per_node": 2,
                "disagg__prefill_ips": ["10.0.0.1", "10.0.0.2"],
            },
            "parallel.master_port=0: nodes of one instance cannot choose a free port together; set "
            "one that is free on every leader",
        ),
        (
            {
                "parallel__world_size": 4,
                "parallel__devices_per_node": 3,
                "disagg__prefill_ips": ["10.0.0.1", "10.0.0.2"],
                "parallel__master_port": 29500,
            },
            "parallel.devices_per_node=3: must divide world_size=4, or be 0 (all on this node)",
        ),
        (
            {
                "parallel__world_size": 4,
                "parallel__devices_per_node": 2,
                "parallel__master_port": 29500,
            },
            "parallel.devices_per_node=2: world_size=4 takes 2 nodes of 2 ranks: list their "
            "addresses in disagg.prefill_ips, the master first; allowed is 4, or 0 (all on this "
            "node)",
        ),
    ],
)
def test_nodes_of_a_role(secret: None, values: dict[str, Any], found: str) -> None:
    transfer = TransferConfig(_target_=TCP)
    given = {"disagg__secret_env": SECRET, "disagg__transfer": transfer} | values
    assert refused("prefill", **given) == [found]


def test_several_instances_of_several_nodes(secret: None) -> None:
    values = {
        "parallel__world_size": 4,
        "parallel__devices_per_node": 2,
        "parallel__master_port": 29500,
        "disagg__prefill_ips": [f"10.0.0.{n}" for n in range(1, 5)],
        "disagg__secret_env": SECRET,
        "disagg__transfer": TransferConfig(_target_=TCP),
    }
    assert refused("prefill", **values) == []


def test_an_engine_must_reach_the_other_side(secret: None) -> None:
    values = TWO_HOSTS | {"disagg__secret_env": SECRET}
    assert refused("prefill", **values) == [
        "disagg.transfer._target_=inferkit.kv_transfer.engines.shared_memory.SharedMemoryEngine: "
        "stays on one host, and disagg.prefill_ips and disagg.decode_ips name 2 (10.0.0.1, "
        "10.0.0.2)"
    ]
    assert refused("prefill", **values, disagg__transfer=TransferConfig(_target_=TCP)) == []
    (fault,) = refused("decode", disagg__transfer=TransferConfig(_target_=IN_PROCESS))
    assert "moves bytes within one process" in fault
    (fault,) = refused("decode", disagg__transfer=TransferConfig())
    assert fault.startswith("disagg.transfer._target_=: has no value, but prefill hands its KV")
    assert refused("decode", disagg__transfer=TransferConfig(_target_=TCP, num_threads=0)) == [
        "disagg.transfer.num_threads=0: is out of range; allowed is >= 1"
    ]


def test_a_user_s_own_engine_is_not_judged() -> None:
    own = TransferConfig(_target_="mypackage.Engine")
    assert refused("decode", disagg__transfer=own) == []
