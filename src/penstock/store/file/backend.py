"""The `file://` backend: a folder of plain files, shared by the processes of one machine.

Every object is a file under its key, so that people, Spark and `cp -r` can read it, and a file
that another program puts there is an object too. What is Penstock's own is in `.penstock/` and in
no list.

Everything that touches the disk runs in the store's own threads. A write first waits its turn
among the tasks of this process that want the same lock, in order; then it asks for the lock of
the key, without blocking, and again after a pause while another process has it, for at most
`LOCK_SECONDS`. A task that is cancelled while its write is in a thread does not stop the write: it
is completed, and the lock freed, behind the caller's back. `close` waits for such writes.

Time is what the file system stamps on its files; no clock of Python's is read for it. The stamp is
the kernel's at its last tick, so that it may lag, and never leads. Every put is a sample.

Not for network file systems whose locks or times are not those of one machine. Where a file
system ignores case, keys that differ only in case are one object.

`FileObjects` reads, replaces and removes them. Every method blocks and is called in a thread.
`write`, `rewrite` and `remove` are called only through `attempt`, which holds the lock of the key's
stripe for them. Readers take no lock. The object `a/b c/d` is the file `ROOT/a/b c/d`: its body,
nothing else.

A version is the file's time of change in nanoseconds, its inode and its size. Bytes never change
under a version, since a file gets its place by a rename when it is complete. The time is what
the file system stamped on it, less a random part of a millisecond, and later than that of the
file it replaces. So no version of an object comes back, not even if its inode does; and after a
delete it would take the same inode, size and nanosecond at once.

The version is known before the rename. So the metadata is written first, under the name of that
version, and the rename commits both. A reader that finds no metadata for the version it has read
looks whether that is still the version: only what has been replaced can lose its metadata.

What a crash leaves, at any point: the old object or the new one. It may also leave a file in
`.penstock/tmp`, which the next store that is opened to write removes; metadata of a version
that is not there: nobody looks it up, the next write of the key removes it; empty folders,
which no list shows. A power cut leaves the same if the disk is synced: what was answered is
there. What others saw before it was answered may be undone. (The file system must keep the
order of changes to names, as all with a journal do: a folder that another process made a moment
ago is not synced again.)

Folders are made when a rename needs them and removed when a delete leaves them empty. These two
race without a lock: a rename into a folder that has gone is done again.

Lists of a folder tree in the order of keys, one page at a time.

Owned by the `file://` store, which calls `page` in a thread. It changes nothing and takes no
lock.

The order is that of the bytes of whole keys. In one folder that is the order of the names if a
folder's name is taken with its slash: `a.x` < `a/` < `a0`; all keys below `a/` begin with `a/`,
so that nothing that is beside it comes between them. Hence a walk that opens a folder when its
name comes up is in order, and opens only folders that can hold something of the page: one scan
each, and a look at each file that is returned. Files that vanish meanwhile are skipped, and so
is what is no object: links, devices, empty folders, and names that are not valid keys.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from penstock.kernel.clock import Clock
from penstock.kernel.entropy import Entropy, new_id
from penstock.kernel.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    StoreError,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from penstock.store.base import (
    NO_METADATA,
    PAGE_KEYS_MAX,
    REPLACE,
    Delimiter,
    Entry,
    Head,
    Object,
    ObjectStore,
    Page,
    Put,
    PutMode,
    Swap,
    Version,
    check_key,
    check_limit,
    check_metadata,
)
from penstock.store.file.disk import (
    Disk,
    OwnFolder,
    entry_of,
    explained,
    folder_clash,
    is_file,
    no_root,
    obstacle,
    open_folder,
    read_all,
    status,
    stripe_of,
    unconfirmed,
    version_of,
)
from penstock.store.time import StoreClock, TimeSample


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked for. `base` is the root's path; a cursor is the last thing returned."""

    base: bytes
    prefix: bytes
    after: bytes
    delimiter: Delimiter
    limit: int


def query(
    base: bytes,
    *,
    prefix: str,
    start_after: str,
    delimiter: Delimiter,
    limit: int,
    cursor: str | None,
) -> Query:
    """The query of a list, or `InvalidInput` for a cursor that is not ours."""
    after = _bytes(start_after)
    if cursor is not None:
        try:
            after = max(after, base64.urlsafe_b64decode(cursor))
        except (binascii.Error, ValueError) as error:
            raise InvalidInput(f"{cursor[:100]!r} is not the cursor of a list.") from error
    return Query(base, _bytes(prefix), after, delimiter, limit)


