"""What is submitted, as the JSON that is stored: checked once, before anything is sent. Pure."""

from __future__ import annotations

import json
from typing import Final

import msgspec

from penstock.kernel.errors import InvalidInput
from penstock.queue.endings import DEPTH_MAX, is_too_deep

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
