"""Alerts as people and programs look at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.dispatcher.database.pool import Connection, Database
from penstock.dispatcher.database.queries import query
from penstock.dispatcher.wire.alerts import (
    AlertAnswer,
    AlertsAnswer,
    AlertState,
    NoticeAnswer,
    NoticeState,
    RuleAnswer,
)


class AlertViews:
    """The questions. Each is one short transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def alerts(
        self, *, state: AlertState | None = None, before: int | None = None, limit: int = 100
    ) -> AlertsAnswer:
        """Alerts, the newest first."""
        is_open = None if state is None else state is AlertState.OPEN
        asked = {"is_open": is_open, "before": before, "limit": limit}

        async def work(connection: Connection) -> AlertsAnswer:
            rows = await _rows(connection, "list_alerts", asked)
            ids = {"alerts": [row["id"] for row in rows]}
            notices: dict[int, list[NoticeAnswer]] = {}
            for row in await _rows(connection, "notices_of_alerts", ids):
                notices.setdefault(row.pop("alert_id"), []).append(_notice(row))
            judge = await _rows(connection, "alert_judge", {})
            said: Mapping[str, Any] = judge[0]["said"] if judge else {}
            return AlertsAnswer(
                alerts=[_alert(row, notices.get(row["id"], [])) for row in rows],
                before=rows[-1]["id"] if len(rows) == limit else None,
                rules=[RuleAnswer(**each) for each in said.get("rules", [])],
                destinations=list(said.get("destinations", [])),
                judged_at=judge[0]["ran_at"] if judge else None,
            )

        return await self._database.transact(work)

    async def open_count(self) -> int:
        """How many are open and hold, to a thousand."""

        async def work(connection: Connection) -> int:
            (row,) = await _rows(connection, "count_open_alerts", {})
            count: int = row["count"]
            return count

        return await self._database.transact(work)


def _alert(row: Mapping[str, Any], notices: list[NoticeAnswer]) -> AlertAnswer:
    state = AlertState.OPEN if row["over_at"] is None else AlertState.OVER
    return AlertAnswer(**row, state=state, notices=notices)


def _notice(row: Mapping[str, Any]) -> NoticeAnswer:
    said = dict(row)
    state = NoticeState.DUE
    if row["sent_at"] is not None:
        state = NoticeState.SENT
    elif row["given_up_at"] is not None:
        state = NoticeState.GIVEN_UP
    if state is not NoticeState.DUE:
        said["due_at"] = None
    return NoticeAnswer(**said, state=state)


async def _rows(
    connection: Connection, name: str, asked: Mapping[str, object]
) -> list[dict[str, Any]]:
    return await (await connection.execute(query(name), asked)).fetchall()
