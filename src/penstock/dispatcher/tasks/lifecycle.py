"""The lifecycle of tasks: who may move them, and what each move leaves behind.

| status | means | moved by |
|---|---|---|
| queued | may be claimed when due | `claim` → running; `cancel` → cancelled |
| running | one attempt holds it, by a lease | its worker: `complete` → completed, `fail` → |
| | | retrying or dead, a release → queued; `reap` → retrying or dead; `cancel` asks, then |
| | | every end → cancelled |
| retrying | failed; may be claimed when due | `claim` → running; `cancel` → cancelled |
| dead | no attempt is left | `replay` → queued; of a sink: `replay`, `cancel` → cancelled |
| completed, cancelled | over | nobody |

Invariants, which the schema keeps as well (`docs/dispatcher-protocol.md` has all rules):
- An attempt is proved by `(task_id, attempt, lease_token)`, in the statement that changes the row.
  A zombie's call changes nothing and is told what the task is now (FENCE-1).
- Attempts only grow (FENCE-2), also by a replay, which allows as many again as the job has, and by
  a release, which allows one more: it is not counted, up to a bound (`completion.RELEASES_MAX`).
- A lease that has expired is still its holder's until `reap` ends the attempt: a late heartbeat
  or completion of an attempt that nobody has ended counts (FENCE-5).
- Ending an attempt twice with the same words gets the same answer; with other words, a refusal
  (FENCE-8).
- Whatever makes tasks claimable, now or later, writes the wake-ups in its own transaction
  (FENCE-14).
- Only the database's clock decides (FENCE-12).

Batches: where the job of a picked task has `coalesce: N`, more of the same definition and
generation are picked along, up to N for each place of the worker, in as few batches of about
the same size as possible. Only partitions are put together, none twice in a batch. A task that
was attempted before runs by itself, so that one that breaks its process costs its neighbours
one attempt. Every task of a batch has an attempt, a lease and an end of its own; nothing is
stored of the batch.

Each operation is one short transaction and may be repeated when its answer is lost. A crash
leaves the operation done or not done. Called by the dispatcher's API, router, reaper and backfills.

Claims that have an id, chosen by the worker, stay *unacknowledged* until the first heartbeat of
each attempt (FENCE-20); an end that is reported does as well:

| an attempt is | its lease is | when that is over |
|---|---|---|
| unacknowledged (`task.claim_id`) | `UNACKNOWLEDGED_SECONDS`, or the heartbeat | released: not |
| | if that is shorter; a repetition renews | counted, `LOSSES_MAX` times; claimable at once |
| | it, up to the heartbeat in all | |
| acknowledged, or of a claim without an id | the heartbeat of its job | counted, retrying or dead |

| the answer is lost, or somebody dies | what follows |
|---|---|
| before the commit | nothing has begun |
| after it; the worker repeats the claim, at whichever dispatcher | the same attempts and lease |
| | tokens, with the same grants, changes and batches. One that would be given others now is not |
| | repeated: if the answer was read after all it goes on, and else it is released by the reaper |
| while another dispatcher has the same claim in hand | both begin something; what no answer |
| | brings is released by the reaper |
| after it; the worker is gone, or never repeats it | released by the reaper |
| the answer comes after that | the worker asks, by a heartbeat, before anything begins: refused |
| the worker is killed while it runs, before the first heartbeat | its journal counts it. |
| | Without one nothing begins before it is acknowledged; nor does a task with such a release |
| after the first heartbeat | as ever: the journal of the worker, or the heartbeat timeout |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Final, Protocol

from penstock.dispatcher.dag.model import Priority
from penstock.dispatcher.database.pool import Connection, Database, fetch_rows, query
from penstock.dispatcher.metrics import Counters
from penstock.dispatcher.tasks.batches import renew_sink_tasks, with_batches
from penstock.dispatcher.tasks.completion import (
    UNACKNOWLEDGED_SECONDS,
    AttemptReport,
    Route,
    end,
    no_route,
    reap,
)
from penstock.dispatcher.tasks.consumption import with_changes
from penstock.dispatcher.tasks.model import (
    AttemptEnd,
    AttemptMeasure,
    ClaimedTask,
    Completion,
    ExtendedLease,
    Failure,
    Fence,
    NewTask,
    ReaperPass,
    Refusal,
    TaskRefusalReason,
    TaskSnapshot,
)
from penstock.dispatcher.tasks.rewrites import with_rewrites
from penstock.dispatcher.tasks.rows import (
    SAYING_BYTES_MAX,
    TaskRow,
    announce,
    create_tasks,
    fence_arrays,
    note_woken,
    refusal,
    storable,
    storable_json,
    task_states,
    wake,
    without_twins,
)
from penstock.kernel.errors import InvalidInput
from penstock.protocol.base import TaskStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class PickedTask:
    """A task that this transaction holds, as `pick_next` gives it."""

    id: int
    job_id: int
    definition_id: int
    generation: str
    partition_key: str | None
    is_fresh: bool
    """Whether it has had no attempt."""
    batch_max: int
    is_limited: bool = False
    """Whether a limit of its job or its operator says how many may run."""

    @property
    def is_joined(self) -> bool:
        """Whether it may be run as one with others."""
        return self.batch_max > 1 and self.is_fresh and self.partition_key is not None


@dataclass(frozen=True, slots=True)
class BatchMember:
    """A task of a batch."""

    id: int
    partition_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """Whose tasks are claimed, and how many at most."""

    operator: str
    priority: Priority
    tasks_max: int


async def filled(
    connection: Connection, picked: Sequence[PickedTask], claiming: ClaimRequest
) -> Sequence[Sequence[int]]:
    """What was picked, and more of it, in batches; a task by itself is a batch of one."""
    if not any(each.is_joined for each in picked):
        return [[each.id] for each in picked]
    filling = _Filling(connection, claiming, picked)
    found: dict[int, Sequence[Sequence[int]]] = {}
    for group in _groups(picked):
        batches = divided(await filling.members(group), most=group[0].batch_max)
        found[group[0].id] = [[each.id for each in batch] for batch in batches]
    alone: list[Sequence[Sequence[int]]] = [
        found.get(each.id, ()) if each.is_joined else [[each.id]] for each in picked
    ]
    return [batch for batches in alone for batch in batches]


def joined(known: Sequence[PickedTask]) -> Sequence[Sequence[int]]:
    """What was picked and filled before, in batches."""
    batches: list[Sequence[int]] = [[each.id] for each in known if not each.is_joined]
    for group in _groups(known):
        members = [BatchMember(each.id, each.partition_key or "") for each in group]
        found = divided(members, most=group[0].batch_max)
        batches += [[each.id for each in batch] for batch in found]
    return batches


def _groups(picked: Sequence[PickedTask]) -> Iterable[Sequence[PickedTask]]:
    """Those that may be run as one with others of their definition and generation."""
    groups: dict[tuple[int, str], list[PickedTask]] = {}
    for each in picked:
        if each.is_joined:
            groups.setdefault((each.definition_id, each.generation), []).append(each)
    return groups.values()


class _Filling:
    """Picks more, and keeps count of what was picked: none of it is running yet."""

    def __init__(
        self, connection: Connection, claiming: ClaimRequest, picked: Sequence[PickedTask]
    ) -> None:
        self._connection = connection
        self._claiming = claiming
        self._count = len(picked)
        self._count_of_job = Counter(each.job_id for each in picked)

    async def members(self, group: Sequence[PickedTask]) -> list[BatchMember]:
        """These, and as many more as fit in their places."""
        first = group[0]
        members = [BatchMember(each.id, each.partition_key or "") for each in group]
        wanted = min(len(group) * (first.batch_max - 1), self._claiming.tasks_max - self._count)
        if wanted <= 0:
            return members
        asked: dict[str, Any] = {
            "operator": self._claiming.operator,
            "priority": self._claiming.priority.value,
            "job": first.job_id,
            "definition": first.definition_id,
            "generation": first.generation,
            "keys": [each.partition_key for each in members],
            "limit": wanted,
            "picked": self._count,
            "picked_of_job": self._count_of_job[first.job_id],
        }
        found = await self._connection.execute(query("pick_more"), asked)
        more: dict[str, BatchMember] = {}
        for row in await found.fetchall():
            # A later update of the same partition is left for another claim.
            more.setdefault(row["partition_key"], BatchMember(row["id"], row["partition_key"]))
        self._count += len(more)
        self._count_of_job[first.job_id] += len(more)
        return [*members, *more.values()]


def divided(members: Sequence[BatchMember], *, most: int) -> Sequence[Sequence[BatchMember]]:
    """The members in as few batches as they need, of about the same size.

    A batch has `most` members at most, and no partition twice.
    """
    by_key: dict[str, list[BatchMember]] = {}
    for each in members:
        by_key.setdefault(each.partition_key, []).append(each)
    count = max(-(-len(members) // most), max((len(each) for each in by_key.values()), default=0))
    # Those of one partition are neighbours here, and so are dealt to different batches.
    dealt = [each for same in by_key.values() for each in same]
    return [dealt[first::count] for first in range(count)]


def batch_names(batches: Iterable[Sequence[int]], attempts: dict[int, int]) -> dict[int, str]:
    """The name of each task's batch; tasks that run by themselves have none.

    A batch is named after the first attempt in it, which no other batch ever has.
    """
    return {
        each: f"{batch[0]}-{attempts[batch[0]]}"
        for batch in batches
        if len(batch) > 1
        for each in batch
    }


BATCH_MAX: Final = 1000
"""How many tasks one call may be about; `create` takes any number."""
WORKER_CHARACTERS_MAX: Final = 200
LATE_SECONDS_MAX: Final = 60.0
"""How long after the end of its attempt a heartbeat may come that was only under way."""
_REPEATS_MAX: Final = 2
_TIERS: Final = (Priority.NORMAL, Priority.BULK)


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """The capability token of an attempt, and what is kept of its grants."""

    token: str = field(repr=False)
    grants: str


class IssueTokens(Protocol):
    """Makes the tokens of attempts, in the transaction that is about to begin them.

    What it raises undoes the claim: no attempt is spent that could prove nothing.
    """

    async def __call__(
        self, claimed: Sequence[ClaimedTask], *, connection: Connection
    ) -> Sequence[IssuedToken]: ...


class RepeatedClaim(Exception):
    """A claim of this id has begun something, which nobody has acknowledged yet."""


class Tasks:
    """The operations on tasks.

    `route` is called with the numbers of new events, in the transaction that made them. A
    `worker` is the identity that the API has checked. `counters` are told of what was committed.
    """

    def __init__(
        self, database: Database, *, route: Route = no_route, counters: Counters | None = None
    ) -> None:
        self._database = database
        self._route = route
        self._limited: set[str] = set()
        """Operators of which a limit was seen in the last claim: they are locked first."""
        self.counters = counters or Counters()

    async def create(self, new: Sequence[NewTask]) -> tuple[int | None, ...]:
        """Make tasks and their wake-ups. None stands where an equal task was there already."""
        return await self._database.transact(lambda connection: create_tasks(connection, new))

    async def claim(
        self,
        task_id: int,
        *,
        worker: str | None,
        attempt: int | None = None,
        issue: IssueTokens | None = None,
    ) -> ClaimedTask | Refusal:
        """Begin the next attempt of this task. A `worker` of None is the function of its operator.

        Who names an `attempt` begins that one or none. Without `issue`, as for the operators that a
        dispatcher runs itself, there is no token.
        """

        async def work(connection: Connection) -> ClaimedTask | Refusal:
            found = await connection.execute(query("find_operator"), {"task": task_id})
            row = await found.fetchone()
            if row is None:
                return Refusal(task_id, TaskRefusalReason.UNKNOWN, None)
            await connection.execute(query("lock_limits"), {"operator": row["operator"]})
            found = await connection.execute(query("pick_task"), {"task": task_id})
            picked = await found.fetchone()
            if picked is not None and attempt in (None, picked["attempt"] + 1):
                name = _function(row["operator"]) if worker is None else _checked(worker)
                (claimed,) = await _begin(
                    connection, [[task_id]], places=[(name, None)], issue=issue
                )
                return claimed
            states = await task_states(connection, [task_id])
            refused = refusal(task_id, states.get(task_id), claiming=True)
            return refused if picked is None else replace(refused, why=TaskRefusalReason.STALE)

        found = await self._database.transact(work)
        if isinstance(found, ClaimedTask):
            self.counters.note_begun([found])
        return found

    async def claim_next(
        self,
        operator: str,
        *,
        worker: str,
        limit: int = 1,
        job_id: int | None = None,
        in_batches: bool = False,
        issue: IssueTokens | None = None,
        tasks_max: int = BATCH_MAX,
        claim_id: str | None = None,
    ) -> tuple[ClaimedTask, ...]:
        """Claim the next tasks of an operator, normal ones first, the oldest first.

        `limit` is how many places there are. A batch takes one, so `in_batches` there may be more
        tasks than that, up to `tasks_max`; see `penstock.dispatcher.tasks.lifecycle`. The same
        `claim_id` of the same worker gives the same tasks again.
        """
        if not 1 <= limit <= BATCH_MAX:
            raise InvalidInput(f"A claim takes 1 to {BATCH_MAX} tasks, not {limit}.")
        places = [(_checked(worker), claim_id)] * limit
        asked = _Asked(operator, places, job_id, in_batches, tasks_max)
        return await self._claim(asked, issue)

    async def claim_for(
        self,
        operator: str,
        workers: Sequence[str],
        *,
        claim_ids: Sequence[str | None] = (),
        issue: IssueTokens | None = None,
    ) -> tuple[ClaimedTask | None, ...]:
        """Claim the next tasks of an operator, one for each place of these workers.

        The answer of each stands in its place; None where there was no task left for it. Raises
        `RepeatedClaim` if there are several ids and one of them is known: claim one by one then.
        """
        if not 1 <= len(workers) <= BATCH_MAX:
            raise InvalidInput(f"A claim takes 1 to {BATCH_MAX} tasks, not {len(workers)}.")
        places = [
            (_checked(worker), claim_id)
            for worker, claim_id in zip_longest(workers, claim_ids[: len(workers)])
        ]
        asked = _Asked(operator, places, None, in_batches=False, tasks_max=len(places))
        begun = await self._claim(asked, issue)
        return (*begun, *[None] * (len(places) - len(begun)))

    async def claim_again(
        self, claim_id: str, *, worker: str, in_batches: bool = False, issue: IssueTokens | None
    ) -> tuple[ClaimedTask, ...]:
        """What a claim has begun whose answer was lost: the same attempts; none if it is known."""

        async def work(connection: Connection) -> tuple[ClaimedTask, ...]:
            rows = await fetch_rows(
                connection, "begun_by_claim", claim_id=claim_id, worker=_checked(worker)
            )
            known = [PickedTask(**row) for row in rows]
            return await _repeat(connection, known, in_batches=in_batches, issue=issue)

        return await self._database.transact(work)

    async def _claim(self, asked: _Asked, issue: IssueTokens | None) -> tuple[ClaimedTask, ...]:
        for _ in range(_REPEATS_MAX):
            try:
                return await self._claim_new(asked, issue)
            except RepeatedClaim:
                if len(set(asked.places)) > 1:
                    raise
            ((worker, claim_id),) = set(asked.places)
            assert claim_id is not None, "it is known"
            # None, if they were taken back meanwhile.
            if found := await self.claim_again(
                claim_id, worker=worker, in_batches=asked.in_batches, issue=issue
            ):
                return found
        return ()

    async def _claim_new(self, asked: _Asked, issue: IssueTokens | None) -> tuple[ClaimedTask, ...]:
        at_once: tuple[ClaimedTask, ...] | None = None
        if not asked.in_batches and asked.operator not in self._limited:
            at_once = await self._database.transact(
                lambda connection: _claim_at_once(connection, asked, issue)
            )
        if at_once is not None:
            found = at_once
        else:
            found, is_limited = await self._database.transact(
                lambda connection: _claim_by_tiers(connection, asked, issue)
            )
            (self._limited.add if is_limited else self._limited.discard)(asked.operator)
        self.counters.note_begun(found)
        return found

    async def heartbeat(
        self, fences: Sequence[Fence], *, progress: Mapping[int, Mapping[str, Any]] | None = None
    ) -> tuple[ExtendedLease | Refusal, ...]:
        """Extend leases, each by the time that its job allows a worker to be silent.

        `progress` is what attempts say of themselves, by task; it is kept for people to see.
        """
        without_twins([fence.task_id for fence in fences], most=BATCH_MAX)

        async def work(connection: Connection) -> tuple[ExtendedLease | Refusal, ...]:
            found = await connection.execute(query("heartbeat"), fence_arrays(fences))
            extended = {row["task_id"]: ExtendedLease(**row) for row in await found.fetchall()}
            await _note_progress(connection, extended.values(), progress or {})
            left = [fence for fence in fences if fence.task_id not in extended]
            refused = await _refused_beats(connection, left)
            return tuple(extended.get(each.task_id) or refused[each.task_id] for each in fences)

        return await self._database.transact(work)

    async def complete(self, completions: Sequence[Completion]) -> tuple[AttemptEnd | Refusal, ...]:
        """End attempts that have succeeded: publish, tell, route, all in one transaction."""
        return await self.end(completions)

    async def fail(self, failures: Sequence[Failure]) -> tuple[AttemptEnd | Refusal, ...]:
        """End attempts that have failed: again after a pause, or dead."""
        return await self.end(failures)

    async def end(
        self, reports: Sequence[AttemptReport], *, claims_next: bool = False
    ) -> tuple[AttemptEnd | Refusal, ...]:
        """End attempts, each in its own way, in one transaction.

        With `claims_next` the caller may claim what that makes, before it is announced to others.
        """
        without_twins([each.fence.task_id for each in reports], most=BATCH_MAX)

        async def work(
            connection: Connection,
        ) -> tuple[tuple[AttemptEnd | Refusal, ...], tuple[AttemptMeasure, ...]]:
            connection.is_kept = claims_next
            return await end(connection, reports, route=self._route)

        answers, measured = await self._database.transact(work)
        self.counters.note_ended(measured)
        return answers

    async def cancel(
        self, task_ids: Sequence[int], *, reason: str = "It was cancelled."
    ) -> tuple[TaskSnapshot | Refusal, ...]:
        """Cancel what waits, and ask what is running to stop. Asking again changes nothing."""
        without_twins(task_ids, most=BATCH_MAX)

        async def work(connection: Connection) -> tuple[TaskSnapshot | Refusal, ...]:
            asked = {"tasks": list(task_ids), "reason": storable(reason)}
            await connection.execute(query("cancel_tasks"), asked)
            states = await task_states(connection, task_ids)
            return tuple(_cancelled(each, states) for each in task_ids)

        return await self._database.transact(work)

    async def replay(self, task_ids: Sequence[int]) -> tuple[TaskSnapshot | Refusal, ...]:
        """Replay dead tasks, with as many attempts more as their job has.

        What those of sinks had is for new tasks, as the DAG is now: they are cancelled.
        """
        without_twins(task_ids, most=BATCH_MAX)

        async def work(connection: Connection) -> tuple[TaskSnapshot | Refusal, ...]:
            renewed = await renew_sink_tasks(connection, task_ids)
            found = await connection.execute(query("replay_tasks"), {"tasks": list(task_ids)})
            replayed = [row["id"] for row in await found.fetchall()]
            await announce(connection, replayed)
            states = await task_states(connection, task_ids)
            return tuple(
                states[each].state
                if each in replayed or each in renewed
                else _not_dead(each, states)
                for each in task_ids
            )

        return await self._database.transact(work)

    async def reap(
        self,
        *,
        limit: int = BATCH_MAX,
        outage_seconds: float = 30.0,
        unheard_seconds: float | None = None,
    ) -> ReaperPass:
        """Expire attempts whose leases have run out, the oldest first.

        If no reaper has run for `outage_seconds`, none ends anything for the longest time that a
        worker may be silent: workers that could not be heard are heard first. After
        `unheard_seconds`, or else as many, attempts are spared that were not acknowledged.
        """
        unheard = outage_seconds if unheard_seconds is None else unheard_seconds
        reaping = await self._database.transact(
            lambda connection: reap(
                connection, limit=limit, outage_seconds=outage_seconds, unheard_seconds=unheard
            )
        )
        self.counters.note_ended(reaping.measured)
        return reaping


@dataclass(frozen=True, slots=True)
class _Asked:
    """A claim of the next tasks of an operator; each place is of a worker, and of its claim."""

    operator: str
    places: Sequence[tuple[str, str | None]]
    job_id: int | None
    in_batches: bool
    tasks_max: int


async def _claim_at_once(
    connection: Connection, asked: _Asked, issue: IssueTokens | None
) -> tuple[ClaimedTask, ...] | None:
    """Begin the next tasks; None if a limit counts, which has to be locked before any task is."""
    limit = min(len(asked.places), asked.tasks_max)
    picked = await _pick_next(connection, asked, _TIERS, limit=limit)
    if any(each.is_limited for each in picked):
        return None
    batches = [[each.id] for each in picked]
    return await _begin(
        connection, batches, places=asked.places, issue=issue, operator=asked.operator
    )


async def _claim_by_tiers(
    connection: Connection, asked: _Asked, issue: IssueTokens | None
) -> tuple[tuple[ClaimedTask, ...], bool]:
    """The same under limits, and in batches: a tier begins before the next one is counted.

    Says also whether a limit was seen.
    """
    claimed: list[ClaimedTask] = []
    left = list(asked.places)
    is_limited = False
    await connection.execute(query("lock_limits"), {"operator": asked.operator})
    for tier in _TIERS:
        most = asked.tasks_max - len(claimed)
        picked = await _pick_next(
            connection, asked, [tier], limit=min(len(left), most), is_first=not claimed
        )
        is_limited |= any(each.is_limited for each in picked)
        batches: Sequence[Sequence[int]] = [[each.id] for each in picked]
        if asked.in_batches:
            claiming = ClaimRequest(operator=asked.operator, priority=tier, tasks_max=most)
            batches = await filled(connection, picked, claiming)
        claimed += await _begin(connection, batches, places=left, issue=issue)
        left = left[len(batches) :]
        if not left or len(claimed) >= asked.tasks_max:
            break
    if claimed:
        await wake(connection, "wake_remainder", operator=asked.operator)
    return tuple(claimed), is_limited


async def _pick_next(
    connection: Connection,
    asked: _Asked,
    tiers: Sequence[Priority],
    *,
    limit: int,
    is_first: bool = True,
) -> list[PickedTask]:
    found = await connection.execute(
        query("pick_next"),
        {
            "operator": asked.operator,
            "tiers": [tier.value for tier in tiers],
            "job": asked.job_id,
            "limit": limit,
            # What this claim itself has begun already is no repeated one.
            "claim_ids": sorted({claim_id for _, claim_id in asked.places if claim_id})
            if is_first
            else [],
        },
    )
    rows = await found.fetchall()
    if rows and rows[0]["id"] is None:
        raise RepeatedClaim
    return [PickedTask(**row) for row in rows]


async def _begin(
    connection: Connection,
    batches: Sequence[Sequence[int]],
    *,
    places: Sequence[tuple[str, str | None]],
    issue: IssueTokens | None,
    operator: str | None = None,
) -> tuple[ClaimedTask, ...]:
    """Begin the attempts of tasks that are picked: each batch is of the worker in its place.

    What they do is read, their tokens are signed, and then they begin, in one statement: nothing
    is written twice, and nothing before it can be proved. If it is all that is claimed, `operator`
    is of which, and what is left of it is announced.
    """
    if not batches:
        return ()
    begun, issued = await _read(connection, batches, issue)
    holders = {each: place for batch, place in zip(batches, places, strict=False) for each in batch}
    asked = {
        "tasks": [each.task_id for each in begun],
        "tokens": [each.lease_token for each in begun],
        "workers": [holders[each.task_id][0] for each in begun],
        "claim_ids": [holders[each.task_id][1] for each in begun],
        "unacknowledged_ms": round(UNACKNOWLEDGED_SECONDS * 1000),
        "grants": issued,
        "operator": operator,
        "by_rows": connection.woken is None,
    }
    left = await fetch_rows(connection, "begin_attempts", asked)
    note_woken(connection, [each for each in left if each["operator"] is not None])
    return begun


async def _read(
    connection: Connection,
    batches: Sequence[Sequence[int]],
    issue: IssueTokens | None,
    *,
    is_again: bool = False,
) -> tuple[tuple[ClaimedTask, ...], list[str | None]]:
    """What the attempts of these tasks are to do, with their tokens, and what these grant."""
    tasks = [each for batch in batches for each in batch]
    rows = await fetch_rows(connection, "read_attempts", tasks=tasks)
    names = batch_names(batches, {row["task_id"]: row["attempt"] for row in rows})
    read: Sequence[ClaimedTask] = [
        ClaimedTask(**row, batch=names.get(row["task_id"], "")) for row in rows
    ]
    read = await with_changes(connection, await with_rewrites(connection, read))
    read = await with_batches(connection, read, is_again=is_again)
    if issue is None:
        return tuple(read), [None] * len(read)
    issued = await issue(read, connection=connection)
    both = list(zip(read, issued, strict=True))
    return (
        tuple(replace(each, token=one.token) for each, one in both),
        [f"{each.attempt}:{one.grants}" for each, one in both],
    )


async def _repeat(
    connection: Connection,
    known: Sequence[PickedTask],
    *,
    in_batches: bool,
    issue: IssueTokens | None,
) -> tuple[ClaimedTask, ...]:
    """Attempts that run, and that nobody has acknowledged, for whoever has claimed them.

    They are given what they were given before, or not at all: this may be a late duplicate of a
    claim that was answered, and its answer may be worked on.
    """
    if not known:
        return ()
    batches = joined(known) if in_batches else [[each.id] for each in known]
    begun, issued = await _read(connection, batches, issue, is_again=True)
    asked = {
        "tasks": [each.task_id for each in begun],
        "grants": issued,
        "unacknowledged_ms": round(UNACKNOWLEDGED_SECONDS * 1000),
    }
    same = {row["id"] for row in await fetch_rows(connection, "repeat_attempts", asked)}
    return tuple(each for each in begun if each.task_id in same)


async def _refused_beats(connection: Connection, fences: Sequence[Fence]) -> Mapping[int, Refusal]:
    """Why leases were not extended. One that has crossed its holder's own word is only late."""
    if not fences:
        return {}
    states = await task_states(connection, [fence.task_id for fence in fences])
    asked = {**fence_arrays(fences), "seconds": LATE_SECONDS_MAX}
    found = await connection.execute(query("ended_lately"), asked)
    late = {row["task_id"] for row in await found.fetchall()}
    return {
        task_id: replace(refusal(task_id, states.get(task_id)), is_late=task_id in late)
        for task_id in (fence.task_id for fence in fences)
    }


