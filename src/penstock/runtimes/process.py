"""The runtime `process`: a user's Python function in a child process.

The operator is `module:function`, imported in the child from the folder in which the worker was
started, from `path`, or from what is installed; or it is a name that an installed package gives
such a function by the entry point group `penstock.operators`. The child has the environment of the
worker, less what proves who the worker is (`environment`): a user's code needs no secret of a
worker. It has its own token and credentials instead, while its task runs (`handed`). See `task` for
what the function is given, and `children` for how long a child lives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.kernel.errors import WorkReleased
from penstock.runtimes.base import Fault, Finished, Voice, Work
from penstock.runtimes.child_settings import ChildSettings, read_settings
from penstock.runtimes.children import ChildRuntime
from penstock.runtimes.environment import of_children
from penstock.runtimes.frames import Begin, Style
from penstock.runtimes.references import (
    FUNCTION_FORM,
    Reference,
    installed_operators,
    reference,
)
from penstock.runtimes.resources import resource_faults


class Process(ChildRuntime):
    """Runs `module:function` for each task."""

    name = "process"
    hands_over = True

    def __init__(self, settings: ChildSettings | None = None) -> None:
        self._settings = settings if settings is not None else ChildSettings()
        self._installed = installed_operators()
        self.users = self._settings.users()
        path = self._settings.search_path(os.environ.get("PYTHONPATH", ""))
        super().__init__(
            self._settings.child_command(),
            environment=of_children(os.environ, path),
            warmth=self._settings.warmth(),
        )

    def faults(
        self, operator: str, *, config: Mapping[str, Any], resources: Mapping[str, Any]
    ) -> Iterator[Fault]:
        del config  # the user's own
        if self._function(operator) is None:
            message = f"Write your function as {FUNCTION_FORM}, as in flights.clean:clean."
            yield Fault("operator", message)
        yield from resource_faults(resources, runtime=self.name)

    def secrets_refused(self, operator: str) -> str:
        del operator
        return ""

    def untrusted_refused(self) -> str:
        return ""

    async def run(self, work: Work, voice: Voice) -> Finished:
        wanted = self._function(work.operator)
        if wanted is None:
            # It was, where the DAG was applied: the package that offers it is not installed here.
            raise WorkReleased(
                f"{work.operator!r} is neither of the form {FUNCTION_FORM} nor offered by a package"
                " that is installed for this worker."
            )
        complete = self._settings.completed(work)
        begin = Begin(style=Style.TASK, entry=str(wanted), work=complete)
        return await self._children.run(begin, voice)

    def _function(self, operator: str) -> Reference | None:
        return self._installed.get(operator) or reference(operator)


def process(settings: Mapping[str, Any]) -> Process:
    """The runtime of these settings."""
    return Process(read_settings(ChildSettings, settings, runtime=Process.name))
