"""Every command of ours that a page shows is one that there is: its verbs, and its options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.pages import PAGES, alternatives, resolved, shown, words_of


def commands(text: str) -> Iterator[str]:
    """What follows the word `penstock` wherever a page shows a command."""
    yield from (each.ours for each in shown(text) if each.ours is not None)


def problems(command: str) -> list[str]:
    """What is wrong with a command, as a user would type it after `penstock`."""
    found = []
    for words in alternatives(words_of(command)):
        verb, rest, missing = resolved(words)
        if missing:
            found.append(f"penstock {command}: there is no {missing!r}")
            continue
        known = {option for each in verb.params for option in (*each.opts, *each.secondary_opts)}
        known |= {"-h", "--help", "--debug", "--version"}
        options = {word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        found += [f"penstock {command}: no option {each}" for each in sorted(options - known)]
    return found


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
        "\n```\nlogs/\npenstock up\n```\n`outbox retry 7`, `outbox`\n\n```\npenstock up a\n```\n"
    )
    assert list(commands(page)) == [
        *("queue submit a)", "queue get    ID", "up a", "task list --status dead", "outbox retry 7")
    ]
