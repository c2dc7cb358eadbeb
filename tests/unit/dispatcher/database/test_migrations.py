"""Which steps a database is missing, and which databases are refused."""

from __future__ import annotations

import pytest

from penstock.dispatcher.database.migrations import AppliedMigration, Migration, migrations, pending
from penstock.kernel.errors import MigrationRefused

STEPS = migrations({"0001_a.sql": "one", "0002_b.sql": "two", "0003_c.sql": "three"})


def applied(*steps: Migration) -> list[AppliedMigration]:
    return [AppliedMigration(step.number, step.name, step.checksum) for step in steps]


def test_steps_come_in_the_order_of_their_numbers() -> None:
    texts = {f"{number:04}_x.sql": "" for number in range(12, 0, -1)}
    assert [step.number for step in migrations(texts)] == list(range(1, 13))


@pytest.mark.parametrize("names", [("0002_b.sql",), ("0001_a.sql", "0003_c.sql")])
def test_a_gap_is_an_error(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="are numbered"):
        migrations(dict.fromkeys(names, ""))


def test_two_steps_of_one_number_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"numbered \[1, 1\]"):
        migrations({"0001_a.sql": "", "0001_b.sql": ""})


@pytest.mark.parametrize("count", range(4))
def test_what_is_missing(count: int) -> None:
    assert pending(STEPS, applied(*STEPS[:count])) == STEPS[count:]


def test_a_changed_file_is_refused() -> None:
    changed = Migration(2, "0002_b", "two, but better")
    with pytest.raises(MigrationRefused, match="0002_b is not the one that was applied") as caught:
        pending(STEPS, applied(STEPS[0], changed))
    assert "never changes" in caught.value.hint


def test_a_renamed_file_is_refused() -> None:
    renamed = Migration(1, "0001_z", "one")
    with pytest.raises(MigrationRefused, match="0001_a is not the one"):
        pending(STEPS, applied(renamed))


def test_a_newer_database_is_refused() -> None:
    newer = Migration(4, "0004_d", "four")
    with pytest.raises(MigrationRefused, match=r"at migration 4 \(0004_d\)") as caught:
        pending(STEPS, applied(*STEPS, newer))
    assert "Upgrade Penstock" in caught.value.hint


def test_a_forgotten_step_is_refused() -> None:
    with pytest.raises(MigrationRefused, match="does not remember migration 1"):
        pending(STEPS, applied(STEPS[1]))
