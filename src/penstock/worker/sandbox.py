"""The sandbox of an attempt: its folder, its user, its token and its credentials.

    {folder}/{run}.lock          held by the worker of that run, as long as it lives
    {folder}/{run}/{attempt}/    token, credentials.json, aws.config (`penstock.runtimes.secrets`)

A run is one life of a worker. `CredentialProvider` wraps a runtime's `run`: the sandbox is
there before the work begins, and gone after it, whatever has happened. It is part of the
running work, so a cancellation, a timeout and the end of the worker reach it as they reach the
work.

| what | from where | when it is written |
|---|---|---|
| the token | the claim, then heartbeats that bring one | before the work, then when it is new |
| credentials | `/v1/task/credentials`, if the claim says so | before the work, then in time |
| a user of its own | the runtime's `users`, for untrusted work | |

The folder belongs to the worker and nobody else can look into it, but for the user of untrusted
work, who can read there and not write: nothing that root writes can be led elsewhere by a link.
A file is written beside its place and renamed, so a reader finds the old one or the new one,
whole, also when the disk is full.

Credentials are renewed when a third of their life is left; their life is told by `expires_at`
and the machine's clock, within the bounds of STS, so a wrong clock renews more often and never
late. A dispatcher that is down, that mints nothing now, or that does not know the token yet, is
asked for `MINT_SECONDS_MAX`; one that refuses is not asked again. One call of an attempt is
under way at a time, for the dispatcher mints no more. Where no credentials can be had, the
attempt fails with the dispatcher's sentence and is retried. Once the work runs, nothing of that
ends it: the old credentials stay until they are replaced; it is logged once, and tried again.

An attempt may be granted more folders than one session can be for. Then it begins with the
first of these that fits, and always the same as long as it runs; `lacking` says in a sentence
what is missing, and the work asks for that, some folders at a time, by `task.credentials_for`:

| credentials | for |
|---|---|
| all | everything that is granted |
| to write | the outputs and the scratch folder |
| scratch | the scratch folder |

A worker makes its lock, then its folder; it removes the folder, then the lock. A crash leaves
all of it, and a lock that nobody holds: the next worker that starts removes the folder, and
then the lock. It never takes the folder of a living worker, because it cannot take its lock,
and a worker that has made its lock and not yet locked it checks that it is still the one there.

Called by `executor` and `reporter`, from the event loop. `RunFolder` and `AttemptSandbox` block
and are called from threads.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.datasets.layout import part, path_of
from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    DispatcherError,
    DispatcherRefused,
    DispatcherUnavailable,
    InvalidInput,
    PenstockError,
    WorkFailed,
    WorkReleased,
)
from penstock.kernel.service import Service
from penstock.protocol.work import CredentialsAnswer, CredentialsAsk
from penstock.runtimes.base import AttemptWork, Runtime, WorkReporter, WorkResult
from penstock.runtimes.output_collector import OutputCollector
from penstock.runtimes.secrets import (
    CONFIG,
    CREDENTIALS,
    OUTPUTS,
    TEMPORARY,
    TOKEN,
    TOKEN_VARIABLE,
    AttemptFiles,
)
from penstock.runtimes.uid_pool import LeasedUid, UidPool, close, remove_tree
from penstock.worker.attempt import TaskAttempt
from penstock.worker.client import Backoff, InternalClient

_log = logging.getLogger(__name__)

_LOCK: Final = ".lock"
_TRIES_MAX: Final = 10
_FILE: Final = "file:///"


class RunFolder:
    """The folder of one life of a worker."""

    def __init__(self, folder: Path, entropy: Entropy) -> None:
        self._all = folder
        self._entropy = entropy
        self._lock: int | None = None
        self._name = ""

    @property
    def path(self) -> Path:
        return self._all / self._name

    def open(self) -> None:
        """Remove what dead workers have left, and make the folder of this one."""
        try:
            self._all.mkdir(mode=0o711, parents=True, exist_ok=True)
            self._sweep()
            self._make()
        except OSError as error:
            raise InvalidInput(
                f"The folder {self._all} of task credentials cannot be used:"
                f" {error.strerror or error}.",
                hint="Give the worker another data folder by --data.",
            ) from error

    def close(self) -> None:
        """Remove the folder. What cannot be removed is left to the next worker."""
        if self._lock is None:
            return
        if _is_removed(self.path):
            with suppress(OSError):
                (self._all / f"{self._name}{_LOCK}").unlink()
        os.close(self._lock)
        self._lock = None

    def _make(self) -> None:
        for _ in range(_TRIES_MAX):
            self._name = new_id(self._entropy, characters=12)
            file = self._all / f"{self._name}{_LOCK}"
            lock = _locked(file, flags=os.O_CREAT | os.O_EXCL)
            if lock is not None:
                self._lock = lock
                self.path.mkdir()
                # Whoever is not us may pass through, and see nothing.
                self.path.chmod(0o711)
                return
        raise OSError("every new lock file was taken by another process")

    def _sweep(self) -> None:
        for file in self._all.glob(f"*{_LOCK}"):
            lock = _locked(file)
            if lock is None:
                continue
            left = self._all / file.name.removesuffix(_LOCK)
            if _is_removed(left):
                with suppress(OSError):
                    file.unlink()
            os.close(lock)


class AttemptSandbox:
    """The folder and the user of one attempt. `prepare` first, `end` last; each once.

    Threads may call `write` and `end` at once: what is written after the end is not.
    """

    def __init__(self, folder: Path | None, *, work: AttemptWork, users: UidPool | None) -> None:
        self.folder = folder
        """None if the attempt is handed nothing."""
        self._work = work
        self._users = users
        self._user: LeasedUid | None = None
        self._lock = threading.Lock()
        self._is_made = False

    @property
    def user(self) -> int:
        """The user that the work runs as; 0 for the worker's own."""
        return self._user.number if self._user is not None else 0

    @property
    def outputs(self) -> Mapping[str, Path]:
        """Folders for the outputs that are in a bucket, by name; none if nothing is handed."""
        if self.folder is None:
            return {}
        return {
            name: self.folder / OUTPUTS / part(name)
            for name, place in self._work.outputs.items()
            if not place.location.startswith(_FILE)
        }

    def prepare(self, token: str) -> None:
        """Have a user for untrusted work, with its folders, and the folder with the token."""
        try:
            outputs = _folders([each.location for each in self._work.outputs.values()])
            scratch = _folders([self._work.scratch])
            if self._work.is_untrusted:
                self._user = _taken(self._users, on_files=bool(outputs or scratch))
            if self.folder is not None:
                self._make_folder(self.folder)
            if self._user is not None:
                self._user.give([*outputs, *self.outputs.values()], scratch=scratch)
        except OSError as error:
            raise _unwritten(error) from error
        self.write({TOKEN: token})

    def write(self, files: dict[str, str]) -> None:
        """Replace files, each whole; `WorkFailed` says why one could not be."""
        with self._lock:
            if not self._is_made or self.folder is None:
                return
            for name, text in files.items():
                try:
                    self._write(self.folder / name, text)
                except OSError as error:
                    raise _unwritten(error) from error

    def take_back(self) -> None:
        """Make what the work has written the worker's. Nothing of the work may run, but for what
        its user has left.

        `WorkFailed` says that what the work has written is not to be published.
        """
        user, self._user = self._user, None
        if user is None:
            return
        try:
            if self._is_made and self.folder is not None:
                # Whoever is that user next has nothing to do with this token.
                close(self.folder)
        finally:
            user.end()

    def end(self) -> None:
        """Take everything back, and remove the folder."""
        try:
            self.take_back()
        finally:
            with self._lock:
                if self._is_made and self.folder is not None and not _is_removed(self.folder):
                    _log.warning("%s could not be removed; the next start tries again", self.folder)
                self._is_made = False

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self._is_made = True
        for each in self.outputs.values():
            each.mkdir(parents=True)
            # Whatever the umask: the user of untrusted work passes through.
            each.parent.chmod(0o711)
        if not self.user:
            return
        temporary = folder / TEMPORARY
        temporary.mkdir(mode=0o700)
        os.chown(temporary, self.user, self.user)
        os.chown(folder, -1, self.user)
        folder.chmod(0o750)

    def _write(self, file: Path, text: str) -> None:
        new = file.with_name(f".{file.name}.new")
        new.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = os.open(new, flags, 0o600)
        try:
            with os.fdopen(opened, "w", encoding="utf-8") as stream:
                stream.write(text)
            if self.user:
                os.chown(new, self.user, self.user)
            new.rename(file)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def _taken(users: UidPool | None, *, on_files: bool) -> LeasedUid:
    if users is None:
        raise WorkReleased(
            "This worker cannot keep untrusted work apart.",
            hint='Set uids = "60800-60863" for its runtime, and run the worker as root.',
        )
    if on_files:
        users.check_files()
    return users.take()


