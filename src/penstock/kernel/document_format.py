"""How Penstock's objects look in a bucket: JSON that names its kind, its format and its writes.

A `Document` is a frozen msgspec struct with a kind and a format number. Its first field on the
wire is `"penstock": "<kind>/<format>"`. A reader that knows the kind and at least that format
reads it; a later format is refused with `NewerFormat`, anything else with `NotOurs`, each with a
sentence that names the object. Unknown fields are ignored, so that a format number changes only
when an older release would misread the object.

A `Stamped` document also remembers who wrote it: `writes` maps a writer to the id of its last
write, oldest first. So when the answer to a write is lost, reading the object back tells whether
the write took effect, even if others have written since: `took_effect`. The memory is the
object's: it goes when the object is deleted, and a document of the same key starts a new one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Final, Self, TypeVar

import msgspec

from penstock.kernel.errors import NewerFormat, NotOurs

WRITERS_MAX: Final = 32
"""How many writers a stamped document remembers; a writer that is pushed out cannot tell."""

_NAME = r"([a-z-]{1,64})/([1-9][0-9]{0,8})"
_HEADER = re.compile(rb'\{"penstock":"%s"[,}]' % _NAME.encode())
_encoder = msgspec.json.Encoder()
_decoders: dict[type[Document], msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()

# What msgspec raises for bytes that are not JSON of the type: nesting that is too deep and text
# that is not UTF-8 are not among its own errors.
UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What msgspec raises for bytes that it cannot read, also for ones that are nested too deep."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """An object that Penstock writes. Subclasses name their kind and format."""

    kind: ClassVar[str] = ""
    format: ClassVar[int] = 1


class Stamped(Document, frozen=True, kw_only=True):
    """A document that is written by compare-and-swap and remembers its writers."""

    writes: dict[str, str] = {}

    def stamped(self, *, writer: str, write: str) -> Self:
        """The same document as this writer's write of this id."""
        others = [(name, last) for name, last in self.writes.items() if name != writer]
        kept = dict(others[-(WRITERS_MAX - 1) :])
        kept[writer] = write
        return msgspec.structs.replace(self, writes=kept)

    def remembers(self, *, writer: str, writes: Collection[str]) -> bool | None:
        """Whether one of these writes of the writer is in the past of this document.

        None if the document may have forgotten: it has had too many writers.
        """
        return _remembers(self.writes, writer, writes)


AnyDocument = TypeVar("AnyDocument", bound=Document)


def encode(document: Document) -> bytes:
    """The document as it is stored."""
    if not document.kind:
        raise TypeError(f"{type(document).__name__} must say its kind: kind: ClassVar[str] = ...")
    header = b'{"penstock":"%s/%d"' % (document.kind.encode(), document.format)
    fields = _encoder.encode(document)
    return header + (b"}" if fields == b"{}" else b"," + fields[1:])


def decode(kind: type[AnyDocument], body: bytes, *, where: str) -> AnyDocument:
    """The document in `body`; `where` names the object in errors."""
    found_kind, found_format = _header(body, where=where)
    if found_kind != kind.kind:
        raise NotOurs(f"{where} is a {found_kind!r} object where a {kind.kind!r} is expected.")
    if found_format > kind.format:
        raise NewerFormat(
            f"{where} has format {found_format} of {kind.kind!r}; "
            f"this release reads up to {kind.format}.",
            hint="Upgrade Penstock here, or finish the upgrade of the process that wrote it.",
        )
    try:
        return _decoder(kind).decode(body)
    except UNREADABLE as error:
        raise NotOurs(f"{where} is damaged: {error}.") from error


def took_effect(*, sent: bytes, found: bytes) -> bool | None:
    """Whether the write that sent one body is in the past of the body that was found.

    None if the bodies cannot tell: they are different and not both stamped, or the one that was
    found has had so many writers that it may have forgotten. The write of a stamped body is the
    last of its `writes`: it has to be stamped anew for every write.
    """
    if sent == found:
        return True
    ours, theirs = _writes(sent), _writes(found)
    if not ours or not theirs:
        return None
    writer, write = next(reversed(ours.items()))
    return _remembers(theirs, writer, (write,))


def _decoder(kind: type[AnyDocument]) -> msgspec.json.Decoder[AnyDocument]:
    """What reads documents of this kind. Made by one thread: msgspec looks at a type when it meets
    it first, and two threads that do so at the same moment crash the process."""
    found = _decoders.get(kind)
    if found is None:
        with _making:
            found = _decoders[kind] = msgspec.json.Decoder(kind)
    return found


def _remembers(history: Mapping[str, str], writer: str, writes: Collection[str]) -> bool | None:
    if writer in history:
        return history[writer] in writes
    return False if len(history) < WRITERS_MAX else None


class _Header(msgspec.Struct):
    penstock: str


class _Writes(msgspec.Struct):
    penstock: str
    writes: dict[str, str] = {}


_header_decoder = msgspec.json.Decoder(_Header)
_writes_decoder = msgspec.json.Decoder(_Writes)


def _header(body: bytes, *, where: str) -> tuple[str, int]:
    quick = _HEADER.match(body)
    if quick:
        return quick[1].decode(), int(quick[2])
    # Somebody else's tool may have written the fields in another order.
    try:
        name = re.fullmatch(_NAME, _header_decoder.decode(body).penstock)
    except UNREADABLE:
        name = None
    if name is None:
        raise NotOurs(
            f"{where} was not written by Penstock.",
            hint="Move it elsewhere: this prefix belongs to Penstock.",
        )
    return name[1], int(name[2])


def _writes(body: bytes) -> dict[str, str]:
    try:
        return _writes_decoder.decode(body).writes
    except UNREADABLE:
        return {}
