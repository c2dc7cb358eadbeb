"""Clients of AWS, or of a server that speaks its protocols.

The package boto3 is asked for only here, and only when something of AWS is used. Its clients block,
so they are called in threads; they may be shared by threads. Nothing outlives a bound on its time,
and boto3 itself tries again only what is safe to.

What it prints when it is debugged has answers whole, with the secrets and credentials in them; so
botocore logs nothing below INFO once there is a client, whatever the level of other logs is.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.kernel.errors import InvalidInput

_CONNECT_SECONDS_MAX: Final = 5
_TRIES_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Aws:
    """Which AWS. What is empty is found as every tool of AWS finds it."""

    region: str | None = None
    endpoint: str | None = None
    """A URL of another server than AWS's own."""
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)


def aws_client(
    service: str,
    *,
    aws: Aws,
    read_seconds_max: float = 10.0,
    connections_max: int = 50,
    connect_seconds_max: float | None = None,
    tries_max: int | None = None,
) -> Any:
    """A client of a service, as in `sqs`. Takes a moment: call it in a thread."""
    try:
        boto3 = importlib.import_module("boto3")
        config = importlib.import_module("botocore.config").Config(
            connect_timeout=connect_seconds_max or _CONNECT_SECONDS_MAX,
            read_timeout=read_seconds_max,
            max_pool_connections=connections_max,
            retries={"mode": "standard", "total_max_attempts": tries_max or _TRIES_MAX},
        )
        errors = importlib.import_module("botocore.exceptions")
    except ImportError as error:
        raise InvalidInput(
            f"The package boto3 is needed for {service.upper()} of AWS, and is not installed.",
            hint="pip install 'penstock[aws]'",
        ) from error
    _hush()
    try:
        # A session of its own: the shared one must not be used by several threads.
        return boto3.session.Session().client(
            service,
            region_name=aws.region,
            endpoint_url=aws.endpoint,
            aws_access_key_id=aws.access_key,
            aws_secret_access_key=aws.secret_key,
            config=config,
        )
    except (errors.BotoCoreError, ValueError) as error:
        raise InvalidInput(
            f"There is no client for {service.upper()} of AWS: {error}",
            hint="Set AWS_REGION, and credentials as for every tool of AWS.",
        ) from error


def _hush() -> None:
    """Keep botocore from logging what is answered."""
    log = logging.getLogger("botocore")
    if log.level < logging.INFO:
        log.setLevel(logging.INFO)


def error_code(error: Exception) -> str:
    """The code of an error that AWS has answered with; empty for others."""
    answer = getattr(error, "response", None)
    said = answer.get("Error") if isinstance(answer, dict) else None
    return str(said.get("Code", "")) if isinstance(said, dict) else ""
