"""Wake-ups through SQS: one queue an operator and priority, made when it is first needed.

- A wake-up is a message without content. It is invisible to others while it is being answered,
  for
  `visibility_seconds` that are extended as long as that takes, and deleted when it was answered.
  One that was not, or whose listener has died, becomes visible again.
- Messages that nobody receives expire after some minutes: the reconciler sends another.
- For several tasks several messages are sent, in one request. A listener that waits takes one of
  them; one that has just answered takes what has piled up, and answers it with one claim.
- Listening is one long poll a channel, in a daemon thread. A poll that ends after its listener
  has
  stopped makes what it received visible again at once.

All calls of boto3 are made in threads and are bounded in time. Deleted queues are made anew.
Neither side needs SQS at start: sending fails, listening retries and logs it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.wakeups.base import (
    Heard,
    TaskCounts,
    WakeUpChannel,
    WakeUpListener,
    WakeUpSender,
    channel_name,
)
from penstock.kernel.aws import Aws, aws_client, error_code
from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.entropy import Entropy, system_entropy
from penstock.kernel.errors import InvalidInput

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

NAME_CHARACTERS_MAX: Final = 80
_RETENTION_SECONDS: Final = 600
_MESSAGES_MAX: Final = 10
_CONNECTIONS_MAX: Final = 200
_PAUSE_SECONDS_MAX: Final = 15.0
_STOP_SECONDS: Final = 5.0
_GONE: Final = frozenset(
    {"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist", "NonExistentQueue"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqsSettings:
    """How queues are named and how long things last."""

    prefix: str
    wait_seconds: int = 10
    """How long a poll waits for a message: 20 at most, and the longer the cheaper."""
    visibility_seconds: int = 30
    again_seconds: int = 5
    """How soon a word that could not be answered comes again."""

    def __post_init__(self) -> None:
        if not 1 <= self.wait_seconds <= 20 or not 1 <= self.visibility_seconds <= 43_200:
            raise InvalidInput(
                "SQS needs wait_seconds of 1 to 20 and visibility_seconds of 1 to 43,200, not"
                f" {self.wait_seconds} and {self.visibility_seconds}."
            )
        if len(self.prefix) > 30:
            raise InvalidInput("The prefix of names in SQS has 30 characters at most.")


class _Queues:
    """A client, made when it is first needed, and the URLs of queues. Used from threads."""

    def __init__(self, aws: Aws, settings: SqsSettings) -> None:
        self._aws = aws
        self.settings = settings
        self._lock = threading.Lock()
        self._client: Any = None
        self._urls: dict[WakeUpChannel, str] = {}

    @property
    def client(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = aws_client(
                    "sqs",
                    aws=self._aws,
                    read_seconds_max=self.settings.wait_seconds + 10,
                    connections_max=_CONNECTIONS_MAX,
                )
            return self._client

    def call(self, channel: WakeUpChannel, method: str, **asked: object) -> dict[str, Any]:
        """Call a method about a channel's queue, which is made if it is not there."""
        try:
            return self._call(channel, method, asked)
        except Exception as error:
            if error_code(error) not in _GONE:
                raise
            self._urls.pop(channel, None)
            return self._call(channel, method, asked)

    def _call(
        self, channel: WakeUpChannel, method: str, asked: Mapping[str, object]
    ) -> dict[str, Any]:
        url = self._urls.get(channel) or self._url(channel)
        answer: dict[str, Any] = getattr(self.client, method)(QueueUrl=url, **asked)
        return answer

    def _url(self, channel: WakeUpChannel) -> str:
        name = self.name(channel)
        try:
            answer = self.client.get_queue_url(QueueName=name)
        except Exception as error:
            if error_code(error) not in _GONE:
                raise
            attributes = {
                "MessageRetentionPeriod": str(_RETENTION_SECONDS),
                "VisibilityTimeout": str(self.settings.visibility_seconds),
            }
            answer = self.client.create_queue(QueueName=name, Attributes=attributes)
        url: str = answer["QueueUrl"]
        self._urls[channel] = url
        return url

    def name(self, channel: WakeUpChannel) -> str:
        room = NAME_CHARACTERS_MAX - len(self.settings.prefix)
        return self.settings.prefix + channel_name(channel, characters_max=room)

    def close(self) -> None:
        """End connections. A poll that was abandoned may still make one, for its last word."""
        with self._lock:
            client = self._client
        if client is not None:
            client.close()


