"""The cron and webhook sources as AWS Lambda calls them.

Set a function's handler to `penstock.functions.cron` (called by a rule of EventBridge) or
`penstock.functions.webhook` (behind API Gateway or a function URL). Its environment has
`PENSTOCK_DISPATCHERS`, the internal addresses, `PENSTOCK_WORKER_SECRET`, and for webhooks
`PENSTOCK_API_TOKEN` if requests have to bring one. Nothing is kept between calls.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.app import make_client
from penstock.dispatcher.sources.functions import cron_handler, webhook_handler
from penstock.kernel.errors import InvalidInput
from penstock.settings import Settings, read_settings
from penstock.worker.client import InternalClient


def cron(event: Mapping[str, Any], context: object) -> dict[str, Any]:
    """Emit the events of cron sources that are due."""
    return cron_handler(_connect)(event, context)


def webhook(event: Mapping[str, Any], context: object) -> dict[str, Any]:
    """Emit an event for a request."""
    return webhook_handler(_connect, token=_settings().api_token or None)(event, context)


def _connect() -> InternalClient:
    name = os.environ.get("AWS_LAMBDA_FUNCTION_NAME", "function")
    return make_client(_settings(), f"source-{name}")


def _settings() -> Settings:
    settings = read_settings({}, environment=os.environ, folder=Path.cwd()).settings
    if not settings.worker_secret or not settings.dispatchers:
        raise InvalidInput(
            "The function does not know its dispatchers.",
            hint="Set PENSTOCK_DISPATCHERS and PENSTOCK_WORKER_SECRET in its environment.",
        )
    return settings
