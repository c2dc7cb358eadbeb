"""What has become of a backfill, in a word and a sentence."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.console.pages.outcome import computed, sentence_of, word_of
from penstock.dispatcher.wire.steering import BackfillAnswer


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
    assert computed(found) == 1
    assert word_of(found) == "incomplete"
    assert sentence_of(found) == (
        "It is over. Of 3 partitions 1 was computed, 1 was cancelled, 1 is dead."
    )


@pytest.mark.parametrize(
    ("found", "word", "sentence"),
    [
        (backfill("done"), "done", "All 3 are computed."),
        (backfill("done", partitions=1, planned=1), "done", "It is computed."),
        (backfill("done", partitions=0, planned=0), "done", "There was nothing to compute."),
        (
            backfill("done", cancelled=3),
            "incomplete",
            "It is over. Of 3 partitions 0 were computed, 3 were cancelled.",
        ),
        (
            backfill("cancelled", partitions=9, planned=5, open=1, cancelled=2),
            "cancelled",
            (
                "It was cancelled. Of 9 partitions 2 were computed, 2 were cancelled,"
                " 1 is not over yet, 4 were not begun."
            ),
        ),
        (backfill("running", open=3), "running", "0 of 3 are over, 0 %."),
        (backfill("paused", open=2, dead=1), "paused", "1 of 3 is over, 33 %: 1 is dead."),
    ],
)
def test_how_far_it_is_and_what_it_has_come_to(
    found: BackfillAnswer, word: str, sentence: str
) -> None:
    assert (word_of(found), sentence_of(found)) == (word, sentence)