def page(asked: Query) -> Page:
    """One page. Blocks; raises `OSError` if a folder cannot be read."""
    entries: list[Entry] = []
    folders: list[str] = []
    last = ""
    for found in _walk(asked):
        if len(entries) + len(folders) == asked.limit:
            cursor = base64.urlsafe_b64encode(last.encode()).decode()
            return Page(tuple(entries), tuple(folders), cursor)
        if isinstance(found, Entry):
            entries.append(found)
            last = found.key
        else:
            folders.append(found)
            last = found
    return Page(tuple(entries), tuple(folders), None)


def _walk(asked: Query) -> Iterator[Entry | str]:
    """Entries and folders, in order, as far as somebody goes on asking."""
    start = asked.prefix[: asked.prefix.rfind(b"/") + 1]
    if not _is_open(start) or obstacle(asked.base + b"/" + start, below=len(asked.base)):
        return
    stack = [(start, iter(_names(asked, start)))]
    while stack:
        folder, names = stack[-1]
        name = next(names, None)
        if name is None:
            stack.pop()
        elif not name.endswith(b"/"):
            entry = _entry(asked.base, folder + name)
            if entry is not None:
                yield entry
        elif not asked.delimiter:
            stack.append((folder + name, iter(_names(asked, folder + name))))
        elif _holds_objects(asked.base, folder + name):
            yield (folder + name).decode()


def _names(asked: Query, folder: bytes) -> list[bytes]:
    """The names in a folder that can belong to the answer, in order; folders have a slash."""
    begin = asked.prefix[len(folder) :]
    after = asked.after[len(folder) :] if asked.after.startswith(folder) else b""
    if not after and asked.after > folder:
        return []
    names = []
    for name in _scan(asked.base, folder):
        # A folder that `after` itself is in lies partly before and partly after it.
        cut = not asked.delimiter and name.endswith(b"/") and after.startswith(name)
        if name.startswith(begin) and (name > after or cut):
            names.append(name)
    names.sort()
    return names


def _scan(base: bytes, folder: bytes) -> Iterator[bytes]:
    """The names of files and, with a slash, of folders, as the file system gives them."""
    try:
        scan = os.scandir(base + b"/" + folder)
    except (FileNotFoundError, NotADirectoryError):
        if status(base + b"/") is None:
            raise
        return
    with scan:
        for found in scan:
            if found.is_dir(follow_symlinks=False):
                if _is_open(folder + found.name + b"/"):
                    yield found.name + b"/"
            elif found.is_file(follow_symlinks=False):
                yield found.name


def _holds_objects(base: bytes, folder: bytes) -> bool:
    """Whether there is any object below a folder."""
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        for name in _scan(base, here):
            if name.endswith(b"/"):
                waiting.append(here + name)
            elif _entry(base, here + name) is not None:
                return True
    return False


def _entry(base: bytes, path: bytes) -> Entry | None:
    key = _key(path)
    found = status(base + b"/" + path) if key else None
    return entry_of(key, found) if found is not None and is_file(found) else None


def _is_open(folder: bytes) -> bool:
    """Whether keys can lie in a folder, which is named with its slash; "" is the root."""
    return not folder or bool(_key(folder[:-1]))


def _key(path: bytes) -> str:
    """The key of a path below the root; "" if it is not a valid key."""
    try:
        return check_key(path.decode())
    except (UnicodeDecodeError, InvalidInput):
        return ""


def _bytes(text: str) -> bytes:
    # Half a surrogate pair is in no key, but it has its place in the order.
    return text.encode(errors="surrogatepass")


READ_TRIES_MAX: Final = 100
FOLDER_TRIES_MAX: Final = 100
JITTER_NS_MAX: Final = 1_000_000
TIME_STEP_NS: Final = 1_000
"""The finest step that the file system's times must have; most have one nanosecond."""