def _folders(locations: Sequence[str]) -> Sequence[Path]:
    """Those of the places to write to that are on this machine."""
    return [path_of(each) for each in locations if each.startswith(_FILE)]


def _unwritten(error: OSError) -> WorkFailed:
    where = f" ({error.filename})" if error.filename else ""
    # A worker with a full disk would fail task after task that others can run.
    return WorkReleased(
        f"The files of the attempt cannot be written: {error.strerror or error}{where}."
    )


def _is_removed(folder: Path) -> bool:
    try:
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
    except (OSError, RecursionError):
        # Untrusted work may leave folders that are deeper than this goes.
        with suppress(WorkFailed):
            remove_tree(folder)
    return not folder.exists()


def _locked(file: Path, *, flags: int = 0) -> int | None:
    """The lock that this file is; None if another has it, or if it is not the one there."""
    try:
        opened = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except (FileNotFoundError, FileExistsError):
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(opened), file.lstat()):
            return opened
    except OSError:
        pass
    os.close(opened)
    return None


MINT_SECONDS_MAX: Final = 60.0
"""For how long credentials are asked for."""
WAIT_FIRST_SECONDS: Final = 1.0
WAIT_MOST_SECONDS: Final = 30.0
_UNPROVED: Final = frozenset({401, 403})
_NOT_GRANTED: Final = "token not granted"
_EXPIRED: Final = "token expired"
_TOO_MANY: Final = "too many folders"


