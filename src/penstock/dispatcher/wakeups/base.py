"""The wake-up contract: how workers learn that an operator has work, whatever carries the hint.

A wake-up says that an operator has work of some priority, and nothing else. It carries no task,
so it may be lost, late or doubled: it costs time or an empty claim, never a task. There is one
channel an operator and priority. A wake-up that nobody listens to blocks no other.

- `send` is told how many tasks a channel has, and wakes up to as many listeners, at least one.
  A sender that pays for each wakes fewer: a claim that leaves tasks behind announces them again.
- `send` returns when the wake-ups are stored durably, and says which are not: one channel that
  cannot be sent never keeps the others from being sent.
- A listener calls `answer` for each wake-up. When `answer` returns, it is settled; when it
  raises,
  or the process dies, it comes again after a while, here or elsewhere.
- `channel_name` is for carriers with short plain names: as much of the operator as fits, a
  digest
  of all of it, so that two operators never share a name, and the priority.

`tests/contract/wakeup_contract.py` holds every implementation to this. The relay sends; workers
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


TaskCounts = Mapping[WakeUpChannel, int]
"""How many tasks of each channel can be claimed, as far as is known; at least one."""
TASKS_COUNTED_MAX: Final = 1_000
"""More are not counted: those who are woken for these announce what they leave."""

Heard = Callable[[WakeUpChannel], Awaitable[None]]
"""What a listener calls. It returns when a claim was answered."""


class WakeUpSender(Service):
    """Sends wake-ups."""

    @abstractmethod
    async def send(self, tasks_of: TaskCounts) -> Mapping[WakeUpChannel, str]:
        """Send wake-ups on each channel; returns why, for those on which none could be sent."""


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
