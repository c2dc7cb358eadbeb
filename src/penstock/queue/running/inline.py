"""Handlers and hooks without threads and processes of their own, for tests in virtual time.

A plain function is called on the loop: it takes no time there, and nothing can interrupt it. One
that returns an awaitable has it awaited. `async def` functions are left as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from penstock.queue.running.handlers import Handler


def inline_handler(handler: Handler) -> Handler:
    """The same handler, run where it is called."""
    function = handler.function if handler.is_async else inline_function(handler.function)
    return dataclasses.replace(handler, function=function, isolate=False)


def inline_function(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function as an `async def`."""

    @functools.wraps(function)
    async def called(value: Any) -> Any:
        result = function(value)
        return await result if inspect.isawaitable(result) else result

    return called