class SqsSender(WakeUpSender):
    """Sends wake-ups through SQS."""

    def __init__(self, aws: Aws | None = None, *, settings: SqsSettings) -> None:
        self._queues = _Queues(aws or Aws(), settings)

    async def start(self) -> None:
        """Nothing to do yet."""

    async def stop(self) -> None:
        await asyncio.to_thread(self._queues.close)

    async def send(self, tasks_of: TaskCounts) -> Mapping[WakeUpChannel, str]:
        async def one(channel: WakeUpChannel, tasks: int) -> str:
            some = range(max(1, min(tasks, _MESSAGES_MAX)))
            entries = [{"Id": str(place), "MessageBody": "wake up"} for place in some]
            try:
                answer = await asyncio.to_thread(
                    self._queues.call, channel, "send_message_batch", Entries=entries
                )
            except Exception as error:  # noqa: BLE001 - boto3 has no end of errors; it is told
                return str(error) or type(error).__name__
            if answer.get("Successful"):
                return ""
            failed = answer.get("Failed") or [{}]
            return str(failed[0].get("Message") or "SQS took no message.")

        said = await asyncio.gather(*(one(*each) for each in tasks_of.items()))
        return {channel: why for channel, why in zip(tasks_of, said, strict=True) if why}


class SqsListener(WakeUpListener):
    """Hears wake-ups through SQS."""

    def __init__(
        self,
        answer: Heard,
        *,
        aws: Aws | None = None,
        settings: SqsSettings,
        clock: Clock | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self._answer = answer
        self._queues = _Queues(aws or Aws(), settings)
        self._clock = clock or SystemClock()
        self._entropy = entropy or system_entropy()
        self._polls: dict[WakeUpChannel, asyncio.Task[None]] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._wanted: frozenset[str] = frozenset()
        self._is_started = False

    def listen_to(self, operators: Collection[str]) -> None:
        self._wanted = frozenset(operators)
        if self._is_started:
            self._follow()

    async def start(self) -> None:
        self._is_started = True
        self._follow()

    async def stop(self) -> None:
        self._is_started = False
        polls = list(self._polls.values())
        self._follow()
        if polls:
            await asyncio.wait(polls, timeout=_STOP_SECONDS)
        if self._answers:
            await asyncio.wait(self._answers, timeout=_STOP_SECONDS)
        left = list(self._answers)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_STOP_SECONDS)
        await asyncio.to_thread(self._queues.close)

    def _follow(self) -> None:
        """Poll the channels of the operators that are wanted, and no others."""
        wanted = {
            WakeUpChannel(operator, tier)
            for operator in (self._wanted if self._is_started else ())
            for tier in Priority
        }
        for channel in self._polls.keys() - wanted:
            self._polls.pop(channel).cancel()
        loop = asyncio.get_running_loop()
        for channel in wanted - self._polls.keys():
            self._polls[channel] = loop.create_task(
                self._listen(channel), name=f"listen to {channel.operator}"
            )

    async def _listen(self, channel: WakeUpChannel) -> None:
        failures, messages_max = 0, 1
        while True:
            # Of several messages the others are for those who wait too.
            poll = _Poll(self._queues, channel, messages_max=messages_max)
            try:
                messages = await poll.run()
            except Exception as error:  # noqa: BLE001 - boto3 has no end of errors; tried again
                failures += 1
                if failures == 1:
                    _log.warning("failed to receive wake-ups; retrying: %s", error)
                pause = min(0.5 * 2.0 ** min(failures, 10), _PAUSE_SECONDS_MAX)
                await self._clock.sleep(pause * self._entropy.uniform(0.8, 1.2))
                continue
            failures = 0
            messages_max = _MESSAGES_MAX if messages else 1
            if messages:
                # Several words on one channel say no more than one.
                answering = asyncio.get_running_loop().create_task(self._handle(channel, messages))
                self._answers.add(answering)
                answering.add_done_callback(self._answers.discard)
                await asyncio.wait({answering})

    async def _handle(self, channel: WakeUpChannel, receipts: Collection[str]) -> None:
        """Answer, and delete what was answered; hide it from others meanwhile."""
        keeping = asyncio.get_running_loop().create_task(self._keep(channel, receipts))
        try:
            await self._answer(channel)
        except Exception as error:  # noqa: BLE001 - the word comes again, whatever it was
            _log.warning("failed to answer a wake-up of %s; retrying: %s", channel.operator, error)
            is_answered = False
        else:
            is_answered = True
        finally:
            keeping.cancel()
        for receipt in receipts:
            if is_answered:
                await self._call(channel, "delete_message", ReceiptHandle=receipt)
            else:
                seconds = self._queues.settings.again_seconds
                await self._hide(channel, receipt, seconds)

    async def _keep(self, channel: WakeUpChannel, receipts: Collection[str]) -> None:
        seconds = self._queues.settings.visibility_seconds
        while True:
            await self._clock.sleep(seconds / 3)
            for receipt in receipts:
                await self._hide(channel, receipt, seconds)

    async def _hide(self, channel: WakeUpChannel, receipt: str, seconds: int) -> None:
        await self._call(
            channel, "change_message_visibility", ReceiptHandle=receipt, VisibilityTimeout=seconds
        )

    async def _call(self, channel: WakeUpChannel, method: str, **asked: object) -> None:
        try:
            await asyncio.to_thread(self._queues.call, channel, method, **asked)
        except Exception as error:  # noqa: BLE001 - the word is heard twice, which does no harm
            _log.info("failed to delete an answered wake-up; it may be redelivered: %s", error)


