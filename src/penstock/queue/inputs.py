"""What is submitted, as the JSON that is stored: checked once, before anything is sent. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Final

import msgspec

from penstock.kernel.errors import InvalidInput
from penstock.queue.endings import DEPTH_MAX, is_too_deep
from penstock.queue.pack import Reference

HELD_BYTES_MAX: Final = 64 * 1024


def held_input(value: object, *, what: str, levels: int = 0) -> msgspec.Raw:
    """An input that is kept in an object of the queue until its task is submitted.

    It will be wrapped into so many `levels` more then.
    """
    return input_json(value, what=what, bytes_max=HELD_BYTES_MAX, levels=levels)


def input_json(value: object, *, what: str, bytes_max: int, levels: int = 0) -> msgspec.Raw:
    """An input as JSON, or `InvalidInput`. `what` begins the sentence: "The input of …"."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        body = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{what} is not JSON: {error}.",
            hint="Use None, booleans, finite numbers, text, lists and dicts with text keys.",
        ) from error
    if len(body) > bytes_max:
        raise InvalidInput(
            f"{what} has {len(body):,} bytes; at most {bytes_max:,} are taken.",
            hint="Store it in the bucket and give its key.",
        )
    if is_too_deep(b"[" * levels + body + b"]" * levels):
        raise InvalidInput(f"{what} is nested more than {DEPTH_MAX - levels} levels deep.")
    return msgspec.Raw(body)


def is_same_input(stored: msgspec.Raw, given: msgspec.Raw, refs: Collection[int]) -> bool:
    """Whether the first input of a pack, which has these `refs`, is the one that is given.

    The order of keys does not matter; of one that is large, and so elsewhere, every byte does.
    """
    if 0 in refs:
        told = msgspec.json.decode(bytes(stored), type=Reference)
        return told.sha256 == hashlib.sha256(bytes(given)).hexdigest()
    return _canonical(stored) == _canonical(given)


def _canonical(value: msgspec.Raw) -> str:
    return json.dumps(json.loads(bytes(value)), sort_keys=True)
