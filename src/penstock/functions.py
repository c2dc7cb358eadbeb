"""The cron and webhook sources as AWS Lambda calls them.

Set a function's handler to `penstock.functions.cron` (called by a rule of EventBridge) or
`penstock.functions.webhook` (behind API Gateway or a function URL). Its environment has
`PENSTOCK_DISPATCHERS`, the internal addresses, and `PENSTOCK_WORKER_SECRET`. That of webhooks faces
the internet: it has `PENSTOCK_WEBHOOK_TOKEN` instead, and the secrets of its sources. Nothing is
kept between calls.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock.app import make_client, make_resolver, make_webhook_client
from penstock.dispatcher.sources.aws_lambda import cron_handler, webhook_handler
from penstock.kernel.errors import InvalidInput
from penstock.settings import Settings, read_settings
from penstock.worker.client import InternalClient

_ANYWHERE: Final = "0.0.0.0"  # noqa: S104 - nothing listens here


def cron(event: Mapping[str, Any], context: object) -> dict[str, Any]:
    """Emit the events of cron sources that are due."""
    return cron_handler(_connect)(event, context)


def webhook(event: Mapping[str, Any], context: object) -> dict[str, Any]:
    """Emit an event for a request."""
    # Whoever calls a function comes from elsewhere, whatever address the settings have.
    settings = replace(_settings("webhook_token"), webhook_host=_ANYWHERE)
    find = make_resolver(settings, who="webhook").text
    return webhook_handler(lambda: make_webhook_client(settings), secret=find)(event, context)


def _connect() -> InternalClient:
    name = os.environ.get("AWS_LAMBDA_FUNCTION_NAME", "function")
    return make_client(_settings("worker_secret"), f"source-{name}")


def _settings(proof: str) -> Settings:
    settings = read_settings({}, environment=os.environ, folder=Path.cwd()).settings
    if not getattr(settings, proof) or not settings.dispatchers:
        raise InvalidInput(
            "The function has no address of a dispatcher.",
            hint=f"Set PENSTOCK_DISPATCHERS and PENSTOCK_{proof.upper()} in its environment.",
        )
    return settings
