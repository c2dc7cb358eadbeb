"""Options that verbs of every kind share: `--json` for programs, `--absolute` for times.

Times are shown as ages, because that is what people ask; `--absolute` shows them as ISO 8601 in
UTC. Programs get them with `--json` in any case. Whoever shows a time asks `is_absolute`.
"""

from __future__ import annotations

from typing import Final

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


def is_absolute() -> bool:
    """Whether somebody wants to see times and not ages, in the verb that runs now."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_ABSOLUTE))
