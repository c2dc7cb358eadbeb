"""The page of queries: SQL over what is published, run by the browser piece by piece.

The page brings the names and columns of datasets. What is run goes from its script to `/query/run`
of the console, which hands it to the API with the rights of the session
(`console.application`), and comes back as lines of JSON; nothing of it is kept here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.console.pages.base import ConsolePage, PageRequest
from penstock.dispatcher.api.context import ApiContext

PATH: Final = "/query"
DATASETS_MAX: Final = 200


async def _load(parts: ApiContext, asked: PageRequest) -> Mapping[str, Any]:
    found = await parts.queries.datasets(limit=DATASETS_MAX + 1)
    return {
        "datasets": found[:DATASETS_MAX],
        "is_more": len(found) > DATASETS_MAX,
        "has_service": parts.relay is not None,
        "sql": asked.query.get("sql", ""),
    }


PAGE: Final = ConsolePage(PATH, "query", _load, query=("sql",))
