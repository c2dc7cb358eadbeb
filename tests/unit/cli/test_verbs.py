"""Every verb of the command line, whoever wrote it: help, an example, `--json`, and its place."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import click
import pytest

from penstock.cli import cli
from penstock.cli.start_page import EXAMPLES
from penstock.cli.verbs import Verbs

WITHOUT_JSON: Mapping[str, str] = {
    "penstock up": "runs until it is stopped, and logs",
    "penstock dispatcher": "runs until it is stopped, and logs",
    "penstock worker": "runs until it is stopped, and logs",
    "penstock sink": "runs until it is stopped, and logs",
    "penstock source cron": "runs until it is stopped, and logs",
    "penstock source webhook": "runs until it is stopped, and logs",
    "penstock query-service": "runs until it is stopped, and logs",
    "penstock source token": "prints one word, for a variable",
    "penstock demo": "a story for people",
    "penstock demo queue": "a story for people",
    "penstock completion": "prints a program for a shell",
    "penstock deploy kubernetes": "prints YAML for a program",
    "penstock deploy ecs": "prints JSON for a program",
}
"""Verbs that show nothing that a program would read, and why."""


@dataclass(frozen=True)
class Verb:
    """A verb, its name with those of its groups, and what its group says of it."""

    path: str
    command: click.Command
    listed: str

    @property
    def options(self) -> set[str]:
        return {opt for each in self.command.params for opt in each.opts}


def walk(group: click.Group, path: str) -> Iterator[Verb]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        places = group.places if isinstance(group, Verbs) else {}
        listed = places[name].short_help if name in places else command.get_short_help_str(100)
        found = Verb(f"{path} {name}", command, listed)
        yield found
        if isinstance(command, click.Group):
            yield from walk(command, found.path)


ALL = list(walk(cli, "penstock"))
LEAVES = [each for each in ALL if not isinstance(each.command, click.Group)]
# `penstock demo` is a demo by itself.
GROUPS = [each for each in ALL if isinstance(each.command, click.Group) and each.path[9:] != "demo"]
each_verb = pytest.mark.parametrize("verb", ALL, ids=lambda verb: verb.path)
each_leaf = pytest.mark.parametrize("verb", LEAVES, ids=lambda verb: verb.path)


def test_there_are_verbs() -> None:
    paths = [each.path for each in ALL]
    assert len(paths) == len(set(paths)) > 60
    assert {"penstock settings", "penstock logs", "penstock completion"} <= set(paths)


@each_verb
def test_a_verb_says_what_it_is_for(verb: Verb) -> None:
    assert verb.command.help, "no docstring"
    short = verb.command.get_short_help_str(limit=100)
    assert verb.command.short_help, "no short help"
    assert short.endswith(".")
    assert not short.endswith("...")
    assert verb.listed == short
    for each in verb.command.params:
        if isinstance(each, click.Option):
            assert each.help, f"{each.opts[0]} has no help"


@each_verb
def test_a_verb_has_an_example_that_is_one(verb: Verb) -> None:
    said = verb.command.epilog or ""
    assert said.startswith("Example: ")
    assert verb.path in said
    words = said.removeprefix("Example: ").partition(" | ")[0].replace("<(", " ").rstrip(")")
    words = words[words.index("penstock") :]
    check_words(words)


@each_leaf
def test_a_verb_that_shows_something_shows_it_to_programs(verb: Verb) -> None:
    if verb.path in WITHOUT_JSON:
        assert "--json" not in verb.options, "it has --json, and a reason why not"
    else:
        assert "--json" in verb.options


@each_leaf
def test_a_verb_that_ends_with_1_by_itself_says_when(verb: Verb) -> None:
    assert verb.command.callback is not None
    source = inspect.getsource(inspect.unwrap(verb.command.callback))
    if re.search(r"\.exit\((?!0\))|return EXIT_", source):
        assert "xit code" in (verb.command.help or ""), "its help has no exit codes"


@pytest.mark.parametrize("verb", GROUPS, ids=lambda verb: verb.path)
def test_a_group_alone_shows_its_verbs(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    with click.Context(verb.command, info_name=verb.path) as context:
        context.invoked_subcommand = None
        context.invoke(verb.command)
    assert "Commands:" in capsys.readouterr().out


def test_the_exceptions_are_verbs() -> None:
    assert set(WITHOUT_JSON) <= {each.path for each in ALL}


@pytest.mark.parametrize("title", EXAMPLES)
def test_what_penstock_alone_proposes_can_be_typed(title: str) -> None:
    for command, purpose in EXAMPLES[title]:
        check_words(command)
        assert len(f"  {command}") + 2 < 60
        assert purpose


def check_words(text: str) -> None:
    """Raise if a command line names a verb or an option that is not there."""
    command: click.Command = cli
    context = click.Context(cli)
    words = shlex.split(text)[1:]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        if found is None:
            break
        command, words = found, words[1:]
    options = {opt: each for each in command.params for opt in each.opts}
    for word in words:
        if word.startswith("--"):
            assert word in options, f"{text}: there is no {word}"
    if not isinstance(command, click.Group):
        command.make_parser(context).parse_args(list(words))
    elif words and not words[0].startswith("-"):
        raise AssertionError(f"{text}: there is no verb {words[0]}")
