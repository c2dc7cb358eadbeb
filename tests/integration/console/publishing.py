"""What stories about datasets share: partitions that are published, and tasks that are dead."""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.protocol.work import Assignment
from tests.integration.console.looking import Visitor
from tests.integration.dispatcher.api.stage import held, ok, output

EVIL = "<script>alert(1)</script>"
COLUMNS = [{"name": "day", "type": "date", "is_nullable": False}, {"name": EVIL, "type": "bigint"}]


def cells(page: str) -> dict[str, Any]:
    """What the heat map is drawn of."""
    found = re.search(r"<script [^>]*data-cells>(.*?)</script>", page, re.DOTALL)
    assert found is not None
    said: dict[str, Any] = json.loads(found[1])
    return said


async def publish(
    visitor: Visitor, *keys: str, operator: str = "a:clean", name: str = "tidy", **said: Any
) -> list[Assignment]:
    """Have tasks for these partitions, and what is claimed published."""
    if keys:
        await visitor.stage.trigger(*keys)
    tasks = await visitor.stage.claim(operator, limit=len(keys) or 10)
    facts = {"files": 2, "rows": 3, "bytes": 300, "manifest": "0" * 64, "columns": COLUMNS}
    facts |= said
    ends = [held(task, outputs=[output(task, name, facts=facts)]) for task in tasks]
    ok(await visitor.stage.complete(*ends))
    await visitor.stage.route()
    return tasks


async def kill(visitor: Visitor, key: str, reason: str) -> int:
    """Have a task of a partition that is dead."""
    await visitor.stage.trigger(key)
    (task,) = await visitor.stage.claim(limit=1)
    ok(await visitor.stage.complete(held(task, failure={"reason": reason, "is_retried": False})))
    return task.task_id
