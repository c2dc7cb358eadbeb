"""The wake-up contract: how workers learn that an operator has work, whatever carries the hint.

A wake-up says that an operator has work of some priority, and nothing else. It carries no task,
so it may be lost, late or doubled: it costs time or an empty claim, never a task. There is one
channel an operator and priority. A wake-up that nobody listens to blocks no other.

- `send` returns when the wake-ups are stored durably, and says which are not: one channel that
  cannot be sent never keeps the others from being sent.
- A listener calls `answer` for each wake-up. When `answer` returns, it is settled; when it
  raises,
  or the process dies, it comes again after a while, here or elsewhere.
- `channel_name` is for carriers with short plain names: as much of the operator as fits, a
  digest
  of all of it, so that two operators never share a name, and the priority.

`penstock.testing.wakeup_contract` holds every implementation to this. The relay sends; workers
listen.
"""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.dispatcher.dag.model import Priority
from penstock.kernel.service import Service


@dataclass(frozen=True, slots=True, order=True)
class WakeUpChannel:
    """What a wake-up is about."""

    operator: str
    priority: Priority


Heard = Callable[[WakeUpChannel], Awaitable[None]]
"""What a listener calls. It returns when a claim was answered."""


class WakeUpSender(Service):
    """Sends wake-ups."""

    @abstractmethod
    async def send(self, channels: Collection[WakeUpChannel]) -> Mapping[WakeUpChannel, str]:
        """Send one wake-up on each channel; returns why, for those that could not be sent."""


class WakeUpListener(Service):
    """Hears wake-ups, from `start` to `stop`, on the channels that it was told last."""

    @abstractmethod
    def listen_to(self, operators: Collection[str]) -> None:
        """Listen to these operators, in all priorities, from now on."""

    @property
    def is_present(self) -> bool:
        """Whether a dispatcher knows now, by this listener, that its worker is there."""
        return False


_DIGEST_CHARACTERS: Final = 12
_OTHER: Final = re.compile(r"[^A-Za-z0-9_]+")


def channel_name(channel: WakeUpChannel, *, characters_max: int) -> str:
    """The name of a channel, of letters, digits, `-` and `_`."""
    digest = hashlib.sha256(channel.operator.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    end = f"{digest}-{channel.priority.value}"
    begin = _OTHER.sub("-", channel.operator)[: characters_max - len(end) - 1].strip("-")
    return f"{begin}-{end}" if begin else end