class _Poll:
    """One long poll, in a thread that does not keep the process from ending."""

    def __init__(self, queues: _Queues, channel: WakeUpChannel, *, messages_max: int) -> None:
        self._queues = queues
        self._channel = channel
        self._messages_max = messages_max
        self._is_abandoned = threading.Event()

    async def run(self) -> list[str]:
        """The receipts of the messages that came, if any did."""
        try:
            return await _in_thread(self._receive)
        finally:
            self._is_abandoned.set()

    def _receive(self) -> list[str]:
        settings = self._queues.settings
        answer = self._queues.call(
            self._channel,
            "receive_message",
            WaitTimeSeconds=settings.wait_seconds,
            VisibilityTimeout=settings.visibility_seconds,
            MaxNumberOfMessages=self._messages_max,
        )
        receipts = [each["ReceiptHandle"] for each in answer.get("Messages", ())]
        if self._is_abandoned.is_set():
            for receipt in receipts:
                # If this fails, it is visible when its time is over.
                with suppress(Exception):
                    self._queues.call(
                        self._channel,
                        "change_message_visibility",
                        ReceiptHandle=receipt,
                        VisibilityTimeout=0,
                    )
        return receipts


async def _in_thread(work: Callable[[], Answer]) -> Answer:
    """Run something that blocks in a daemon thread; what comes of it is dropped if cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Answer] = loop.create_future()

    def settle(answer: Answer | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(answer)  # type: ignore[arg-type]  # it is what `work` returned

    def run() -> None:
        answer: Answer | None = None
        failure: BaseException | None = None
        try:
            answer = work()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            failure = error
        with suppress(RuntimeError):  # The loop has ended meanwhile, and nobody waits.
            loop.call_soon_threadsafe(settle, answer, failure)

    threading.Thread(target=run, name="poll for wake-ups", daemon=True).start()
    return await done
