"""The runtime `lambda`: a handler with Lambda's signature.

At AWS, the operator is the name of a function. Each task invokes it once, through the outbox of the
dispatcher, and the function claims its task before it runs, heartbeats and completes: that is
`task_handler`, which the deployed code is wrapped in. No worker has a part in it.

On one machine, the same handler runs in a child process with nothing in its environment, after a
wake-up like any other. The operator is then the handler itself, `module.function` or
`module:function`, or the name of a function that `handlers` gives a handler for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from penstock.kernel.errors import WorkReleased
from penstock.runtimes import deployed
from penstock.runtimes.base import Delivery, Fault, Finished, Voice, Work
from penstock.runtimes.child_settings import ChildSettings, read_settings
from penstock.runtimes.children import ChildRuntime
from penstock.runtimes.frames import Begin, Style
from penstock.runtimes.references import Reference, handler_reference
from penstock.runtimes.resources import resource_faults

task_handler = deployed.task_handler
"""What the deployed code is wrapped in; see `penstock.runtimes.deployed`."""


class FunctionSettings(ChildSettings, frozen=True, kw_only=True):
    """The settings of the runtime `lambda`."""

    is_invoked: bool = False
    """Whether functions run at AWS, and workers run none."""
    handlers: dict[str, str] = msgspec.field(default_factory=dict)
    """The handlers of operators that are names of functions."""


class Function(ChildRuntime):
    """Runs a handler for each task, or leaves that to AWS."""

    name = "lambda"

    def __init__(self, settings: FunctionSettings | None = None) -> None:
        self._settings = settings if settings is not None else FunctionSettings()
        self.users = self._settings.users()
        self.delivery = Delivery.INVOKE if self._settings.is_invoked else Delivery.WAKE
        super().__init__(
            self._settings.child_command(),
            # The child empties it before the handler is imported; it has to find us until then.
            environment=self._settings.search_path(os.environ.get("PYTHONPATH", "")),
            warmth=self._settings.warmth(),
        )

    def faults(
        self, operator: str, *, config: Mapping[str, Any], resources: Mapping[str, Any]
    ) -> Iterator[Fault]:
        del config  # the user's own
        if self._settings.is_invoked:
            return
        if self._handler(operator) is None:
            message = (
                "Write your handler as module.function, or give this function one by `handlers`"
                " in the settings of the runtime lambda."
            )
            yield Fault("operator", message)
        yield from resource_faults(resources, runtime=self.name)

    def secrets_refused(self, operator: str) -> str:
        return (
            f"A function of Lambda has its secrets from its own configuration; name those of"
            f" {operator} there, and take them out here."
        )

    def untrusted_refused(self) -> str:
        return ""

    async def run(self, work: Work, voice: Voice) -> Finished:
        if self._settings.is_invoked:
            raise WorkReleased(
                "Functions run at AWS here, and not in workers; take lambda out of the runtimes"
                " of this worker."
            )
        wanted = self._handler(work.operator)
        if wanted is None:
            raise WorkReleased(f"This worker has no handler for {work.operator!r}.")
        complete = self._settings.completed(work)
        begin = Begin(style=Style.EVENT, entry=str(wanted), work=complete)
        return await self._children.run(begin, voice)

    def _handler(self, operator: str) -> Reference | None:
        return handler_reference(self._settings.handlers.get(operator, operator))


def function(settings: Mapping[str, Any]) -> Function:
    """The runtime of these settings."""
    return Function(read_settings(FunctionSettings, settings, runtime=Function.name))
