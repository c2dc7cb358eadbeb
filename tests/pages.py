"""What the pages show to type: the blocks of commands, and the commands of ours in sentences.

A block is typed if its language is a shell's, or if it has none and begins with a program that we
know. In a sentence a command is what stands between back quotes and begins with `penstock`, or with
the names of a group and of a verb in it, as `task list` does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from penstock.cli import cli
from tests.architecture.source import ROOT

PAGES = sorted(
    [
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("*.md"),
        *(each for each in (ROOT / "deploy").rglob("*") if each.suffix in {".md", ".yaml", ".sh"}),
    ]
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`]+)`")
_OURS = re.compile(r"(?:\$ )?(?:\w+=\$\()?(?:\.venv/bin/)?penstock (.*)", re.DOTALL)
_SHELLS = ("sh", "bash", "console")
_PROGRAM = re.compile(
    r"(\$ |\w+=\$\(|\.venv/bin/|\$SPARK_HOME|\. )"
    r"|(penstock|make|pip|curl|docker|kubectl|aws|export|source|python3?|git) "
)
_END = re.compile(r"[|>&;)…#]")


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two fences, below which sentence, in which section."""

    section: str
    told: str
    language: str
    text: str

    @property
    def is_typed(self) -> bool:
        is_shell = self.language in _SHELLS
        return is_shell or (not self.language and _PROGRAM.match(self.text) is not None)

    @property
    def lines(self) -> list[str]:
        """What is typed, a command a line, without remarks."""
        whole = self.text.replace("\\\n", " ").splitlines()
        return [said for each in whole if (said := re.sub(r"(^|\s+)# .*", "", each).strip())]


@dataclass(frozen=True, slots=True)
class Shown:
    """A line that a page shows to type. The section is that of a block, else there is none."""

    page: str
    section: str
    line: str

    @property
    def ours(self) -> str | None:
        """What follows the word `penstock`; None of another program."""
        found = _OURS.fullmatch(self.line)
        return None if found is None else found[1]


def blocks(text: str) -> Iterator[Block]:
    """All blocks of a page."""
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        sections = re.findall(r"^## (.*)$", _FENCE.sub("", before), re.MULTILINE)
        told = before.rstrip().rpartition("\n")[2]
        yield Block(sections[-1] if sections else "", told, found[1], found[2])


def shown(text: str, *, page: str = "") -> Iterator[Shown]:
    """All that a page shows to type: first what is in blocks, then what is in sentences."""
    for block in blocks(text):
        if block.is_typed:
            yield from (Shown(page, block.section, line) for line in block.lines)
    for found in _INLINE.findall(_FENCE.sub("", text)):
        line = " ".join(found.split())
        if _OURS.fullmatch(line):
            yield Shown(page, "", line)
        elif _names_a_verb(line):
            yield Shown(page, "", f"penstock {line}")


def shown_on(page: Path) -> list[Shown]:
    return list(shown(page.read_text(), page=str(page.relative_to(ROOT))))


def words_of(command: str) -> list[str]:
    """The words of a command, up to where the shell would see something else."""
    try:
        every = shlex.split(command, comments=True)
    except ValueError:
        every = command.split()
    kept = []
    for word in every:
        if _END.match(word):
            break
        kept.append(word.strip("[]").rstrip(")"))
    return [word for word in kept if word]


def alternatives(words: Sequence[str]) -> Iterator[list[str]]:
    """`pause|resume` is two commands."""
    for place, word in enumerate(words):
        if re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", word):
            for each in word.split("|"):
                yield from alternatives([*words[:place], each, *words[place + 1 :]])
            return
    yield list(words)


def resolved(words: Sequence[str]) -> tuple[click.Command, Sequence[str], str]:
    """The verb, the words after it, and the word that names no verb, if there is one."""
    verb: click.Command = cli
    context = click.Context(cli, info_name="penstock")
    for place, word in enumerate(words):
        if not isinstance(verb, click.Group):
            return verb, words[place:], ""
        if word.startswith("-") or word.isupper():
            return verb, words[place:], ""
        below = verb.get_command(context, word)
        if below is None:
            # What a group may be run without is an argument: `penstock demo queue`.
            takes = any(isinstance(each, click.Argument) for each in verb.params)
            return verb, words[place:], "" if takes else word
        verb, context = below, click.Context(below, info_name=word, parent=context)
    return verb, (), ""


def _names_a_verb(line: str) -> bool:
    """Whether it begins with a group and a verb of it: `outbox` may be anything."""
    first, *_ = [*alternatives(words_of(line)), []]
    if len(first) < 2:
        return False
    verb, rest, missing = resolved(first)
    return not missing and verb is not cli and len(first) - len(rest) >= 2
