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
from dataclasses import dataclass
from typing import Any

from penstock.kernel.errors import WorkReleased
from penstock.kernel.settings_schema import read_table, setting
from penstock.runtimes import deployed
from penstock.runtimes.base import AttemptWork, Delivery, RuntimeFault, WorkReporter, WorkResult
from penstock.runtimes.frames import BeginTask, CallStyle
from penstock.runtimes.process import ChildRuntime, ChildSettings
from penstock.runtimes.resource_limits import resource_faults
from penstock.runtimes.user_code import FunctionReference, handler_reference

task_handler = deployed.task_handler
"""What the deployed code is wrapped in; see `penstock.runtimes.deployed`."""


@dataclass(frozen=True, kw_only=True)
class FunctionSettings(ChildSettings):
    """The settings of the runtime `lambda`."""

    is_invoked: bool = setting(default=False)
    """Whether functions run at AWS, and workers run none."""
    handlers: dict[str, str] = setting({})
    """The handlers of operators that are names of functions."""


class LambdaRuntime(ChildRuntime):
    """Runs a handler for each task, or leaves that to AWS."""

    name = "lambda"

    def __init__(self, settings: FunctionSettings | None = None) -> None:
        self._settings = settings if settings is not None else FunctionSettings()
        self.users = self._settings.users()
        self.delivery = Delivery.INVOKE if self._settings.is_invoked else Delivery.WAKE
        super().__init__(
            self._settings.interpreter(),
            # The child empties it before the handler is imported; it has to find us until then.
            environment=self._settings.search_path(os.environ.get("PYTHONPATH", "")),
            warmth=self._settings.warmth(),
        )

    def faults(
        self, operator: str, *, config: Mapping[str, Any], resources: Mapping[str, Any]
    ) -> Iterator[RuntimeFault]:
        del config  # the user's own
        if self._settings.is_invoked:
            return
        if self._handler(operator) is None:
            message = (
                "Write your handler as module.function, or give this function one by `handlers`"
                " in the settings of the runtime lambda."
            )
            yield RuntimeFault("operator", message)
        yield from resource_faults(resources, runtime=self.name)

    def secrets_refused(self, operator: str) -> str:
        return (
            f"A function of Lambda has its secrets from its own configuration; name those of"
            f" {operator} there, and take them out here."
        )

    def untrusted_refused(self) -> str:
        return ""

    async def run(self, work: AttemptWork, reporter: WorkReporter) -> WorkResult:
        if self._settings.is_invoked:
            raise WorkReleased(
                "Functions run at AWS here, and not in workers; take lambda out of the runtimes"
                " of this worker."
            )
        wanted = self._handler(work.operator)
        if wanted is None:
            raise WorkReleased(f"This worker has no handler for {work.operator!r}.")
        complete = self._settings.completed(work)
        begin = BeginTask(style=CallStyle.EVENT, entry=str(wanted), work=complete)
        return await self._children.run(begin, reporter)

    def _handler(self, operator: str) -> FunctionReference | None:
        return handler_reference(self._settings.handlers.get(operator, operator))


def function(settings: Mapping[str, Any]) -> LambdaRuntime:
    """The runtime of these settings."""
    return LambdaRuntime(read_table(FunctionSettings, settings, whose="the runtime lambda"))
