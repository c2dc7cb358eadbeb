"""Everything on one data folder, as processes that are kept running: what `penstock up` is.

A Postgres unless there is another, a dispatcher, which is the cron source too, a worker, the
process of webhook sources, which has no key but its own, and, if DuckDB is installed, the query
service, which is a socket until somebody asks it. Each is a child process that never
outlives this one, and is started again when it ends. Called by the command line.

`preflight` says whether it could run with its settings, before anything of it is started or
made. What is found there is one sentence at once; found by a process of its own it would be in a
log, and the process would be started again and again. Only what needs nobody's answer is
checked: not whether a Postgres or a bucket is there.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from penstock.app import make_postgres, make_registry, secret_of_settings
from penstock.dispatcher.alerts.notifier import destinations_of
from penstock.dispatcher.alerts.rules import read_alerts
from penstock.dispatcher.runtime_registry import RegisteredRuntimes
from penstock.kernel.child_process import ChildProcess, OnDemandProcess
from penstock.kernel.errors import InvalidInput, PenstockError
from penstock.kernel.logs import last_complaint, last_words
from penstock.kernel.ports import check_free, free_port
from penstock.kernel.service import Service
from penstock.kernel.settings_schema import FILE_VARIABLE, settings_file
from penstock.kernel.supervisor import Supervised, Supervisor
from penstock.protocol.identity import Identities
from penstock.runtimes.base import AttemptPaths
from penstock.runtimes.registry import RuntimeRegistry
from penstock.settings import (
    LISTEN_VARIABLE,
    Settings,
    query_variables,
    variables_of,
    webhook_variables,
    without_settings,
)
from penstock.store.s3.config import s3_config

_TOGETHER: Final = ("worker", "webhook", "query-service")
_LISTENERS: Final = ("port", "internal_port", "webhook_port")


def preflight(settings: Settings, registry: RuntimeRegistry) -> None:
    """Raise `InvalidInput` for the first thing with which it could not run."""
    _judge_ports(settings)
    for name in ("postgres", "postgres_direct", "postgres_data"):
        _judge_postgres(name, getattr(settings, name))
    _judge_untrusted(settings)
    outputs = settings.store_url.partition("?")[0]
    AttemptPaths(outputs)
    if outputs.startswith("s3://"):
        s3_config(settings.store_url, environment=os.environ)
    if settings.worker_secret:
        Identities(settings.worker_secret)
    destinations_of(read_alerts(settings.alerts), environment=os.environ)
    for name in registry.names():
        registry.runtime(name)


def _judge_ports(settings: Settings) -> None:
    seen: dict[int, str] = {}
    for name in _LISTENERS:
        port = getattr(settings, name)
        if port in seen:
            raise InvalidInput(
                f"{seen[port]} and {name} are both {port}.",
                hint="Choose others with --port, --internal-port and --webhook-port.",
            )
        if port:
            seen[port] = name


def _judge_postgres(name: str, dsn: str) -> None:
    if not dsn:
        return
    try:
        conninfo_to_dict(dsn)
    except ProgrammingError as error:
        # What is wrong in it may be a part of a password, and is not repeated.
        raise InvalidInput(
            f"{name} is not the address of a Postgres.",
            hint="Write postgresql://USER@HOST/DATABASE, or 'host=HOST dbname=DATABASE'.",
        ) from error


def _judge_untrusted(settings: Settings) -> None:
    if settings.api_token:
        return
    for name, table in settings.runtimes.items():
        if table.get("uids"):
            raise InvalidInput(
                f"The runtime {name} has uids for untrusted work, but the API on this machine needs"
                " no token, so that work would have full access to the API.",
                hint="Set PENSTOCK_API_TOKEN.",
            )


_WORKER_GRACE_SECONDS: Final = 15.0
_ENDINGS_MAX: Final = 2
_WAITED: Final = {
    "postgres": "Postgres",
    "dispatcher": "the dispatcher",
    "webhook": "the webhook sources",
    "query-service": "queries",
}
_TAKEN: Final = (
    "Is another 'penstock up' running? Choose other ports with --port, --internal-port and"
    " --webhook-port."
)


class Installation(Service):
    """Everything on one data folder, as processes that are kept running."""

    def __init__(
        self,
        settings: Settings,
        *,
        code: Path,
        file: Path | None = None,
        waiting: Callable[[str], None] | None = None,
    ) -> None:
        """`code` is the folder that functions of jobs are imported from; `file` has the settings
        of runtimes, and is the settings file of this process if nothing is said. `waiting` is told
        what is waited for, if stopping takes long.

        Settings that cannot be right are told here, before anything is started or made.
        """
        registry = make_registry(settings)
        preflight(settings, registry)
        self.runtimes = RegisteredRuntimes(registry)
        self._settings = replace(
            settings,
            data=settings.data.absolute(),
            port=settings.port or free_port(),
            internal_port=settings.internal_port or free_port(),
            webhook_port=settings.webhook_port or free_port(),
            # Nobody but the dispatcher calls it here.
            query_host="127.0.0.1",
            query_port=free_port(),
        )
        self._code = code
        self._file = file
        self._waiting = waiting or (lambda _said: None)
        self._supervisor: Supervisor | None = None
        self._ended: Counter[str] = Counter()

    @property
    def public_url(self) -> str:
        return f"http://{self._settings.host}:{self._settings.port}"

    @property
    def webhook_url(self) -> str:
        return f"http://{self._settings.webhook_host}:{self._settings.webhook_port}"

    @property
    def api_token(self) -> str | None:
        return self._settings.api_token or None

    @property
    def data(self) -> Path:
        return self._settings.data

    @property
    def store(self) -> str:
        """The store that was chosen, without its options; empty if it is in `data`."""
        return self._settings.store.partition("?")[0]

    def log_of(self, process: str) -> Path:
        """Where the log of a process is."""
        return self._settings.data / "logs" / f"{process}.log"

    def failure(self) -> PenstockError | None:
        """What to say if a process ends again and again, by its own last words."""
        name = next((each for each, times in self._ended.items() if times >= _ENDINGS_MAX), None)
        if name is None:
            return None
        said, hint = last_words(self.log_of(name))
        return PenstockError(f"The {name} exited during startup: {said}", hint=hint)

    async def start(self) -> None:
        settings = self._settings
        for host, port in (
            (settings.host, settings.port),
            (settings.internal_host, settings.internal_port),
            (settings.webhook_host, settings.webhook_port),
        ):
            check_free(host, port, hint=_TAKEN)
        (settings.data / "logs").mkdir(mode=0o750, parents=True, exist_ok=True)
        kept: list[tuple[str, Callable[[], Supervised]]] = []
        if not settings.postgres:
            own = make_postgres(settings)
            data = settings.postgres_data or own.data_dsn
            settings = replace(settings, postgres=own.dsn, postgres_data=data)
            kept.append(("postgres", lambda: make_postgres(self._settings)))
        # They run in another folder, whose settings are not ours.
        file = self._file or settings_file(os.environ, Path.cwd()) or Path(os.devnull)
        environment = {
            # What a variable says is in the settings, or is not meant for this installation.
            **without_settings(os.environ),
            **variables_of(settings),
            FILE_VARIABLE: str(file.absolute()),
        }
        for name, words in (
            ("dispatcher", ["dispatcher", "--cron"]),
            ("worker", ["worker"]),
            ("webhook", ["source", "webhook"]),
        ):
            mine = environment if name != "webhook" else self._webhook_environment(settings)
            kept.append((name, self._process(name, words, mine)))
        if not settings.query_service and find_spec("duckdb") is not None:
            kept.append(("query-service", self._query_service(settings)))
        # Nobody of those asks another; all of them have something to tell the dispatcher.
        together = [name for name, _ in kept if name in _TOGETHER]
        self._supervisor = Supervisor(
            kept,
            changed=self._note,
            why_ended=self._why_ended,
            together=together,
            waiting=self._tell_of_waiting,
        )
        await self._supervisor.start()

    @staticmethod
    def _webhook_environment(settings: Settings) -> dict[str, str]:
        """That of the process that may face the internet: no key of ours is in it but its own."""
        token = Identities(secret_of_settings(settings)).webhook().token
        return {**without_settings(os.environ), **webhook_variables(settings, token=token)}

    async def stop(self) -> None:
        if self._supervisor is not None:
            await self._supervisor.stop()
            self._supervisor = None

    def _tell_of_waiting(self, names: Sequence[str]) -> None:
        seconds = self._settings.stop_seconds
        who = {**_WAITED, "worker": f"the worker: running tasks have {seconds:g} s"}
        # What may take long comes last, for it says more.
        said = sorted((who[name] for name in names), key=len)
        self._waiting(f"Waiting for {', and for '.join(said)} ...")

    def _note(self, name: str, what: str) -> None:
        self._ended[name] += what == "ended"

    def _why_ended(self, name: str) -> str:
        """What a process complained of last; nothing of one that was killed."""
        return last_complaint(self.log_of(name))

    def _query_service(self, settings: Settings) -> Callable[[], Supervised]:
        """The query service, which is started by the first query: until then it is a socket."""
        environment = {**without_settings(os.environ), **query_variables(settings)}
        command = [sys.executable, "-m", "penstock", "query-service"]
        return lambda: OnDemandProcess(
            (settings.query_host, settings.query_port),
            lambda descriptor: ChildProcess(
                command,
                log=self.log_of("query-service"),
                environment={**environment, LISTEN_VARIABLE: str(descriptor)},
                folder=self._code,
                descriptor=descriptor,
            ),
        )

    def _process(
        self, name: str, words: list[str], environment: dict[str, str]
    ) -> Callable[[], Supervised]:
        """What makes one of our own processes, which ends with this one."""
        grace_seconds = self._settings.stop_seconds + _WORKER_GRACE_SECONDS
        command = [sys.executable, "-m", "penstock", *words]
        return lambda: ChildProcess(
            command,
            log=self.log_of(name),
            environment=environment,
            folder=self._code,
            grace_seconds=grace_seconds,
        )
