"""The pack: one immutable object that holds the inputs of 1 to 1,000 tasks of one type."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from penstock.kernel.wire import Document


class Pack(Document, frozen=True, kw_only=True):
    """What was submitted. Written once, never changed, deleted when all of it is settled.

    `nonce` makes the bodies of equal submits differ, so that their versions do. `submitted_ms`
    is the store's time at the first send: a pack that the store dates `RESEND_SECONDS` or more
    after it came too late, is void, and is never run.
    """

    kind: ClassVar[str] = "pack"

    type: str
    nonce: str
    submitted_ms: int
    due_ms: int = 0
    inputs: tuple[msgspec.Raw, ...]
    """Each task's input, as the JSON it was submitted as."""
    key: str | None = None
