"""What a client watches and steers: the state of all, jobs, operators, datasets, the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from penstock.dispatcher.dag.names import is_name, is_operator, shown
from penstock.dispatcher.wire.dags import CutOverAnswer, CutOverAsk
from penstock.dispatcher.wire.steering import (
    DatasetsAnswer,
    JobPausesAnswer,
    OperatorLimitAnswer,
    OperatorLimitAsk,
    OperatorsAnswer,
    OutboxAnswer,
    OutboxRetryAnswer,
    OutboxRetryAsk,
    PartitionsAnswer,
    PauseAsk,
    PressuresAnswer,
    StatusAnswer,
)
from penstock.kernel.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.dispatcher.client.connection import Connection


class Watching:
    """The requests of `Client` that are about how things are, and how they shall be."""

    @property
    def _connection(self) -> Connection:
        raise NotImplementedError

    async def status(self) -> StatusAnswer:
        """Everything on one page."""
        return await self._connection.get("/v1/status", StatusAnswer)

    async def pressure(self) -> PressuresAnswer:
        """The queues that have limits, and what is paused because of them."""
        return await self._connection.get("/v1/pressure", PressuresAnswer)

    async def pause(self, job: str, *, reason: str | None = None) -> JobPausesAnswer:
        """Start nothing of a job until it is resumed; what runs goes on."""
        ask = PauseAsk() if reason is None else PauseAsk(reason=reason)
        path = f"/v1/jobs/{_name(job, 'job')}/pause"
        return await self._connection.send(path, JobPausesAnswer, ask)

    async def resume(self, job: str) -> JobPausesAnswer:
        """Take back what `pause` did; a pause because of pressure stays."""
        path = f"/v1/jobs/{_name(job, 'job')}/resume"
        return await self._connection.send(path, JobPausesAnswer)

    async def operators(self) -> OperatorsAnswer:
        """What runs and waits of each operator, for autoscalers."""
        return await self._connection.get("/v1/operators", OperatorsAnswer)

    async def limit_operator(self, operator: str, in_flight_max: int | None) -> OperatorLimitAnswer:
        """How many tasks of an operator may run at a time; None is as many as there are."""
        if not is_operator(operator):
            raise InvalidInput(f"{shown(operator)} is not the name of an operator.")
        ask = OperatorLimitAsk(in_flight_max=in_flight_max)
        path = f"/v1/operators/{operator}"
        return await self._connection.send(path, OperatorLimitAnswer, ask, method="PUT")

    async def outbox(self) -> OutboxAnswer:
        """The messages that could not be sent, and are not tried any more."""
        return await self._connection.get("/v1/outbox", OutboxAnswer)

    async def retry_outbox(self, ids: Sequence[int]) -> OutboxRetryAnswer:
        """Try messages again that are not tried any more."""
        ask = OutboxRetryAsk(ids=list(ids))
        return await self._connection.send("/v1/outbox/retry", OutboxRetryAnswer, ask)

    async def datasets(self) -> DatasetsAnswer:
        """Datasets and their generations."""
        return await self._connection.get("/v1/datasets", DatasetsAnswer)

    async def partitions(
        self,
        dataset: str,
        *,
        generation: str | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> PartitionsAnswer:
        """What is published of a dataset, by default of its current generation."""
        asked = {"generation": generation, "after": after, "limit": limit}
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/partitions"
        return await self._connection.get(path, PartitionsAnswer, asked=asked)

    async def cut_over(self, dataset: str, *, force: bool = False) -> CutOverAnswer:
        """Have readers read the generation that is being built.

        That happens by itself when it has all partitions of the current one; with `force` they
        may be missing.
        """
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/cut-over"
        # Whoever is heard a second time would be told that there is nothing to cut over.
        return await self._connection.send(
            path, CutOverAnswer, CutOverAsk(force=force), is_repeatable=False
        )


def _name(word: str, noun: str) -> str:
    """A name as a part of a path."""
    if not is_name(word):
        raise InvalidInput(f"{shown(word)} is not the name of a {noun}.")
    return quote(word, safe="")
