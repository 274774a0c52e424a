"""Sockets that listen, and what to tell where one cannot."""

import contextlib
import errno
import socket
from collections.abc import Iterator

import psutil

from inferkit.core.errors import AddressError

Keys = tuple[str, str]
KEYS: Keys = ("host", "port")
BACKLOG = 2048


def listening(host: str, port: int, *, keys: Keys = KEYS) -> socket.socket:
    """A socket that listens; 0 = a free port.

    Args:
        keys: that host and port come from.

    Raises:
        AddressError: the address is not of this machine, or in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only with its protocol named do connections send small pieces at once: asyncio turns the delay
    # of TCP off where it sees it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise address_error(error, host, port, keys=keys) from error
    return listener


@contextlib.contextmanager
def reserved(host: str, port: int, *, keys: Keys = KEYS, is_agreed: bool = False) -> Iterator[int]:
    """A port that no other program is given meanwhile, and on which one of ours can listen, for a
    reservation does not; 0 = a free one.

    Args:
        is_agreed: others know the number from their own configuration, so 0 is none.

    Raises:
        AddressError: as for `listening`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reservation.bind((host, port))
        except OSError as error:
            raise address_error(error, host, port, keys=keys, is_agreed=is_agreed) from error
        yield reservation.getsockname()[1]


def address_error(
    error: OSError, host: str, port: int, *, keys: Keys, is_agreed: bool = False
) -> AddressError:
    """What to tell of an address that the system refuses."""
    host_key, port_key = keys
    reason = error.strerror or str(error)
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        user = _user_of(port) if error.errno == errno.EADDRINUSE else ""
        at = f"{host_key}={host}" if "." in host_key else host or "any address"
        free = _free_port(host) if is_agreed else 0
        hint = f"such as {free}, on every node" if is_agreed else "or 0 for a free one"
        return AddressError(
            f"{port_key}={port}",
            f"cannot be used on {at} ({reason}{user}); choose another, {hint}",
            key=port_key,
            fix=f"{port_key}={free}",
        )
    own = ", ".join(sorted(_own_addresses()))
    return AddressError(
        f"{host_key}={host}",
        f"cannot be listened on ({reason}); this machine has {own}",
        key=host_key,
        fix=f"{host_key}=127.0.0.1" if "." in host_key else "",
    )


def _free_port(host: str) -> int:
    with reserved(host, 0) as port:
        return port


def _user_of(port: int) -> str:
    """`: python, process 123`, where the system tells it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN and connection.pid
            if is_listening and connection.laddr[1:] == (port,):
                return f": {psutil.Process(connection.pid).name()}, process {connection.pid}"
    return ""


def _own_addresses() -> set[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in families
    }
