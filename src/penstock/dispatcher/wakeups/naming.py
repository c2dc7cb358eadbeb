"""What a channel is called where names are short and plain, as in queues.

The name begins with as much of the operator as fits, for people, and ends with a digest of all of
it, so that two operators never share a name, and the priority.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from penstock.dispatcher.wakeups.base import Channel

_DIGEST_CHARACTERS: Final = 12
_OTHER: Final = re.compile(r"[^A-Za-z0-9_]+")


def channel_name(channel: Channel, *, characters_max: int) -> str:
    """The name of a channel, of letters, digits, `-` and `_`."""
    digest = hashlib.sha256(channel.operator.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    end = f"{digest}-{channel.priority.value}"
    begin = _OTHER.sub("-", channel.operator)[: characters_max - len(end) - 1].strip("-")
    return f"{begin}-{end}" if begin else end