async def _note_progress(
    connection: Connection,
    extended: Iterable[ExtendedLease],
    progress: Mapping[int, Mapping[str, Any]],
) -> None:
    with_progress = [each for each in extended if each.task_id in progress]
    if with_progress:
        noted = {
            "tasks": [each.task_id for each in with_progress],
            "attempts": [each.attempt for each in with_progress],
            "progress": [storable_json(progress[each.task_id]) for each in with_progress],
            "bytes_max": SAYING_BYTES_MAX,
        }
        await connection.execute(query("note_progress"), noted)


def _checked(worker: str) -> str:
    if not worker or storable(worker) != worker or len(worker) > WORKER_CHARACTERS_MAX:
        raise InvalidInput(
            f"A worker's name has 1 to {WORKER_CHARACTERS_MAX} characters that can be stored."
        )
    return worker


def _function(operator: str) -> str:
    return _checked(f"function:{operator}"[:WORKER_CHARACTERS_MAX])


def _cancelled(task_id: int, states: Mapping[int, TaskRow]) -> TaskSnapshot | Refusal:
    row = states.get(task_id)
    if row is not None and (row.state.cancel_asked or row.state.status is TaskStatus.CANCELLED):
        return row.state
    return refusal(task_id, row)


def _not_dead(task_id: int, states: Mapping[int, TaskRow]) -> Refusal:
    row = states.get(task_id)
    return (
        Refusal(task_id, TaskRefusalReason.NOT_DEAD, row.state) if row else refusal(task_id, None)
    )
