"""What the parent of an instance binds, and what it tells clients of its end."""

import asyncio
import socket

from inferkit.core.errors import WorkerError
from inferkit.core.listening import listening
from inferkit.online.errors import GenerationFailed, Unavailable
from inferkit.online.runner import for_clients, url_of
from tests.online.serving import run


def test_a_free_port_is_chosen_and_told():
    with listening("127.0.0.1", 0) as listener:
        url = url_of(listener)
        port = int(url.removeprefix("http://127.0.0.1:"))
        socket.create_connection(("127.0.0.1", port)).close()


def test_connections_send_small_pieces_at_once():
    async def check():
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def serve(reader, writer):
            sock = writer.get_extra_info("socket")
            accepted.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listening("127.0.0.1", 0)
        async with await asyncio.start_server(serve, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            # Without it a token waits until the one before it is acknowledged, 40 ms later.
            assert await accepted
            writer.close()

    run(check())


def test_clients_hear_the_cause_without_paths():
    error = WorkerError(
        "rank 0 ended without a result: killed by SIGKILL (out of memory?); its output is under "
        "/a/b/c\nTraceback ..."
    )
    told = for_clients(error)
    assert isinstance(told, GenerationFailed) and told.status == 500
    assert str(told) == "rank 0 ended without a result: killed by SIGKILL (out of memory?)"
    assert isinstance(for_clients(KeyboardInterrupt()), Unavailable)
    assert isinstance(for_clients(SystemExit(143)), Unavailable)
