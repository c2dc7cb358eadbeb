"""What a client watches and steers: the state of all, jobs, operators, datasets, outbox, keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from penstock.dispatcher.dag.names import is_name, is_operator, queue_of
from penstock.dispatcher.wire.alerts import AlertsAnswer
from penstock.dispatcher.wire.dags import CutOverAnswer, CutOverAsk
from penstock.dispatcher.wire.datasets import (
    DatasetDetail,
    MaintainAnswer,
    MaintainAsk,
    RefreshAnswer,
    RefreshAsk,
    SnapshotAnswer,
    SweepAnswer,
    SweepAsk,
)
from penstock.dispatcher.wire.keys import (
    AuditAnswer,
    KeysAnswer,
    RevokeAnswer,
    RevokeAsk,
    RotateAnswer,
    RotateAsk,
)
from penstock.dispatcher.wire.steering import (
    DatasetsAnswer,
    EverythingAnswer,
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
from penstock.kernel.words import shown

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

    async def pause_all(self, *, reason: str | None = None) -> EverythingAnswer:
        """Start nothing of any job until it is resumed; a job that comes later is not paused."""
        ask = PauseAsk() if reason is None else PauseAsk(reason=reason)
        return await self._connection.send("/v1/pause", EverythingAnswer, ask)

    async def resume_all(self) -> EverythingAnswer:
        """End all pauses that people have made; those because of pressure stay."""
        return await self._connection.send("/v1/resume", EverythingAnswer)

    async def operators(self) -> OperatorsAnswer:
        """What runs and waits of each operator, for autoscalers."""
        return await self._connection.get("/v1/operators", OperatorsAnswer)

    async def limit_operator(self, operator: str, in_flight_max: int | None) -> OperatorLimitAnswer:
        """How many tasks of an operator may run at a time; None is as many as there are."""
        if not is_operator(operator.partition("@")[0]) or not is_name(queue_of(operator)):
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

    async def dataset(self, dataset: str) -> DatasetDetail:
        """Everything about one dataset: its generations, their columns and how much they hold."""
        path = f"/v1/datasets/{_name(dataset, 'dataset')}"
        return await self._connection.get(path, DatasetDetail)

    async def snapshot(
        self, dataset: str, *, generation: str | None = None, partition_key: str | None = None
    ) -> SnapshotAnswer:
        """All that is published of a dataset at one moment, or of one partition of it.

        The files stay for at least as long as the dispatcher keeps what nobody needs any more.
        """
        asked = {"generation": generation, "partition_key": partition_key}
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/snapshot"
        return await self._connection.get(path, SnapshotAnswer, asked=asked)

    async def sweep(
        self,
        dataset: str | None = None,
        *,
        grace_seconds: float | None = None,
        dry_run: bool = False,
    ) -> SweepAnswer:
        """Remove files that nobody can be reading any more, for a while; ask until it is over.

        With `dry_run` nothing is removed; the answer has what would be.
        """
        ask = SweepAsk(grace_seconds=grace_seconds, dry_run=dry_run)
        path = "/v1/sweep" if dataset is None else f"/v1/datasets/{_name(dataset, 'dataset')}/sweep"
        return await self._connection.send(path, SweepAnswer, ask)

    async def refresh(self, dataset: str, *, after: str = "") -> RefreshAnswer:
        """Have every `current.json` say what is published; ask with `after` until that is None."""
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/refresh"
        return await self._connection.send(path, RefreshAnswer, RefreshAsk(after=after))

    async def maintain(self, dataset: str, *, partition_key: str | None = None) -> MaintainAnswer:
        """Make tasks that rewrite the files of a dataset, or of one partition, in place."""
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/maintain"
        ask = MaintainAsk(partition_key=partition_key)
        # Whoever is heard a second time would be told that there is nothing to make.
        return await self._connection.send(path, MaintainAnswer, ask, is_repeatable=False)

    async def cut_over(
        self, dataset: str, *, force: bool = False, keep: bool = False
    ) -> CutOverAnswer:
        """Have readers read the generation that is being built.

        That happens by itself when it has all that the current one has; with `force` something
        may be missing, and with `keep` what cannot be built anew is taken over as it is.
        """
        path = f"/v1/datasets/{_name(dataset, 'dataset')}/cut-over"
        # Whoever is heard a second time would be told that there is nothing to cut over.
        return await self._connection.send(
            path, CutOverAnswer, CutOverAsk(force=force, keep=keep), is_repeatable=False
        )

    async def keys(self) -> KeysAnswer:
        """The keys that sign capability tokens, the newest first."""
        return await self._connection.get("/v1/keys", KeysAnswer)

    async def rotate_keys(self, *, kms_key: str | None = None) -> RotateAnswer:
        """Have every dispatcher sign with a new key, in about a minute.

        Asked again before that, it is the same rotation. `kms_key` names the key that signs from
        then on, where KMS does.
        """
        ask = RotateAsk(kms_key=kms_key)
        return await self._connection.send("/v1/keys/rotate", RotateAnswer, ask)

    async def revoke_key(self, kid: str) -> RevokeAnswer:
        """End a key at once: what it has signed proves nothing from then on."""
        return await self._connection.send("/v1/keys/revoke", RevokeAnswer, RevokeAsk(kid=kid))

    async def alerts(
        self, *, state: str | None = None, limit: int | None = None, before: int | None = None
    ) -> AlertsAnswer:
        """What is the matter (`state="open"`), what was (`over`), and who was told.

        The newest first; `before` is the answer's.
        """
        asked = {"state": state, "limit": limit, "before": before}
        return await self._connection.get("/v1/alerts", AlertsAnswer, asked=asked)

    async def audit(
        self,
        *,
        task: int | None = None,
        outcome: str | None = None,
        limit: int | None = None,
        before: int | None = None,
    ) -> AuditAnswer:
        """Who was refused, and what was allowed, the newest first; `before` is the answer's."""
        asked = {"task": task, "outcome": outcome, "limit": limit, "before": before}
        return await self._connection.get("/v1/audit", AuditAnswer, asked=asked)


def _name(word: str, noun: str) -> str:
    """A name as a part of a path."""
    if not is_name(word):
        raise InvalidInput(f"{shown(word)} is not the name of a {noun}.")
    return quote(word, safe="")