@dataclass(frozen=True, slots=True)
class Chance:
    """What is random in one write: the name of its temporary file, and a part of its time."""

    name: str
    jitter_ns: int


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A write that took effect. `stamp_ns` is when the body was written, if one was."""

    version: Version
    stamp_ns: int | None


class FileObjects:
    """The objects below one folder."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self.base = os.fsencode(root.absolute()).rstrip(b"/")
        self._disk = disk
        self._own = OwnFolder(self.base, disk)

    def prepare(self) -> None:
        """Get ready to write."""
        with explained(self.root):
            self._own.prepare()

    def stamp_ns(self) -> int:
        """The time on the file system's clock."""
        with explained(self.root):
            return self._own.stamp_ns()

    def list(self, asked: Query) -> Page:
        with explained(self.root):
            return page(asked)

    def attempt(self, key: str, work: Callable[[], WriteResult]) -> WriteResult | None:
        """Do the work under the lock of the key; None, at once, if another holds the lock."""
        with explained(self.root, key), self._own.lock(stripe_of(key)) as mine:
            return work() if mine else None

    def head(self, key: str) -> Head:
        path = self._path(key)
        with explained(self.root, key):
            for _ in range(READ_TRIES_MAX):
                found = self._find(key)
                if found is None:
                    raise self._missing(key)
                version = version_of(found)
                metadata = self._own.read_metadata(key, version)
                now = status(path) if metadata is None else found
                if now is None or version_of(now) != version:
                    continue
                return Head(
                    key=key,
                    version=version,
                    size=found.st_size,
                    modified=found.st_mtime_ns / 1e9,
                    metadata=NO_METADATA if metadata is None else metadata,
                )
        raise _restless(key)

    def read(self, key: str, unless: Version | None) -> Object | None:
        path = self._path(key)
        with explained(self.root, key):
            for _ in range(READ_TRIES_MAX):
                file = self._open(key)
                try:
                    found = os.fstat(file)
                    version = version_of(found)
                    if version == unless:
                        return None
                    body = read_all(file, found.st_size)
                    metadata = self._own.read_metadata(key, version)
                    # Also another program may have written into the file while we read it.
                    now = status(path) if metadata is None else os.fstat(file)
                finally:
                    os.close(file)
                if now is None or version_of(now) != version:
                    continue
                return Object(
                    key=key,
                    version=version,
                    size=found.st_size,
                    modified=found.st_mtime_ns / 1e9,
                    metadata=NO_METADATA if metadata is None else metadata,
                    body=body,
                )
        raise _restless(key)

    def write(
        self, key: str, body: bytes, mode: PutMode, metadata: Mapping[str, str], chance: Chance
    ) -> WriteResult:
        current = self._find(key)
        problem = _refuse(key, mode, current)
        if problem is not None:
            raise problem
        if current is None:
            self._make_way(key)
        return self._replace(key, body, metadata, current, chance)

    def rewrite(
        self, key: str, version: Version, metadata: Mapping[str, str], chance: Chance
    ) -> WriteResult:
        """Write the body that is there once more, with other metadata."""
        try:
            file = self._open(key)
        except NotFound as error:
            raise _conflict(key) from error
        try:
            current = os.fstat(file)
            body = read_all(file, current.st_size)
            # Only after reading: the lock keeps other writers out, but not other programs.
            if version_of(os.fstat(file)) != version:
                raise _conflict(key)
        finally:
            os.close(file)
        return self._replace(key, body, metadata, current, chance)

    def remove(self, key: str, version: Version | None) -> WriteResult:
        current = self._find(key)
        if current is None:
            return WriteResult(Version(""), None)
        found = version_of(current)
        if version is not None and version != found:
            raise _conflict(key)
        above = self._path(key).rpartition(b"/")[0]
        folder = open_folder(above, below=len(self.base))
        try:
            self._change(key, folder, self._disk.unlink)
        finally:
            os.close(folder)
        self._own.drop_metadata(key, keep=None)
        with suppress(OSError):
            while len(above) > len(self.base):
                self._disk.rmdir(above)
                above = above.rpartition(b"/")[0]
        return WriteResult(found, None)

    def _path(self, key: str) -> bytes:
        return self.base + b"/" + key.encode()

    def _find(self, key: str) -> os.stat_result | None:
        """The file of a key; None if there is none, or something else."""
        path = self._path(key)
        found = status(path)
        if found is None or not is_file(found) or obstacle(path, below=len(self.base)):
            return None
        return found

    def _open(self, key: str) -> int:
        """The file of a key, open for reading, or `NotFound`."""
        above, _, name = self._path(key).rpartition(b"/")
        try:
            folder = open_folder(above, below=len(self.base))
            try:
                # Without NONBLOCK, opening a pipe would wait for somebody to write into it.
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                file = os.open(name, flags, dir_fd=folder)
            finally:
                os.close(folder)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                raise self._missing(key) from error
            raise
        if is_file(os.fstat(file)):
            return file
        os.close(file)
        raise self._missing(key)

    def _missing(self, key: str) -> StoreError:
        if self.root.is_dir():
            return NotFound(f"There is no object {key!r}.", key=key)
        return no_root(self.root)

    def _make_way(self, key: str) -> None:
        """Make sure that a new file can have this place: only empty folders give way."""
        path = self._path(key)
        if obstacle(path, below=len(self.base)):
            raise folder_clash(key)
        found = status(path)
        if found is None:
            return
        if not stat.S_ISDIR(found.st_mode):
            raise folder_clash(key)
        for folder, _, files in os.walk(path, topdown=False):
            if files:
                raise folder_clash(key)
            with suppress(FileNotFoundError):
                self._disk.rmdir(folder)

    def _replace(
        self,
        key: str,
        body: bytes,
        metadata: Mapping[str, str],
        current: os.stat_result | None,
        chance: Chance,
    ) -> WriteResult:
        temporary = self._own.temporary(stripe_of(key), chance.name)
        try:
            done = self._stage(temporary, body, current, chance)
            if metadata:
                self._own.write_metadata(key, done.version, metadata)
            self._move(temporary, key)
        except BaseException:
            with suppress(OSError):
                self._disk.unlink(temporary)
            raise
        self._own.drop_metadata(key, keep=done.version if metadata else None)
        return done

    def _stage(
        self, path: bytes, body: bytes, current: os.stat_result | None, chance: Chance
    ) -> WriteResult:
        """Write the body aside, with the time that makes its version."""
        file = self._disk.create(path)
        try:
            self._disk.write(file, body)
            stamp_ns = os.fstat(file).st_mtime_ns
            mtime_ns = stamp_ns - chance.jitter_ns
            if current is not None and mtime_ns <= current.st_mtime_ns < stamp_ns + JITTER_NS_MAX:
                mtime_ns = current.st_mtime_ns + TIME_STEP_NS + chance.jitter_ns % TIME_STEP_NS
            self._disk.set_time(file, mtime_ns)
            found = os.fstat(file)
            if abs(found.st_mtime_ns - mtime_ns) >= TIME_STEP_NS:
                raise Unsupported(
                    f"The file system of {self.root} does not keep times to the microsecond.",
                    hint="Use a file system such as ext4, XFS or APFS.",
                )
            self._disk.sync(file)
        finally:
            os.close(file)
        return WriteResult(version_of(found), stamp_ns)

    def _move(self, temporary: bytes, key: str) -> None:
        """Give a staged file its place, with folders made as needed."""
        above = self._path(key).rpartition(b"/")[0]
        for _ in range(FOLDER_TRIES_MAX):
            try:
                folder = open_folder(above, below=len(self.base))
            except FileNotFoundError:
                self._make_folders(above)
                continue
            try:
                # By the open folder: it fails if that folder, which is synced next, has gone.
                self._change(key, folder, partial(self._disk.rename, temporary))
            except FileNotFoundError:
                continue
            else:
                return
            finally:
                os.close(folder)
        raise Unavailable(f"The temporary file for {key!r} was removed in every try.", key=key)

    def _make_folders(self, path: bytes) -> None:
        """Make a folder and those above it, unless somebody removes one meanwhile."""
        end = len(self.base)
        while end < len(path):
            above, slash = end, path.find(b"/", end + 1)
            end = slash if slash >= 0 else len(path)
            try:
                self._disk.mkdir(path[:end])
            except FileExistsError:
                continue
            except FileNotFoundError:
                if above == len(self.base):
                    raise
                return
            self._disk.sync_folder(path[:above] or b"/")

    def _change(self, key: str, folder: int, change: Callable[..., None]) -> None:
        """Change what the name of a key means in its folder, and make that durable."""
        name = key.encode().rpartition(b"/")[2]
        try:
            change(name, folder=folder)
        except OSError as error:
            if error.errno == errno.EIO:
                raise unconfirmed(error, key) from error
            raise
        try:
            self._disk.sync(folder)
        except OSError as error:
            raise unconfirmed(error, key) from error


