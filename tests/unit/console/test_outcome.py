"""What has become of a backfill, in a word and a sentence."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.console.pages.backfill import backfill_sentence, backfill_word, computed_count
from penstock.protocol.steering import BackfillAnswer


def backfill(state: str, **fields: Any) -> BackfillAnswer:
    said = {"partitions": 3, "planned": 3, "open": 0, "dead": 0, **fields}
    return BackfillAnswer(
        id=1,
        job="clean",
        kind="keys",
        state=state,
        concurrency=10,
        created_at=datetime(2030, 1, 1, tzinfo=UTC),
        **said,
    )


def test_what_was_cancelled_was_not_computed() -> None:
    found = backfill("done", dead=1, cancelled=1)
    assert computed_count(found) == 1
    assert backfill_word(found) == "incomplete"
    assert backfill_sentence(found) == (
        "Completed. Of 3 partitions 1 was computed, 1 was cancelled, 1 is dead."
    )


@pytest.mark.parametrize(
    ("found", "word", "sentence"),
    [
        (backfill("done"), "done", "All 3 computed."),
        (backfill("done", partitions=1, planned=1), "done", "Computed."),
        (backfill("done", partitions=0, planned=0), "done", "No partitions to compute."),
        (
            backfill("done", cancelled=3),
            "incomplete",
            "Completed. Of 3 partitions 0 were computed, 3 were cancelled.",
        ),
        (
            backfill("cancelled", partitions=9, planned=5, open=1, cancelled=2),
            "cancelled",
            (
                "Cancelled. Of 9 partitions 2 were computed, 2 were cancelled,"
                " 1 is not settled yet, 4 were not started."
            ),
        ),
        (backfill("running", open=3), "running", "0 of 3 are settled, 0 %."),
        (backfill("paused", open=2, dead=1), "paused", "1 of 3 is settled, 33 %: 1 is dead."),
    ],
)
def test_how_far_it_is_and_what_it_has_come_to(
    found: BackfillAnswer, word: str, sentence: str
) -> None:
    assert (backfill_word(found), backfill_sentence(found)) == (word, sentence)
