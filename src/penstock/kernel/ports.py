"""Ports of this machine, and connections: which port is free, and who is at the other end still.

Between the answer and its use another process may take a port; whoever then fails says so.

A machine that loses its power, or its network, ends no connection: whoever waits there for an
answer waits for many minutes, unless the kernel is told to ask (`watch_peer`).
"""

from __future__ import annotations

import socket
from typing import Final

from penstock.kernel.errors import InvalidInput

SILENT_SECONDS: Final = 10
ASK_SECONDS: Final = 5
ASKS_MAX: Final = 2
PEER_SECONDS_MAX: Final = SILENT_SECONDS + ASK_SECONDS * ASKS_MAX
"""After how long a connection ends whose other end is silent, or acknowledges nothing."""


def watch_peer(connection: socket.socket) -> None:
    """Have the kernel end a connection soon whose other end is gone; accepted ones are like it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENT_SECONDS),
        ("TCP_KEEPINTVL", ASK_SECONDS),
        ("TCP_KEEPCNT", ASKS_MAX),
        ("TCP_USER_TIMEOUT", 1000 * PEER_SECONDS_MAX),
    ):
        # Other systems than Linux do not know all of them.
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_free(host: str, port: int, *, hint: str = "") -> None:
    """Raise `InvalidInput` if nothing can listen on this address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            why = error.strerror or str(error)
            raise InvalidInput(f"Cannot listen on {host}:{port}: {why}.", hint=hint) from error
