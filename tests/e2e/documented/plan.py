"""From what the pages show to what is run: each line once, whole, in its world, in an order.

What cannot be planned is a sentence that says what to do; nothing is left out in silence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.cli import cli
from tests.e2e.documented.tables import ENDINGS, FILLS, FIRST, LAST, REASONS, STAYS, TYPED
from tests.pages import PAGES, Shown, alternatives, resolved, shown_on, words_of

PIPELINE, QUEUE, NOWHERE, AWS = "pipeline", "queue", "nowhere", "aws"
TABLES = "tests/e2e/documented/tables.py"
_OPEN = re.compile(r"(?<![\w$])[A-Z]{2,}(?![\w])")
_SAVED = re.compile(r"\s> (\S+)$")
_OTHERS = {
    "curl": (PIPELINE, "curl --silent --show-error --fail-with-body", ""),
    "source": (NOWHERE, "source", "&& complete -p penstock"),
    "SPARK_HOME=$(python": (NOWHERE, "SPARK_HOME=$(python", "&& ls $SPARK_HOME/bin/spark-class"),
    "aws": (AWS, "aws", ""),
}
"""Programs of others, by the first word of the line: where they run, what is typed instead of that
word so that what fails is seen, and what is typed after it so that something is."""
_BESIDE_A_DISPATCHER = (
    *(
        "logs",
        "dispatcher",
        "worker",
        "sink",
        "source cron",
        "source webhook",
        "dag check",
        "dag show",
    ),
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A line to run, with facts of its world still to be filled in."""

    line: str
    """As it is typed, for people and for the shell."""
    world: str
    verb: str = ""
    """Ours, without its options and arguments; of another program there is none."""
    words: tuple[str, ...] = ()
    """What follows `penstock`."""
    saved: str = ""
    """The file that its output goes to."""

    @property
    def is_staying(self) -> bool:
        return self.verb in STAYS

    @property
    def rank(self) -> int:
        if self.verb in FIRST:
            return FIRST.index(self.verb) - len(FIRST)
        return LAST.index(self.verb) + 1 if self.verb in LAST else 0


@dataclass(slots=True)
class Plan:
    """What is run, what is not and why, and what somebody has to look at."""

    runs: list[Planned] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """The forms of `REASONS` that some line has."""
    problems: list[str] = field(default_factory=list)


def plan(every: Iterable[Shown] | None = None) -> Plan:
    """Plan all that the pages show."""
    found = list(every) if every is not None else [x for page in PAGES for x in shown_on(page)]
    # Of the same line, the one whose output is wanted.
    found.sort(key=lambda each: _SAVED.search(each.line) is None)
    typed_at = {(page, section) for page, section, _ in TYPED}
    typed = {each.line for each in found if (each.page, each.section) in typed_at}
    made, lines = Plan(), set[str]()
    for each in found:
        if each.line in typed:
            continue
        for planned in _planned(each, made):
            if planned.line not in lines | typed:
                lines.add(planned.line)
                made.runs.append(planned)
    made.runs.sort(key=lambda planned: (planned.rank, "--dry-run" not in planned.words))
    return made


def _planned(each: Shown, made: Plan) -> Iterator[Planned]:
    """What one line comes to; what is wrong with it is told to the plan."""
    if each.ours is None:
        yield from _of_others(each, made)
        return
    saved = _SAVED.search(each.ours)
    for words in alternatives(words_of(each.ours)):
        whole = _with_ending(words)
        line = " ".join(["penstock", *whole])
        if _has_reason(line, made):
            continue
        verb, rest, _ = resolved(whole)
        name = " ".join(whole[: len(whole) - len(rest)])
        filled = [_filled(word, name) for word in whole]
        left = [word for word in filled if _OPEN.search(word) and not word.startswith("{")]
        if left:
            made.problems.append(
                f"{each.page} shows '{line}': say what {' and '.join(left)} stands for, in FILLS of"
                f" {TABLES}."
            )
            continue
        yield Planned(
            shlex.join(["penstock", *filled]),
            _world(name, {option for param in verb.params for option in param.opts}),
            name if verb is not cli else "",
            tuple(filled),
            saved[1] if saved else "",
        )


def _of_others(each: Shown, made: Plan) -> Iterator[Planned]:
    if _has_reason(each.line, made):
        return
    program, _, rest = each.line.partition(" ")
    if program not in _OTHERS:
        made.problems.append(
            f"{each.page} shows '{each.line}': say where it runs, in _OTHERS of plan.py, or why it"
            f" does not, in REASONS of {TABLES}."
        )
        return
    world, first, after = _OTHERS[program]
    line = f"{first} {rest} {after}".rstrip()
    for shown, fact in FILLS.items():
        line = line.replace(shown, fact) if "://" in shown else line
    yield Planned(line, world)


def _has_reason(line: str, made: Plan) -> bool:
    found = {each.form for each in REASONS if re.fullmatch(each.form, line)}
    made.used |= found
    return bool(found)


def _with_ending(words: Sequence[str]) -> list[str]:
    line = " ".join(words)
    endings = [ending for form, ending in ENDINGS if re.fullmatch(form, line)]
    return [*words, *(shlex.split(endings[0]) if endings else ())]


def _filled(word: str, verb: str) -> str:
    names = verb.split()
    for count in range(len(names), -1, -1):
        fill = FILLS.get(" ".join([*names[:count], word]))
        if fill is not None:
            return fill
    return word


def _world(verb: str, options: set[str]) -> str:
    if verb.partition(" ")[0] == "queue":
        return QUEUE
    return PIPELINE if "--url" in options or verb in _BESIDE_A_DISPATCHER else NOWHERE
