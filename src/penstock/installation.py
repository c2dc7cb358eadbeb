"""Everything on one data folder, as processes that are kept running: what `penstock up` is.

A Postgres unless there is another, a dispatcher, a worker, and the processes of cron and webhook
sources. Each is on a leash, so that none outlives this process, and is started again when it ends.
Called by the command line.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.app import make_postgres, make_registry, secret_of_settings
from penstock.dispatcher.identity import Identities
from penstock.dispatcher.registry import RegisteredRuntimes
from penstock.judging import judge
from penstock.kernel.errors import PenstockError
from penstock.kernel.keeping import Keepable, Keeper
from penstock.kernel.leash import Leashed
from penstock.kernel.logs import last_complaint, last_words
from penstock.kernel.ports import check_free, free_port
from penstock.kernel.service import Service
from penstock.settings import (
    PREFIX,
    Settings,
    settings_file,
    variables_of,
    webhook_variables,
    without_settings,
)

_WORKER_GRACE_SECONDS: Final = 15.0
_ENDINGS_MAX: Final = 2
_WAITED: Final = {
    "postgres": "Postgres",
    "dispatcher": "the dispatcher",
    "cron": "the cron sources",
    "webhook": "the webhook sources",
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
        judge(settings, registry)
        self.runtimes = RegisteredRuntimes(registry)
        self._settings = replace(
            settings,
            data=settings.data.absolute(),
            port=settings.port or free_port(),
            internal_port=settings.internal_port or free_port(),
            webhook_port=settings.webhook_port or free_port(),
        )
        self._code = code
        self._file = file
        self._waiting = waiting or (lambda _said: None)
        self._keeper: Keeper | None = None
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
        return PenstockError(f"The {name} ends when it starts. It says: {said}", hint=hint)

    async def start(self) -> None:
        settings = self._settings
        for host, port in (
            (settings.host, settings.port),
            (settings.internal_host, settings.internal_port),
            (settings.webhook_host, settings.webhook_port),
        ):
            check_free(host, port, hint=_TAKEN)
        (settings.data / "logs").mkdir(mode=0o750, parents=True, exist_ok=True)
        kept: list[tuple[str, Callable[[], Keepable]]] = []
        if not settings.postgres:
            settings = replace(settings, postgres=make_postgres(settings).dsn)
            kept.append(("postgres", lambda: make_postgres(self._settings)))
        # They run in another folder, whose settings are not ours.
        file = self._file or settings_file(os.environ, Path.cwd()) or Path(os.devnull)
        environment = {
            # What a variable says is in the settings, or is not meant for this installation.
            **without_settings(os.environ),
            **variables_of(settings),
            f"{PREFIX}SETTINGS": str(file.absolute()),
        }
        for name, words in (
            ("dispatcher", ["dispatcher"]),
            ("worker", ["worker"]),
            ("cron", ["source", "cron"]),
            ("webhook", ["source", "webhook"]),
        ):
            mine = environment if name != "webhook" else self._webhook_environment(settings)
            kept.append((name, self._process(name, words, mine)))
        # Nobody of those asks another; all of them have something to tell the dispatcher.
        together = ("worker", "cron", "webhook")
        self._keeper = Keeper(
            kept,
            changed=self._note,
            why_ended=self._why_ended,
            together=together,
            waiting=self._tell_of_waiting,
        )
        await self._keeper.start()

    @staticmethod
    def _webhook_environment(settings: Settings) -> dict[str, str]:
        """That of the process that may face the internet: no key of ours is in it but its own."""
        token = Identities(secret_of_settings(settings)).webhook().token
        return {**without_settings(os.environ), **webhook_variables(settings, token=token)}

    async def stop(self) -> None:
        if self._keeper is not None:
            await self._keeper.stop()
            self._keeper = None

    def _tell_of_waiting(self, names: Sequence[str]) -> None:
        seconds = self._settings.stop_seconds
        who = {**_WAITED, "worker": f"the worker: what runs may take {seconds:g} s to end"}
        # What may take long comes last, for it says more.
        said = sorted((who[name] for name in names), key=len)
        self._waiting(f"Waiting for {', and for '.join(said)} ...")

    def _note(self, name: str, what: str) -> None:
        self._ended[name] += what == "ended"

    def _why_ended(self, name: str) -> str:
        """What a process complained of last; nothing of one that was killed."""
        return last_complaint(self.log_of(name))

    def _process(
        self, name: str, words: list[str], environment: dict[str, str]
    ) -> Callable[[], Keepable]:
        """What makes one of our own processes, which ends with this one."""
        grace_seconds = self._settings.stop_seconds + _WORKER_GRACE_SECONDS
        command = [sys.executable, "-m", "penstock", *words]
        return lambda: Leashed(
            command,
            log=self.log_of(name),
            environment=environment,
            folder=self._code,
            grace_seconds=grace_seconds,
        )
