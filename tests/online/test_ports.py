import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from inferkit.config.schema import InferenceConfig
from inferkit.online.ports import port_faults
from tests.config.configs import in_role

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port in use, the one before it free."""
    while True:
        with socket.create_server((HOST, 0)) as server:
            port = server.getsockname()[1]
            with socket.socket() as before:
                try:
                    before.bind((HOST, port - 1))
                except OSError:
                    continue
            yield port
            return


def role(name: str, **values: object) -> InferenceConfig:
    free = {"disagg__http_port": 0, "disagg__zmq_port": 0, "disagg__bootstrap_port": 0}
    return in_role(name, **(free | values))


@pytest.mark.parametrize("name", ["serve", "prefill", "decode"])
def test_each_port_in_use_is_a_fault_that_a_free_one_cures(name: str, taken: int) -> None:
    config = role(name, disagg__http_port=taken, disagg__zmq_port=taken)

    http, zmq = port_faults(config)

    assert http.given == f"disagg.http_port={taken}"
    assert http.problem.startswith("cannot be used on disagg.http_host=127.0.0.1 (Address already")
    assert http.fix is not None and http.fix.add == ("disagg.http_port=0",)
    assert zmq.given == f"disagg.zmq_port={taken}"
    assert zmq.problem.startswith("cannot be used on 127.0.0.1 (Address already in use")


def test_the_port_after_is_taken_too(taken: int) -> None:
    (fault,) = port_faults(role("decode", disagg__zmq_port=taken - 1))

    assert fault.given == f"disagg.zmq_port={taken - 1}"
    assert fault.problem.startswith(f"takes {taken} as well, which cannot be used")


def test_only_prefill_listens_for_the_bootstrap(taken: int) -> None:
    (fault,) = port_faults(role("prefill", disagg__bootstrap_port=taken))
    assert fault.key == "disagg.bootstrap_port"
    assert port_faults(role("decode", disagg__bootstrap_port=taken)) == []


@pytest.mark.parametrize("name", ["router", "cluster"])
def test_what_clients_talk_to(name: str, taken: int) -> None:
    (fault,) = port_faults(in_role(name, router__port=taken))
    assert fault.given == f"router.port={taken}"
    assert port_faults(in_role(name, router__port=0)) == []
    (fault,) = port_faults(in_role(name, router__port=0, router__host="192.0.2.1"))
    assert fault.given == "router.host=192.0.2.1"


def test_ranks_meet_at_a_port_of_their_own(taken: int) -> None:
    config = role("serve", parallel__master_port=taken, parallel__world_size=2)
    assert [fault.key for fault in port_faults(config)] == ["parallel.master_port"]
    assert port_faults(role("serve", parallel__master_port=taken)) == []


def test_another_runner_is_not_judged(taken: int) -> None:
    config = role("serve", disagg__http_port=taken)
    other = replace(config, runner=replace(config.runner, _target_="mypackage.Runner"))

    assert port_faults(other) == []
