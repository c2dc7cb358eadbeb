"""The judge: asks what is the matter, and writes what becomes of alerts, with their notices.

A turn is one transaction under a named lock, which is only tried; the dispatcher that judged last
goes on. A crash leaves a turn done or not done, and one whose commit was not answered is found done
by the next. Old alerts are removed on the way, some at a time. Called by a loop of the dispatcher.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psycopg.types.json import Jsonb

from penstock.dispatcher.alerts.deciding import Decision, Standing, decide
from penstock.dispatcher.alerts.findings import Finding, findings_of, statement_of
from penstock.dispatcher.alerts.rules import AlertSettings
from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.tasks.rows import storable

_log = logging.getLogger(__name__)

PACE_SECONDS: Final = 10.0
AWAY_SECONDS: Final = 35.0
"""After so long without a turn of the judge another dispatcher is the judge."""
OUTAGE_SECONDS: Final = 60.0
"""After so long without any judge, others could not be heard either."""
QUIET_SECONDS: Final = 120.0
"""How long after an outage nothing is opened that is about silence."""
GIVE_UP_SECONDS: Final = 86_400.0
FORGET_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Turned:
    """What a turn has done."""

    is_judge: bool
    opened: Sequence[Finding] = ()
    ended: int = 0
    notices: int = 0


class Judge:
    """One dispatcher's judge; of any number, one judges."""

    def __init__(
        self,
        database: Database,
        settings: AlertSettings,
        *,
        name: str,
        unserved: Sequence[str] = (),
        days: float = 30.0,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """`unserved` are runtimes that need no workers; `told` is called when notices are due."""
        self._database = database
        self._settings = settings
        self._name = name
        self._unserved = ("dispatcher", *unserved)
        self._days = days
        self._told = told

    async def turn(self) -> float | None:
        """Judge, unless another dispatcher does."""
        turned = await self._database.transact(self._judge)
        for each in turned.opened:
            _log.warning("alert: %s", each.summary)
        if turned.ended:
            _log.info("%d alerts are over", turned.ended)
        if turned.notices:
            self._told()
        return None

    async def _judge(self, connection: Connection) -> Turned:
        (lock,) = await _rows(connection, "take_alert_lock")
        if not lock["is_ours"]:
            return Turned(is_judge=False)
        turn = await _rows(connection, "take_alert_turn", **self._turn())
        if not turn:
            return Turned(is_judge=False)
        now, is_quiet = turn[0]["now"], turn[0]["is_quiet"]
        found: list[Finding] = []
        for rule in self._settings.rules:
            statement, asked = statement_of(rule, unserved=self._unserved)
            rows = await _rows(connection, statement, **asked)
            found += findings_of(rule, rows, is_quiet=is_quiet)
        standing = [Standing(**row) for row in await _rows(connection, "standing_alerts")]
        decision = decide(self._settings.rules, found, standing, now=now)
        return await self._write(connection, decision)

    def _turn(self) -> dict[str, Any]:
        said = {
            "rules": [{"name": each.name, "words": each.words} for each in self._settings.rules],
            "destinations": list(self._settings.destinations),
        }
        return {
            "name": self._name,
            "said": Jsonb(said),
            "away_seconds": AWAY_SECONDS,
            "outage_seconds": OUTAGE_SECONDS,
            "quiet_seconds": QUIET_SECONDS,
        }

    async def _write(self, connection: Connection, decision: Decision) -> Turned:
        destinations = list(self._settings.destinations)
        if decision.opened:
            rows = [_row(each, rule=each.rule, subject=each.subject) for each in decision.opened]
            await connection.execute(query("open_alerts"), {"alerts": Jsonb(rows)})
        if decision.changed:
            rows = [_row(each, id=number) for number, each in decision.changed]
            await connection.execute(query("change_alerts"), {"alerts": Jsonb(rows)})
        if decision.cleared:
            await connection.execute(query("clear_alerts"), {"alerts": decision.cleared})
        ended = [number for number, _ in decision.ended]
        made = await _rows(connection, "tell_of_opened", destinations=destinations)
        if ended:
            whys = [why for _, why in decision.ended]
            await connection.execute(query("end_alerts"), {"alerts": ended, "whys": whys})
            made += await _rows(connection, "tell_of_over", alerts=ended, destinations=destinations)
        orphans = {"destinations": destinations, "give_up_seconds": GIVE_UP_SECONDS}
        await connection.execute(query("give_up_orphans"), orphans)
        old = {"days": self._days, "limit": FORGET_MAX}
        await connection.execute(query("forget_alerts"), old)
        return Turned(is_judge=True, opened=decision.opened, ended=len(ended), notices=len(made))


def _row(finding: Finding, **more: object) -> dict[str, Any]:
    detail = {
        name: storable(value) if isinstance(value, str) else value
        for name, value in finding.detail.items()
    }
    return {
        "kind": finding.kind,
        "summary": storable(finding.summary),
        "path": finding.path,
        "detail": detail,
        **more,
    }


async def _rows(connection: Connection, name: str, /, **asked: object) -> list[dict[str, Any]]:
    return await (await connection.execute(query(name), asked)).fetchall()
