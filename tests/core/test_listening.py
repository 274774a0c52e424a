import os
import socket

import pytest

from inferkit.core.errors import AddressError
from inferkit.core.listening import listening, reserved

KEYS = ("router.host", "router.port")


def test_a_port_in_use_is_told_with_its_user_and_what_would_do() -> None:
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        for use in (listening, lambda *a, **k: reserved(*a, **k).__enter__()):
            with pytest.raises(AddressError) as caught:
                use("127.0.0.1", port, keys=KEYS)
            error = caught.value
            assert error.given == f"router.port={port}" and error.key == "router.port"
            assert error.problem.startswith(
                "cannot be used on router.host=127.0.0.1 (Address already in use: "
            )
            assert f"process {os.getpid()})" in error.problem
            assert str(error).endswith("choose another, or 0 for a free one")
            assert error.fix == "router.port=0"


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_told_with_those_of_this_one(host: str) -> None:
    with pytest.raises(
        AddressError, match=rf"^router\.host={host} cannot be listened on"
    ) as caught:
        listening(host, 0, keys=KEYS)
    assert "127.0.0.1" in str(caught.value)
    assert (caught.value.key, caught.value.fix) == ("router.host", "router.host=127.0.0.1")


def test_a_port_that_others_know_is_replaced_by_a_free_one() -> None:
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(AddressError, match="on every node") as caught:
            reserved("127.0.0.1", port, keys=KEYS, is_agreed=True).__enter__()
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(caught.value.fix.partition("=")[2])))
