"""Lists of a folder tree in the order of keys, one page at a time.

Owned by the `file://` store, which calls `page` in a thread. It changes nothing and takes no lock.

The order is that of the bytes of whole keys. In one folder that is the order of the names if a
folder's name is taken with its slash: `a.x` < `a/` < `a0`; all keys below `a/` begin with `a/`,
so that nothing that is beside it comes between them. Hence a walk that opens a folder when its
name comes up is in order, and opens only folders that can hold something of the page: one scan
each, and a look at each file that is returned. Files that vanish meanwhile are skipped, and so is
what is no object: links, devices, empty folders, and names that are not valid keys.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.kernel.errors import InvalidInput
from penstock.store.base import Delimiter, Entry, Page, check_key
from penstock.store.file.disk import entry_of, is_file, obstacle, status


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