def _refuse(key: str, mode: PutMode, current: os.stat_result | None) -> StoreError | None:
    match mode:
        case Put.REPLACE:
            return None
        case Put.CREATE:
            if current is None:
                return None
            return AlreadyExists(f"The object {key!r} already exists.", key=key)
        case Swap(version):
            if current is not None and version_of(current) == version:
                return None
            return _conflict(key)


def _conflict(key: str) -> VersionConflict:
    return VersionConflict(f"The object {key!r} is not there in the version named.", key=key)


def _restless(key: str) -> Unavailable:
    return Unavailable(f"The object {key!r} changed whenever it was read.", key=key)


STAMP_RESOLUTION_SECONDS: Final = 0.02
"""How far a stamp may lag: a tick of 10 ms at most, and as much again for a tick that is late."""

THREADS_MAX: Final = 8
LOCK_SECONDS: Final = 30.0
PAUSE_SECONDS_MIN: Final = 0.0005
PAUSE_SECONDS_MAX: Final = 0.02

Answer = TypeVar("Answer")


class FileStore(ObjectStore):
    """The objects below a folder, which must be there. A `disk` is for tests; `fsync` is its."""

    def __init__(
        self,
        root: Path,
        *,
        clock: Clock,
        entropy: Entropy,
        fsync: bool = True,
        disk: Disk | None = None,
    ) -> None:
        self._clock = StoreClock(clock)
        self._entropy = entropy
        self._files = FileObjects(root, disk or Disk(fsync=fsync))
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="penstock-file")
        self._turns: dict[str, asyncio.Lock] = {}
        self._preparing = asyncio.Lock()
        self._prepared = False

    @property
    def clock(self) -> StoreClock:
        return self._clock

    async def get(self, key: str, *, unless: Version | None = None) -> Object | None:
        check_key(key)
        return await self._in_thread(partial(self._files.read, key, unless))

    async def head(self, key: str) -> Head:
        check_key(key)
        return await self._in_thread(partial(self._files.head, key))

    async def put(
        self,
        key: str,
        body: bytes,
        mode: PutMode = REPLACE,
        *,
        metadata: Mapping[str, str] = NO_METADATA,
    ) -> Version:
        check_key(key)
        check_metadata(metadata)
        work = partial(self._files.write, key, body, mode, dict(metadata), self._chance())
        return (await self._write(key, work)).version

    async def touch(
        self, key: str, *, version: Version, metadata: Mapping[str, str] = NO_METADATA
    ) -> Version:
        check_key(key)
        check_metadata(metadata)
        work = partial(self._files.rewrite, key, version, dict(metadata), self._chance())
        return (await self._write(key, work)).version

    async def delete(self, key: str, *, version: Version | None = None) -> None:
        check_key(key)
        await self._write(key, partial(self._files.remove, key, version))

    async def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        delimiter: Delimiter = "",
        limit: int = PAGE_KEYS_MAX,
        cursor: str | None = None,
    ) -> Page:
        asked = query(
            self._files.base,
            prefix=prefix,
            start_after=start_after,
            delimiter=delimiter,
            limit=check_limit(limit),
            cursor=cursor,
        )
        return await self._in_thread(partial(self._files.list, asked))

    async def sample(self) -> TimeSample:
        sent = self._clock.machine.monotonic()
        stamp_ns = await self._in_thread(self._files.stamp_ns)
        return self._observe(stamp_ns, sent)

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)

    async def _write(self, key: str, work: Callable[[], WriteResult]) -> WriteResult:
        """Do the work under the lock of the key."""
        machine = self._clock.machine
        deadline = machine.monotonic() + LOCK_SECONDS
        pause = PAUSE_SECONDS_MIN
        await self._prepare()
        async with self._turns.setdefault(stripe_of(key), asyncio.Lock()):
            while True:
                sent = machine.monotonic()
                done = await self._in_thread(partial(self._files.attempt, key, work))
                if done is not None:
                    if done.stamp_ns is not None:
                        self._observe(done.stamp_ns, sent)
                    return done
                if machine.monotonic() >= deadline:
                    raise Unavailable(
                        f"The lock of the key {key!r} was not free for {LOCK_SECONDS:.0f} seconds.",
                        key=key,
                        hint="Look for a process that is stopped or stuck while it writes.",
                    )
                await machine.sleep(self._entropy.uniform(pause / 2, pause))
                pause = min(2 * pause, PAUSE_SECONDS_MAX)

    async def _prepare(self) -> None:
        """Before the first write only: whoever may not write may still read."""
        if self._prepared:
            return
        async with self._preparing:
            if not self._prepared:
                await self._in_thread(self._files.prepare)
                self._prepared = True

    async def _in_thread(self, work: Callable[[], Answer]) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _observe(self, stamp_ns: int, sent: float) -> TimeSample:
        sample = TimeSample(
            stamp=stamp_ns / 1e9,
            resolution=STAMP_RESOLUTION_SECONDS,
            sent=sent,
            received=self._clock.machine.monotonic(),
        )
        self._clock.observe(sample)
        return sample

    def _chance(self) -> Chance:
        return Chance(
            name=new_id(self._entropy, characters=16),
            jitter_ns=self._entropy.randrange(JITTER_NS_MAX),
        )
