"""Ports of this machine: free ones, and those that somebody has."""

from __future__ import annotations

import socket

import pytest

from penstock.kernel.errors import InvalidInput
from penstock.kernel.ports import check_free, free_port


def test_a_free_port_can_be_had() -> None:
    port = free_port()
    check_free("127.0.0.1", port)
    # Asking takes nothing.
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(InvalidInput) as raised:
            check_free("127.0.0.1", port, hint="Take another.")
        assert raised.value.message.startswith(f"Cannot listen on 127.0.0.1:{port}: Address")
        assert raised.value.hint == "Take another."
    check_free("127.0.0.1", port)


def test_a_port_that_is_just_free_again_can_be_had() -> None:
    """What a listener leaves behind when it ends does not keep the next from starting."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            accepted, _ = server.accept()
            # The side of the server closes first, so that it is the one that lingers.
            accepted.close()
    check_free("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_told(host: str) -> None:
    with pytest.raises(InvalidInput, match="Cannot listen on"):
        check_free(host, 0)
