"""Whether who calls is of a release that can be served: by the number of the protocol it speaks.

Judged before anything else of a request, since all else may look different in another release. It
is one sentence that says which side is to be brought forward, instead of a field that one of them
does not know. Pure; called by the application.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.dispatcher.api.requests import Headers
from penstock.dispatcher.wire.base import PROTOCOL, PROTOCOL_HEADER, PROTOCOL_MIN
from penstock.dispatcher.wire.problem import Problem

_HEADER: Final = PROTOCOL_HEADER.lower().encode()
_NUMBER: Final = re.compile(rb"[1-9][0-9]{0,8}")


def unserved(
    headers: Headers, *, least: int = PROTOCOL_MIN, most: int = PROTOCOL
) -> Problem | None:
    """Why a caller of this release cannot be served; None if it can, or does not say."""
    said = next((value.strip() for name, value in headers if name == _HEADER), None)
    if said is None or (_NUMBER.fullmatch(said) and least <= int(said) <= most):
        return None
    if not _NUMBER.fullmatch(said):
        title = f"`{PROTOCOL_HEADER}` has to be a number from 1."
        return Problem(type="malformed", title=title, status=400)
    number = int(said)
    if number < least:
        title = "Who calls is of an earlier release of Penstock than this dispatcher can serve"
        detail = "Bring it to the release of the dispatcher, and start it again."
    else:
        title = "Who calls is of a later release of Penstock than this dispatcher"
        detail = "Bring the dispatchers to that release first; what calls them comes after."
    known = f"{least}" if least == most else f"{least} to {most}"
    return Problem(
        type="release",
        title=f"{title} (protocol {number}; it knows {known}).",
        status=426,
        detail=detail,
    )
