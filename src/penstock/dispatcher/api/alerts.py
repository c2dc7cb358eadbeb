"""What people and programs ask of alerts. Rules and destinations are settings, not for the API."""

from __future__ import annotations

from typing import Final

from penstock.dispatcher.api.endpoints import Call, Endpoint
from penstock.dispatcher.api.parts import Parts
from penstock.dispatcher.views.alerts import AlertViews
from penstock.dispatcher.wire.alerts import AlertsAnswer, AlertsParams
from penstock.dispatcher.wire.base import Answer


async def alerts(parts: Parts, call: Call) -> Answer:
    """What is the matter, what was, and who was told."""
    params: AlertsParams = call.params
    return await AlertViews(parts.database).alerts(
        state=params.state, before=params.before, limit=params.limit
    )


PUBLIC: Final = (
    Endpoint(
        "GET",
        "/v1/alerts",
        "What is the matter, and who was told",
        alerts,
        params=AlertsParams,
        answer=AlertsAnswer,
    ),
)
