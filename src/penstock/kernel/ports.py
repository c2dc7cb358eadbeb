"""Ports of this machine: one that is free, and whether an address can be had.

Between the answer and its use another process may take the port; whoever then fails says so.
"""

from __future__ import annotations

import socket

from penstock.kernel.errors import InvalidInput


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
            raise InvalidInput(f"{host}:{port} cannot be had: {why}.", hint=hint) from error
