"""Options that verbs of every kind share: `--json`, `--absolute` for times, pages of lists.

Times are shown as ages, because that is what people ask; `--absolute` shows them as ISO 8601 in
UTC. Programs get them with `--json` in any case. Whoever shows a time asks `is_absolute`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

_ABSOLUTE: Final = "penstock.absolute"


def _note(context: click.Context, _parameter: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click's signature
    context.meta[_ABSOLUTE] = value


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
absolute_option = click.option(
    "--absolute",
    is_flag=True,
    expose_value=False,
    callback=_note,
    help="Show times in UTC instead of how long ago they were.",
)


def paged(*, limit: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--limit` and `--before`, for lists of what is numbered, the newest first."""

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        before = click.option(
            "--before",
            metavar="ID",
            type=click.IntRange(min=1),
            help="Only what came before this one: the next page.",
        )
        most = click.option(
            "--limit",
            metavar="N",
            type=click.IntRange(1, 1000),
            default=limit,
            show_default=True,
            help="At most so many.",
        )
        return most(before(verb))

    return decorate


def is_absolute() -> bool:
    """Whether somebody wants to see times and not ages, in the verb that runs now."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_ABSOLUTE))
