"""The part of an event loop that reaches the real world: refused, or done inline.

A simulation is a function of its seed, so nothing in it may wait for a socket, a process, a
signal or another thread. Each such method of asyncio's loop raises `NotSimulated` when it is
called, with a sentence that says what was asked for. The one exception is a function for an
executor: it runs at once, where it is submitted. `VirtualLoop` is built on this class.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop, _set_running_loop
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from penstock.testing.virtual.errors import NotSimulated

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


def refuse(what: str) -> NoReturn:
    """Raise the error for something that virtual time cannot have."""
    raise NotSimulated(
        f"A simulation in virtual time has no {what}.",
        hint="Hand the simulated code an in-memory stand-in, or test this part on a real loop.",
    )


def _refusal(what: str) -> Any:
    def refused(_loop: asyncio.AbstractEventLoop, *_args: object, **_kwargs: object) -> NoReturn:
        refuse(what)

    return refused


class SealedLoop(asyncio.AbstractEventLoop):
    """A loop without a world around it."""

    # The type is Any because the methods' signatures do not matter: none of them ever returns.
    getaddrinfo: Any = _refusal("name resolution (getaddrinfo)")
    getnameinfo: Any = _refusal("name resolution (getnameinfo)")
    create_connection: Any = _refusal("sockets (create_connection)")
    create_server: Any = _refusal("sockets (create_server)")
    create_unix_connection: Any = _refusal("sockets (create_unix_connection)")
    create_unix_server: Any = _refusal("sockets (create_unix_server)")
    create_datagram_endpoint: Any = _refusal("sockets (create_datagram_endpoint)")
    connect_accepted_socket: Any = _refusal("sockets (connect_accepted_socket)")
    start_tls: Any = _refusal("sockets (start_tls)")
    sendfile: Any = _refusal("sockets (sendfile)")
    sock_recv: Any = _refusal("sockets (sock_recv)")
    sock_recv_into: Any = _refusal("sockets (sock_recv_into)")
    sock_recvfrom: Any = _refusal("sockets (sock_recvfrom)")
    sock_recvfrom_into: Any = _refusal("sockets (sock_recvfrom_into)")
    sock_sendall: Any = _refusal("sockets (sock_sendall)")
    sock_sendto: Any = _refusal("sockets (sock_sendto)")
    sock_sendfile: Any = _refusal("sockets (sock_sendfile)")
    sock_connect: Any = _refusal("sockets (sock_connect)")
    sock_accept: Any = _refusal("sockets (sock_accept)")
    add_reader: Any = _refusal("file descriptors to watch (add_reader)")
    remove_reader: Any = _refusal("file descriptors to watch (remove_reader)")
    add_writer: Any = _refusal("file descriptors to watch (add_writer)")
    remove_writer: Any = _refusal("file descriptors to watch (remove_writer)")
    connect_read_pipe: Any = _refusal("pipes (connect_read_pipe)")
    connect_write_pipe: Any = _refusal("pipes (connect_write_pipe)")
    subprocess_shell: Any = _refusal("processes (subprocess_shell)")
    subprocess_exec: Any = _refusal("processes (subprocess_exec)")
    add_signal_handler: Any = _refusal("signals (add_signal_handler)")
    remove_signal_handler: Any = _refusal("signals (remove_signal_handler)")

    _debug = False

    def run_in_executor(
        self,
        executor: Executor | None,  # noqa: ARG002 - the signature is asyncio's
        func: Callable[[*Arguments], Result],
        *args: *Arguments,
    ) -> asyncio.Future[Result]:
        """Run the function at once; its result arrives in a later step."""
        future: asyncio.Future[Result] = self.create_future()
        running = _get_running_loop()
        # As in a thread: there is no running loop, and no context variable is set.
        _set_running_loop(None)
        try:
            result = Context().run(func, *args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
            self.call_soon(_settle, future, future.set_exception, error)
        else:
            self.call_soon(_settle, future, future.set_result, result)
        finally:
            _set_running_loop(running)
        return future

    def set_default_executor(self, executor: Executor) -> None:
        """Accept any executor; functions run inline all the same."""

    async def shutdown_default_executor(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is asyncio's
    ) -> None:
        """Do nothing: there is no executor."""

    def set_task_factory(self, factory: object) -> None:
        if factory is not None:
            refuse("task factory but its own (set_task_factory)")

    def get_task_factory(self) -> None:
        return None

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:  # noqa: FBT001 - the signature is asyncio's
        self._debug = enabled


def _settle(future: asyncio.Future[Any], settle: Callable[[Any], None], outcome: object) -> None:
    if not future.done():
        settle(outcome)
