"""What has become of a backfill, in a word and a sentence. Pure.

A backfill is done when all of its tasks are over, well or not: so what was computed is said apart
from what was cancelled and what is dead. Only if all of it was computed is it called done.
"""

from __future__ import annotations

from penstock.console.rendering import counted, number, plural, share
from penstock.dispatcher.wire.steering import BackfillAnswer


def ended(found: BackfillAnswer) -> int:
    """How many of its partitions have a task that is over, well or not."""
    return max(0, found.planned - found.open)


def computed(found: BackfillAnswer) -> int:
    """How many of its partitions were computed."""
    return max(0, ended(found) - found.dead - found.cancelled)


def word_of(found: BackfillAnswer) -> str:
    """Its state; one that is over and has not computed everything is incomplete."""
    return (
        "incomplete" if found.state == "done" and (found.dead or found.cancelled) else found.state
    )


def sentence_of(found: BackfillAnswer) -> str:
    """How far it is, or what it has come to."""
    whole = found.partitions
    match found.state:
        case "done":
            if found.dead or found.cancelled:
                return f"It is over. Of {counted(whole, 'partition')} {_parts(found)}."
            return "There was nothing to compute." if not whole else _all(whole)
        case "cancelled":
            return f"It was cancelled. Of {counted(whole, 'partition')} {_parts(found)}."
    over = ended(found)
    lost = ", ".join(_lost(found))
    said = f"{number(over)} of {number(whole)} {plural(over, 'is', 'are')} over"
    return f"{said}, {share(over, whole)}{f': {lost}' if lost else ''}."


def _all(count: int) -> str:
    return "It is computed." if count == 1 else f"All {number(count)} are computed."


def _parts(found: BackfillAnswer) -> str:
    done = computed(found)
    said = [f"{number(done)} {plural(done, 'was', 'were')} computed", *_lost(found)]
    if found.open:
        said.append(f"{number(found.open)} {plural(found.open, 'is', 'are')} not over yet")
    if left := max(0, found.partitions - found.planned):
        said.append(f"{number(left)} {plural(left, 'was', 'were')} not begun")
    return ", ".join(said)


def _lost(found: BackfillAnswer) -> list[str]:
    said = []
    if found.cancelled:
        said.append(f"{number(found.cancelled)} {plural(found.cancelled, 'was', 'were')} cancelled")
    if found.dead:
        said.append(f"{number(found.dead)} {plural(found.dead, 'is', 'are')} dead")
    return said
