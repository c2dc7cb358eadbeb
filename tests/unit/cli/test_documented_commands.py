"""Every command of ours that a page shows is one that there is: its verbs, and its options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

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
_INLINE = re.compile(r"`(?:\.venv/bin/)?penstock ([^`]+)`")
_LINE = re.compile(r"^(?:\$ |\w+=\$\(|\.venv/bin/)?penstock (.*)$", re.MULTILINE)
_SHELLS = ("", "sh", "bash", "console")
_END = re.compile(r"^([|>&;)…#]|…)")


def commands(text: str) -> Iterator[str]:
    """What follows the word `penstock` wherever a page shows a command."""
    for language, block in _FENCE.findall(text):
        if language in _SHELLS:
            yield from _LINE.findall(block.replace("\\\n", " "))
    for found in _INLINE.findall(_FENCE.sub("", text)):
        yield " ".join(found.split())


def problems(command: str) -> list[str]:
    """What is wrong with a command, as a user would type it after `penstock`."""
    found = []
    for words in _alternatives(_words(command)):
        verb, rest, missing = _resolved(words)
        if missing:
            found.append(f"penstock {command}: there is no {missing!r}")
            continue
        known = {option for each in verb.params for option in (*each.opts, *each.secondary_opts)}
        known |= {"-h", "--help", "--debug", "--version"}
        options = {word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        found += [f"penstock {command}: no option {each}" for each in sorted(options - known)]
    return found


def _words(command: str) -> list[str]:
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


def _alternatives(words: Sequence[str]) -> Iterator[list[str]]:
    """`pause|resume` is two commands."""
    for place, word in enumerate(words):
        if re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", word):
            for each in word.split("|"):
                yield from _alternatives([*words[:place], each, *words[place + 1 :]])
            return
    yield list(words)


def _resolved(words: Sequence[str]) -> tuple[click.Command, Sequence[str], str]:
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_on_a_page_are_ours(page: Path) -> None:
    assert not [each for command in commands(page.read_text()) for each in problems(command)]


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {each.name for each in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert not {each for each in pages if f"]({each})" not in index}


def test_the_pages_show_commands() -> None:
    found = [each for page in PAGES for each in commands(page.read_text())]
    assert len(found) > 100


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("upp shop.yaml", "no 'upp'"),
        ("queue submitt x", "no 'submitt'"),
        ("up shop.yaml --prot 1", "no option --prot"),
        ("queue pause|halt --type x", "no 'halt'"),
        ("dataset files totals > files.txt --nonsense", ""),
        ("queue schedule add|list", ""),
        ("VERB --help", ""),
    ],
)
def test_what_is_wrong_is_found(command: str, wrong: str) -> None:
    said = problems(command)
    assert wrong in " ".join(said)
    assert bool(said) == bool(wrong)


def test_commands_are_found_in_blocks_and_in_sentences() -> None:
    page = (
        "Type `penstock task list\n--status dead` or\n\n```sh\nID=$(penstock queue submit a)\n"
        "penstock queue get \\\n  ID\necho penstock up\n```\n\n```toml\npenstock = 1\n```\n"
    )
    assert list(commands(page)) == ["queue submit a)", "queue get    ID", "task list --status dead"]
