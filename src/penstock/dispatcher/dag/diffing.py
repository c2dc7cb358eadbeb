"""What becomes of each job when one DAG takes the place of another.

Jobs are matched by name. A job keeps its generation, and with it all its data, if its lineage is
the same in both; else it is rebuilt in a new one. A job that was changed in its timing alone
keeps it. Pure: called by `dag diff`, and by `dag apply`, which does what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.dispatcher.dag.canonical import encoded, lineage_hashes, plain_job
from penstock.dispatcher.dag.model import Dag


@dataclass(frozen=True, slots=True)
class Change:
    """What is different in a job."""

    fields: tuple[str, ...]
    """The names of the fields, as in YAML, sorted."""
    keeps_generation: bool


@dataclass(frozen=True, slots=True)
class Diff:
    """Every job of two DAGs, in exactly one place; names are sorted."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: Mapping[str, Change]
    rebuilt: tuple[str, ...]
    """Not changed themselves, but something upstream of them was."""
    unchanged: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the two say the same."""
        return not (self.added or self.removed or self.changed or self.rebuilt)

    def new_generations(self) -> frozenset[str]:
        """The jobs whose datasets get a new generation."""
        edited = {name for name, change in self.changed.items() if not change.keeps_generation}
        return frozenset({*self.added, *self.rebuilt, *edited})


def diff(old: Dag, new: Dag) -> Diff:
    """What happens to each job on the way from one DAG to another."""
    before, after = _fields(old), _fields(new)
    old_lineage, new_lineage = lineage_hashes(old), lineage_hashes(new)
    changed: dict[str, Change] = {}
    rebuilt, unchanged = [], []
    for name in sorted(before.keys() & after.keys()):
        keeps = old_lineage[name] == new_lineage[name]
        names = sorted(before[name].keys() | after[name].keys())
        fields = tuple(each for each in names if before[name].get(each) != after[name].get(each))
        if fields:
            changed[name] = Change(fields, keeps)
        elif keeps:
            unchanged.append(name)
        else:
            rebuilt.append(name)
    return Diff(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed=changed,
        rebuilt=tuple(rebuilt),
        unchanged=tuple(unchanged),
    )


def _fields(dag: Dag) -> dict[str, dict[str, bytes]]:
    """What each job says, by field, in a form in which 1, 1.0 and true are different."""
    return {
        job.name: {field: encoded(value) for field, value in plain_job(job).items()}
        for job in dag.jobs
    }
