"""Hands a task its token and its credentials, keeps both fresh while it runs, and takes them back.

A wrap around a runtime's `run`: before it, the attempt gets its belongings (`worker.belongings`);
after it, whatever has happened, they are gone. It is part of the running work, so a cancellation, a
time limit and the end of the worker reach it as they reach the work.

| what | from where | when it is written |
|---|---|---|
| the token | the claim, then heartbeats that bring one | before the work, then when it is new |
| credentials | `/v1/task/credentials`, if the claim says so | before the work, then in time |
| a user of its own | the runtime's `users`, for untrusted work | |

Credentials are renewed when a third of their life is left.

Credentials for more folders than fit are those for the outputs, and say so (`worker.minting`).
Where none can be had at all, by a refusal or because nobody mints for `MINT_SECONDS_MAX`, the
attempt fails with the dispatcher's sentence and is retried. Once the work runs, nothing of that
ends it: the old credentials stay until they are replaced, whoever is away, and whether the disk is
full; it is told once, and tried again.

How long credentials live is told by their `expires_at` and the machine's clock, within the bounds
of what STS gives; a clock that is wrong makes renewals more frequent and never late. Costs one
request an attempt and one every ten minutes. A crash leaves files: see `worker.belongings`.

Called by `penstock.worker.hands`, from the event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.dispatcher.wire.credentials import CredentialsAnswer
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy
from penstock.kernel.errors import DispatcherError, PenstockError, WorkFailed
from penstock.kernel.service import Service
from penstock.runtimes.base import Finished, Runtime, Voice, Work
from penstock.runtimes.handed import (
    CONFIG,
    CREDENTIALS,
    TEMPORARY,
    TOKEN,
    TOKEN_VARIABLE,
    Handed,
)
from penstock.runtimes.outputs import Outputs
from penstock.worker.attempt import Attempt
from penstock.worker.backoff import Backoff
from penstock.worker.belongings import Belongings, RunFolder
from penstock.worker.client import InternalClient
from penstock.worker.minting import WAIT_FIRST_SECONDS, WAIT_MOST_SECONDS, Minting

_log = logging.getLogger(__name__)

_LIFE_SECONDS_MIN: Final = 60.0
_LIFE_SECONDS_MAX: Final = 900.0
_RENEWED_AFTER: Final = 2 / 3
_CANCELS_MAX: Final = 100


class Handing(Service):
    """Hands over. Without a `folder` nothing is, and untrusted work is kept apart all the same."""

    def __init__(
        self,
        client: InternalClient,
        folder: Path | None,
        outputs: Outputs,
        *,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self._client = client
        self._outputs = outputs
        self._run = RunFolder(folder, entropy) if folder is not None else None
        self._clock = clock
        self._entropy = entropy

    async def start(self) -> None:
        if self._run is not None:
            await asyncio.to_thread(self._run.open)

    async def stop(self) -> None:
        self._outputs.close()
        if self._run is not None:
            await asyncio.to_thread(self._run.close)

    async def run(self, attempt: Attempt, runtime: Runtime, work: Work, voice: Voice) -> Finished:
        """Run the work with what it may have."""
        folder = None
        if self._run is not None and runtime.hands_over:
            folder = self._run.path / f"{work.task_id}-{work.attempt}"
        if folder is None and not work.is_untrusted:
            finished = await runtime.run(work, voice)
            return await self._outputs.complete(work, finished, staged={})
        belongings = Belongings(folder, work=work, users=runtime.users)
        token = attempt.token
        try:
            await _whole(lambda: belongings.prepare(token))
            minting = Minting(attempt, work, self._client, self._clock, self._entropy)
            keeping = _Keeping(attempt, belongings, minting, self._clock, self._entropy)
            handed: Handed | None = None
            renewing: Sequence[Coroutine[None, None, None]] = ()
            if folder is not None:
                handed, renewing = await keeping.begin(str(folder), token)
            loop = asyncio.get_running_loop()
            keepers = [loop.create_task(each) for each in renewing]
            try:
                given = replace(work, handed=handed, user=belongings.user)
                finished = await runtime.run(given, voice)
            finally:
                for each in keepers:
                    each.cancel()
            # Before its end is told: what it has left may keep it from being published.
            await _whole(belongings.take_back)
            staged = belongings.outputs
            finished = await self._outputs.complete(work, finished, staged=staged)
        except BaseException:
            # What went wrong first is told, also that it was cancelled; the rest is in the log.
            with suppress(WorkFailed):
                await _whole(belongings.end)
            raise
        await _whole(belongings.end)
        return finished


class _Keeping:
    """Keeps the files of one attempt fresh. Nothing that fails here ends work that has begun."""

    def __init__(
        self,
        attempt: Attempt,
        belongings: Belongings,
        minting: Minting,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self._attempt = attempt
        self._belongings = belongings
        self._minting = minting
        self._clock = clock
        self._entropy = entropy

    async def begin(
        self, folder: str, token: str
    ) -> tuple[Handed, Sequence[Coroutine[None, None, None]]]:
        """Have everything there before the work begins; says where, and what renews it."""
        variables = {TOKEN_VARIABLE: f"{folder}/{TOKEN}"}
        if self._belongings.user:
            variables |= {"HOME": f"{folder}/{TEMPORARY}", "TMPDIR": f"{folder}/{TEMPORARY}"}
        outputs = {name: str(path) for name, path in self._belongings.outputs.items()}
        if not self._attempt.assignment.mints:
            handed = Handed(folder=folder, variables=variables, outputs=outputs)
            return handed, [self._keep_token(token)]
        minted = await self._minting.first()
        if lacks := self._minting.lacking(minted):
            _log.info("%s: %s", self._attempt, lacks)
        await _whole(lambda: self._belongings.write(_files(folder, minted)))
        handed = Handed(
            folder=folder,
            variables={**variables, **_for_aws(folder, minted)},
            region=minted.region,
            endpoint=minted.endpoint,
            has_credentials=True,
            lacks=lacks,
            outputs=outputs,
        )
        return handed, [self._keep_token(token), self._keep_credentials(folder, minted)]

    async def _keep_token(self, written: str) -> None:
        backoff = _backoff(self._entropy)
        while True:
            while self._attempt.token == written:
                self._attempt.token_news.clear()
                await self._attempt.token_news.wait()
            token = self._attempt.token
            try:
                await _whole(lambda: self._belongings.write({TOKEN: token}))  # noqa: B023 - awaited
            except WorkFailed as error:
                await self._failed(backoff, "token", error)
                continue
            written = token
            backoff.succeeded()

    async def _keep_credentials(self, folder: str, minted: CredentialsAnswer) -> None:
        backoff = _backoff(self._entropy)
        while True:
            await self._clock.sleep(self._life_seconds(minted) * _RENEWED_AFTER)
            while True:
                try:
                    minted = await self._minting.again()
                    files = _files(folder, minted)
                    await _whole(lambda: self._belongings.write(files))  # noqa: B023 - awaited
                except (DispatcherError, WorkFailed) as error:
                    await self._failed(backoff, "credentials", error)
                    continue
                backoff.succeeded()
                break

    async def _failed(self, backoff: Backoff, what: str, error: PenstockError) -> None:
        if not backoff.failures:
            _log.warning("%s keeps its old %s for now: %s", self._attempt, what, error.message)
        await self._clock.sleep(backoff.next_seconds())

    def _life_seconds(self, minted: CredentialsAnswer) -> float:
        left = minted.expires_at.timestamp() - self._clock.wall()
        return min(_LIFE_SECONDS_MAX, max(_LIFE_SECONDS_MIN, left))


def _files(folder: str, minted: CredentialsAnswer) -> dict[str, str]:
    document = {
        "Version": 1,
        "AccessKeyId": minted.access_key,
        "SecretAccessKey": minted.secret_key,
        "SessionToken": minted.session_token,
        "Expiration": minted.expires_at.isoformat(),
    }
    config = ["[default]", f"credential_process = cat {shlex.quote(f'{folder}/{CREDENTIALS}')}"]
    if minted.region:
        config.append(f"region = {minted.region}")
    return {CREDENTIALS: json.dumps(document), CONFIG: "\n".join([*config, ""])}


def _for_aws(folder: str, minted: CredentialsAnswer) -> Mapping[str, str]:
    """The variables by which AWS's tools find the credentials and the store."""
    region = dict.fromkeys(("AWS_REGION", "AWS_DEFAULT_REGION"), minted.region)
    return {
        "AWS_CONFIG_FILE": f"{folder}/{CONFIG}",
        "AWS_EC2_METADATA_DISABLED": "true",
        **(region if minted.region else {}),
        **({"AWS_ENDPOINT_URL_S3": minted.endpoint} if minted.endpoint else {}),
    }


def _backoff(entropy: Entropy) -> Backoff:
    return Backoff(entropy, first_seconds=WAIT_FIRST_SECONDS, most_seconds=WAIT_MOST_SECONDS)


async def _whole(blocking: Callable[[], None]) -> None:
    """Run it in a thread to its end, also if this is cancelled meanwhile, and then say so."""
    running = asyncio.get_running_loop().create_task(asyncio.to_thread(blocking))
    cancelled: asyncio.CancelledError | None = None
    for _ in range(_CANCELS_MAX):
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
            continue
        break
    if cancelled is not None:
        if running.done():
            # Seen; what it was about is over.
            running.exception()
        raise cancelled
    running.result()
