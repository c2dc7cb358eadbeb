"""The settings of a runtime that runs children, and what follows from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from penstock.kernel.errors import InvalidInput
from penstock.kernel.shapes import wrong_shape
from penstock.runtimes.base import Work
from penstock.runtimes.children import Warmth
from penstock.runtimes.users import FOLDER, Users

_CHILD: Final = ("-m", "penstock.runtimes.child")


class ChildSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The settings of a runtime that runs children."""

    path: tuple[str, ...] = ()
    """Folders in which modules are looked for first."""
    python: Annotated[tuple[str, ...], Meta(max_length=20)] = ()
    """The Python that children run in, which must have Penstock; by default the worker's own."""
    tasks_max: Annotated[int, Meta(ge=1)] = 1_000
    """After how many tasks a child is replaced."""
    idle_seconds: Annotated[float, Meta(ge=0)] = 60.0
    idle_max: Annotated[int, Meta(ge=0)] = 32
    resources: dict[str, Any] = {}
    """What a job gets that says nothing else."""
    uids: str = ""
    """The users that untrusted work runs as, as in 60800-60863; empty runs none of it."""
    uids_folder: str = FOLDER
    """Where it is noted which of them are taken, for all workers of a machine."""
    untrusted_on_files: bool = False
    """Whether untrusted work also runs on a `file://` store, where it can read every dataset."""

    def users(self) -> Users | None:
        """The users that untrusted work runs as."""
        if not self.uids:
            return None
        return Users.of(self.uids, self.uids_folder, is_on_files=self.untrusted_on_files)

    def warmth(self) -> Warmth:
        """How long children are kept."""
        return Warmth(
            tasks_max=self.tasks_max, idle_seconds=self.idle_seconds, idle_max=self.idle_max
        )

    def child_command(self) -> Sequence[str]:
        """How a child is started."""
        return (*(self.python or (sys.executable,)), *_CHILD)

    def search_path(self, existing: str = "") -> Mapping[str, str]:
        """What a child gets in its environment, so that it finds modules."""
        path = os.pathsep.join([*self.path, *([existing] if existing else [])])
        return {"PYTHONPATH": path} if path else {}

    def completed(self, work: Work) -> Work:
        """The work with the resources that its job says nothing of."""
        return replace(work, resources={**self.resources, **work.resources})


AnySettings = TypeVar("AnySettings", bound=ChildSettings)


def read_settings(kind: type[AnySettings], said: Mapping[str, Any], *, runtime: str) -> AnySettings:
    """Settings as they should be, or one sentence about what is wrong."""
    try:
        return msgspec.convert(dict(said), kind, strict=False)
    except msgspec.ValidationError as error:
        field, words = wrong_shape(error)
        whose = f"{field!r} in the settings" if field else "What the settings say"
        raise InvalidInput(f"{whose} of the runtime {runtime} {words}.") from error
