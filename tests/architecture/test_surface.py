"""The public names are the ones in this table.

A name that comes or goes changes what users may rely on: edit the table, and add a line to
CHANGELOG.md. A module that has `__all__` is public and has a row; an empty row says that there
are no public names, with or without `__all__`.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.source import SOURCE, Module, modules, plant

SURFACE: Mapping[str, str] = {
    "penstock": (
        "Batch BatchNotFound BatchView QueueDrained ScheduleNotFound ScheduleView"
        " Client DoNotRetry InvalidInput NotAllSubmitted NotSettled OutcomeUnknown PayloadLost"
        " PenstockError Polling Queue QueueConfig QueueNotFound Retry Task TaskCancelled"
        " TaskContext TaskEvent TaskFailed TaskNotFound TaskView Worker WorkerSettings"
        " DispatchSettings KeyConflict Reschedule WorkerIdConflict WorkerLeaseLost"
    ),
    "penstock.kernel": "",
    "penstock.store": (
        "AlreadyExists CREATE Cell Credentials Entry FaultPlan FaultyStore Head Interval Kind Meter"
        " MeteredStore NotFound Object ObjectStore Opening OutcomeUnknown Page Prices REPLACE"
        " Retries RetryingStore Stamped StoreError Swap TombstonedStore Version VersionConflict"
        " labelled open_store pages"
    ),
    "penstock.sync": "Queue Worker",
    "penstock.testing": "FaultPlan QUEUE_CHECKS QueueBench STORE_CHECKS World run_queue simulate",
    "penstock.testing.cost": (
        "Bill CAUSES Figures Growth Idle Saturated Steady Window Workload percentile price"
        " price_modes run_backlog run_idle run_saturated run_steady saturate window_of"
    ),
    "penstock.testing.queue_contract": "Bench Check PATIENT_CHECKS QUEUE_CHECKS THREADED_CHECKS",
    "penstock.testing.store_contract": "Check OpenClient STORE_CHECKS",
    "penstock.testing.virtual": (
        "Deadlock EPOCH Exhausted NotSimulated SECONDS_MAX STEPS_MAX SimulationError"
        " Unhandled VirtualClock VirtualLoop World simulate"
    ),
    "penstock.tokens": "Claims Grants HttpKeys ReadGrant Scope TokenRefused Verifier WriteGrant",
}


def surface_problems(package: ModuleType, expected: str) -> list[str]:
    """How the names that a package exports differ from those expected."""
    exported: Sequence[str] = getattr(package, "__all__", ())
    wanted = expected.split()
    where = package.__name__
    problems = [f"{where} no longer exports {name}" for name in wanted if name not in exported]
    for name in sorted(set(exported)):
        if name not in wanted:
            problems.append(f"{where} exports {name}, which is not in the table")
        if not hasattr(package, name):
            problems.append(f"{where} exports {name}, which it does not have")
        if exported.count(name) > 1:
            problems.append(f"{where} exports {name} twice")
    return problems


def unlisted_problems(found: Sequence[Module], listed: Collection[str]) -> list[str]:
    """Every module that exports names and has no row in the table."""
    return [
        f"{module.name} has __all__ and no row in the table of tests/architecture/test_surface.py"
        for module in found
        if module.name not in listed
        if any(
            isinstance(node, ast.Name) and node.id == "__all__" for node in ast.walk(module.tree)
        )
    ]


@pytest.mark.parametrize("package", SURFACE)
def test_the_public_names_are_those_of_the_table(package: str) -> None:
    assert surface_problems(importlib.import_module(package), SURFACE[package]) == []


def test_every_module_with_public_names_is_in_the_table() -> None:
    assert unlisted_problems(modules(SOURCE), SURFACE) == []


def _package(exported: Sequence[str] | None) -> ModuleType:
    package = ModuleType("planted")
    vars(package).update({"One": 1, "Two": 2})
    if exported is not None:
        vars(package)["__all__"] = exported
    return package


@pytest.mark.parametrize(
    ("exported", "expected", "problems"),
    [
        (None, "", []),
        ([], "", []),
        (["Two", "One"], "One Two", []),
        (None, "One", ["planted no longer exports One"]),
        (["One"], "One Two", ["planted no longer exports Two"]),
        (["One", "Two"], "One", ["planted exports Two, which is not in the table"]),
        (["Three"], "Three", ["planted exports Three, which it does not have"]),
        (("One", "One"), "One", ["planted exports One twice"]),
    ],
)
def test_a_changed_surface_is_found(
    exported: Sequence[str] | None, expected: str, problems: list[str]
) -> None:
    assert surface_problems(_package(exported), expected) == problems


@pytest.mark.parametrize("text", ["__all__ = ['A']", "__all__: list[str] = []", "__all__ += ['A']"])
def test_an_unlisted_module_is_found(tmp_path: Path, text: str) -> None:
    plain = "ALL = ['A']\n"
    plant(tmp_path, {"new/__init__.py": text, "new/a.py": text, "new/b.py": plain, "old.py": text})
    package, module = unlisted_problems(modules(tmp_path), {"old"})
    assert package.startswith("new has __all__")
    assert module.startswith("new.a has __all__")
