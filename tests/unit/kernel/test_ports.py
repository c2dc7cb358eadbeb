"""Connections end whose other end is gone."""

from __future__ import annotations

import socket

import pytest

from penstock.dispatcher.database.pool import watching
from penstock.kernel.ports import PEER_SECONDS_MAX, watch_peer


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has all of them")
def test_who_is_accepted_is_watched_as_its_listener_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watch_peer(listener)
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                idle, pause, most, unread = (
                    accepted.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (
                        *(socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT),
                        socket.TCP_USER_TIMEOUT,
                    )
                )
                assert idle + pause * most == PEER_SECONDS_MAX == unread / 1000 < 30


def test_what_the_address_of_a_postgres_says_of_it_counts() -> None:
    assert watching("host=db")["keepalives_idle"] == "10"
    assert "keepalives_idle" not in watching("postgresql://db/x?keepalives_idle=99")