class CredentialRequester:
    """Credentials of one attempt."""

    def __init__(
        self,
        attempt: TaskAttempt,
        work: AttemptWork,
        client: InternalClient,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self._attempt = attempt
        self._work = work
        self._client = client
        self._clock = clock
        self._entropy = entropy
        self._ask: CredentialsAsk | None = None

    async def first(self) -> CredentialsAnswer:
        """Those that the work begins with: as much as fits."""
        *more, least = _asks(self._work)
        for self._ask in more:
            try:
                return await self._until_minted(self._ask)
            except DispatcherRefused as error:
                if error.kind != _TOO_MANY:
                    raise _failed(error) from error
        self._ask = least
        return await self._until_answered(least)

    async def again(self) -> CredentialsAnswer:
        """The same as those that the work began with, anew; asked for once."""
        return await self._minted(self._ask)

    async def some(self, locations: Sequence[str]) -> CredentialsAnswer:
        """Credentials for these folders, which are read or written by what the work has there."""
        return await self._until_answered(_ask_for(self._work, locations))

    def lacking(self, minted: CredentialsAnswer) -> str:
        """What the credentials that the work began with do not hold, as sentences."""
        read = _outside(_locations_read(self._work), minted.read)
        write = _outside((each.location for each in self._work.outputs.values()), minted.write)
        if not read and not write:
            return ""
        folders = "folder" if read + write == 1 else "folders"
        said = f"These credentials are not for {read + write:,} {folders} of the task"
        if self._ask is not None:
            return (
                f"{said}, for a policy of STS has no room for all of them. Ask for some of them at"
                " a time: task.credentials_for(LOCATION, ...)."
            )
        return (
            f"{said}, which its token does not grant: they are too many of one input, or not in"
            " the store. Declare the input with `read: all`, or compact its dataset."
        )

    async def _until_answered(self, ask: CredentialsAsk | None) -> CredentialsAnswer:
        try:
            return await self._until_minted(ask)
        except DispatcherRefused as error:
            raise _failed(error) from error

    async def _until_minted(self, ask: CredentialsAsk | None) -> CredentialsAnswer:
        backoff = Backoff(
            self._entropy, first_seconds=WAIT_FIRST_SECONDS, most_seconds=WAIT_MOST_SECONDS
        )
        until = self._clock.monotonic() + MINT_SECONDS_MAX
        while True:
            try:
                return await self._minted(ask)
            except DispatcherUnavailable as error:
                message = error.message
            except DispatcherRefused as error:
                if error.status not in _UNPROVED or error.kind == _NOT_GRANTED:
                    raise
                # A heartbeat may bring a token that is known, or newer.
                message = error.message
            if self._clock.monotonic() >= until:
                raise WorkFailed(
                    f"No credentials were obtained for the task within {MINT_SECONDS_MAX:g} s:"
                    f" {message}"
                )
            await self._clock.sleep(backoff.next_seconds())

    async def _minted(self, ask: CredentialsAsk | None) -> CredentialsAnswer:
        async with self._attempt.minting:
            token = self._attempt.token
            try:
                return await self._client.credentials(token, ask)
            except DispatcherRefused as error:
                if error.status in _UNPROVED and error.kind not in {_NOT_GRANTED, _EXPIRED}:
                    self._attempt.doubt(token)
                raise


def _asks(work: AttemptWork) -> Iterator[CredentialsAsk | None]:
    """What an attempt asks for before it begins, until something fits."""
    yield None
    if work.scratch:
        scratch = [_folder(work.scratch)]
        yield CredentialsAsk(read=scratch)
        yield CredentialsAsk(read=scratch, write=scratch)


def _ask_for(work: AttemptWork, locations: Sequence[str]) -> CredentialsAsk:
    wanted = [_folder(each) for each in locations]
    scratch = _folder(work.scratch)
    outputs = tuple(_folder(each.location) for each in work.outputs.values())
    return CredentialsAsk(
        read=[each for each in wanted if not each.startswith(outputs)],
        write=[each for each in wanted if each.startswith((*outputs, scratch))],
    )


def _locations_read(work: AttemptWork) -> Iterator[str]:
    for given in work.inputs.values():
        if given.has_data:
            yield from (each.location for each in given.parts)


def _outside(locations: Iterable[str], folders: Sequence[str]) -> int:
    """How many of these are not in one of the folders, which are in their only spelling."""
    return sum(not _folder(each).startswith(tuple(folders)) for each in locations)


def _folder(location: str) -> str:
    return location if location.endswith("/") else f"{location}/"


def _failed(error: DispatcherRefused) -> WorkFailed:
    # Retried: a refusal may be about the dispatcher's settings, and no reason to end the task.
    return WorkFailed(f"No credentials are minted for the task: {error.message}", hint=error.hint)


_LIFE_SECONDS_MIN: Final = 60.0
_LIFE_SECONDS_MAX: Final = 900.0
_RENEWED_AFTER: Final = 2 / 3
_CANCELS_MAX: Final = 100


class CredentialProvider(Service):
    """Hands over. Without a `folder` nothing is, and untrusted work is kept apart all the same."""

    def __init__(
        self,
        client: InternalClient,
        folder: Path | None,
        outputs: OutputCollector,
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

    async def run(
        self, attempt: TaskAttempt, runtime: Runtime, work: AttemptWork, reporter: WorkReporter
    ) -> WorkResult:
        """Run the work with what it may have."""
        folder = None
        if self._run is not None and runtime.hands_over:
            folder = self._run.path / attempt.name
        if folder is None and not work.is_untrusted:
            finished = await runtime.run(work, reporter)
            return await self._outputs.complete(work, finished, staged={})
        belongings = AttemptSandbox(folder, work=work, users=runtime.users)
        token = attempt.token
        try:
            await _whole(lambda: belongings.prepare(token))
            minting = CredentialRequester(attempt, work, self._client, self._clock, self._entropy)
            keeping = _CredentialRenewer(attempt, belongings, minting, self._clock, self._entropy)
            handed: AttemptFiles | None = None
            renewing: Sequence[Coroutine[None, None, None]] = ()
            if folder is not None:
                files, renewing = await keeping.begin(str(folder), token)
                handed = replace(files, dispatchers=self._client.urls)
            loop = asyncio.get_running_loop()
            keepers = [loop.create_task(each) for each in renewing]
            try:
                given = replace(work, handed=handed, user=belongings.user)
                finished = await runtime.run(given, reporter)
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


class _CredentialRenewer:
    """Keeps the files of one attempt fresh. Nothing that fails here ends work that has begun."""

    def __init__(
        self,
        attempt: TaskAttempt,
        belongings: AttemptSandbox,
        minting: CredentialRequester,
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
    ) -> tuple[AttemptFiles, Sequence[Coroutine[None, None, None]]]:
        """Have everything there before the work begins; says where, and what renews it."""
        variables = {TOKEN_VARIABLE: f"{folder}/{TOKEN}"}
        if self._belongings.user:
            variables |= {"HOME": f"{folder}/{TEMPORARY}", "TMPDIR": f"{folder}/{TEMPORARY}"}
        outputs = {name: str(path) for name, path in self._belongings.outputs.items()}
        if not self._attempt.assignment.mints:
            handed = AttemptFiles(folder=folder, variables=variables, outputs=outputs)
            return handed, [self._keep_token(token)]
        minted = await self._minting.first()
        if lacks := self._minting.lacking(minted):
            _log.info("%s: %s", self._attempt, lacks)
        await _whole(lambda: self._belongings.write(_files(folder, minted)))
        handed = AttemptFiles(
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
