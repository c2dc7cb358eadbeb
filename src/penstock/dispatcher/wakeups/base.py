"""How workers hear that an operator has work: what is promised, whoever carries the word.

A wake-up says that an operator has work of some priority, and nothing else. It carries no task, so
it may be lost, late or doubled: it costs time or a claim that finds nothing, never a task. There is
one channel an operator and priority. A wake-up that nobody listens to blocks no other.

- `send` returns when the words are kept, durably, and says which are not: one channel that
  cannot be sent never keeps the others from being sent.
- A listener calls `answer` for each word that it hears. When `answer` returns, the word is settled;
  when it raises, or the process dies, it comes again after a while, here or elsewhere.

`penstock.testing.wakeup_contract` holds every implementation to this. The relay sends; the worker
listens, and the dispatcher never does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

from penstock.dispatcher.dag.model import Priority
from penstock.kernel.service import Service


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """What a wake-up is about."""

    operator: str
    priority: Priority


Heard = Callable[[Channel], Awaitable[None]]
"""What a listener calls. It returns when a claim was answered."""


class Sender(Service):
    """Sends wake-ups."""

    @abstractmethod
    async def send(self, channels: Collection[Channel]) -> Mapping[Channel, str]:
        """Send one wake-up on each channel; returns why, for those that could not be sent."""


class Listener(Service):
    """Hears wake-ups, from `start` to `stop`, on the channels that it was told last."""

    @abstractmethod
    def listen_to(self, operators: Collection[str]) -> None:
        """Listen to these operators, in all priorities, from now on."""
