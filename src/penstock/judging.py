"""Whether an installation could run with its settings, before anything of it is started or made.

What is found here is one sentence at once; found by a process of its own it would be in a log, and
the process would be started again and again. Only what needs nobody's answer is judged: not whether
a Postgres or a bucket is there. Called by `app`.
"""

from __future__ import annotations

import os
from typing import Final

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from penstock.dispatcher.alerts.opening import destinations_of
from penstock.dispatcher.alerts.reading import read_alerts
from penstock.dispatcher.identity import Identities
from penstock.kernel.errors import InvalidInput
from penstock.runtimes.places import Places
from penstock.runtimes.registry import Registry
from penstock.settings import Settings
from penstock.store.s3.config import s3_config

_PORTS: Final = ("port", "internal_port", "webhook_port")


def judge(settings: Settings, registry: Registry) -> None:
    """Raise `InvalidInput` for the first thing with which it could not run."""
    _judge_ports(settings)
    _judge_postgres(settings.postgres)
    _judge_untrusted(settings)
    outputs = settings.store_url.partition("?")[0]
    Places(outputs)
    if outputs.startswith("s3://"):
        s3_config(settings.store_url, environment=os.environ)
    if settings.worker_secret:
        Identities(settings.worker_secret)
    destinations_of(read_alerts(settings.alerts), environment=os.environ)
    for name in registry.names():
        registry.runtime(name)


def _judge_ports(settings: Settings) -> None:
    seen: dict[int, str] = {}
    for name in _PORTS:
        port = getattr(settings, name)
        if port in seen:
            raise InvalidInput(
                f"{seen[port]} and {name} are both {port}.",
                hint="Choose others with --port, --internal-port and --webhook-port.",
            )
        if port:
            seen[port] = name


def _judge_postgres(dsn: str) -> None:
    if not dsn:
        return
    try:
        conninfo_to_dict(dsn)
    except ProgrammingError as error:
        # What is wrong in it may be a part of a password, and is not repeated.
        raise InvalidInput(
            "postgres is not the address of a Postgres.",
            hint="Write postgresql://USER@HOST/DATABASE, or 'host=HOST dbname=DATABASE'.",
        ) from error


def _judge_untrusted(settings: Settings) -> None:
    if settings.api_token:
        return
    for name, table in settings.runtimes.items():
        if table.get("uids"):
            raise InvalidInput(
                f"The runtime {name} has uids for untrusted work, and the API of this machine wants"
                " no token: such work could do with the API whatever it likes.",
                hint="Set PENSTOCK_API_TOKEN.",
            )
