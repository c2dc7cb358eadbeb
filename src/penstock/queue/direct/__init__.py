"""Direct dispatch: whoever submits a pack also tells one worker of it. Opt-in, type by type.

`QueueConfig(direct=("resize",))` says which types are direct, so that producers and workers agree.
An inbox is an index and nothing else: the pack lies in `tasks/`, `ready/` or `keyed/` as any other,
its ledger decides who runs it, and workers of every mode may find it there. So whatever happens to
an inbox costs time, never a task, and mixed fleets are fine.

## Objects

    inbox/@leases/{worker}.json      a cell: who holds the worker's name, and until when
    inbox/@cursors/{worker}.json     a cell of its own: saving it can never cost the lease
    inbox/{worker}/{minute}/{nonce}@{task}   an entry: empty; its key alone tells the pack, its
                                     type, size, priority and limit. The nonce is never used twice

## The lease: states, and who moves them

| state | means | leaves by |
|---|---|---|
| (no object) | the name is free | `create` of a worker that starts: LIVE |
| LIVE | `holder` works until `expires_ms` | its own renewal; itself: GONE; when it is over, |
| | | a recovery: GONE, or a worker that starts: LIVE, of another holder |
| GONE | nobody holds it; others are given what is in the inbox | a worker that starts: LIVE; |
| | | a recovery, when the inbox is empty: deleted |

Each is a compare-and-swap. A worker that starts under a name whose lease is LIVE and not surely
over gets `WorkerIdConflict`. A holder trusts its lease while the store's time is surely before its
end; when it does not, it looks at nothing and starts nothing new from it. At a renewal it finds out
whether it still holds the name. If not, it stops at once and gives back what runs. A lease that has
run out and that nobody has touched is simply renewed. A lease lasts `lease_duration_secs` (60 s)
and is renewed every `lease_renewal_interval_secs` (20 s); both are tripled while idle.

## An entry

Written after the pack, never before; best effort: a submit does not fail or wait long because of it
(`dispatching`). It goes to a live worker that has a handler for the type. The minute is that in
which the pack is due. The worker lists its inbox, tries what is there as it tries what a list
shows, and deletes the entry once it, or somebody else, has claimed the pack, or the pack is over
(`inbox`). An entry of a type that the worker has no handler for is deleted. Where no live worker is
known, a pack that would be in `tasks/` is put into `ready/` instead, in the present minute: direct
workers look there often.

## The cursor

The minute before which everything in the inbox was handled. It moves up to the oldest entry that a
list showed and that is not handled, and no further than `LATE_MINUTES` behind the present. A worker
that takes over its own name goes on from its cursor, or from the beginning of the inbox if none was
saved; at most from 24 hours back, with a warning. A fresh worker, whose name was free, starts now.
Entries before the cursor, written late, are deleted when they are seen. Their packs, and those
behind the 24 hours, are found by scavenging.

## Recovery, by anyone

Workers list the leases; one that is over is swapped to GONE, which fences its holder. Then the
entries of the inbox are looked at one by one: a pack with a ledger was claimed, and is left to its
lease; one that is gone is over; one that is pending is announced to a live worker, in its minute
and under the same nonce. Then the entry is deleted. `LINGER_SECONDS` after the swap, when no
producer can know the worker any more, cursor and lease go. Every step may be done twice, by two at
once, or be left half done by a crash: the lease stays GONE and the next who looks goes on. What
comes even later lies in an inbox without a lease: the elected monitor looks for such every
`ORPHAN_SECONDS` and does the same with them. A worker that stops does it for itself. There is no
overflow prefix (docs/decisions/0018).

## What finds what an inbox loses

A worker looks into `ready/` so often that the fleet as a whole does every 5 s or so, and each at
least every `overflow_scavenge_interval_secs` (120 s), with jitter. As often it scavenges: one look
at everything, as in `shared`, at what is older than `YOUNG_SECONDS`. Retries are remembered by the
worker that failed; if it dies, or if its claim runs out, the pack is in `tasks/` with a ledger, and
is found so. One worker is elected to be the monitor, as in `shared`.

## Crash points

| a crash | leaves | and then |
|---|---|---|
| before the entry is written | a pack without an entry | scavenged within 120 s + 10 s |
| after a claim, before the delete | an entry to a claimed pack | the next who lists deletes it |
| of a worker, whenever | a lease that ends, an inbox | recovered after 60 s (idle 180 s), a look |
| of the whole fleet | the same | the same names go on from their cursors, others recover |
| between two steps of a recovery | a lease that is GONE | the next who looks goes on |
| before a cursor is saved | an older cursor | entries that were deleted are not there any more |

Bounds. Every live worker looks at the leases every 60 s, or every 10 s times the number of workers
if that is more, at most 600 s, with jitter: the fleet as a whole finds a lease that is over within
72 s. Scavenging, which needs no recovery, finds every pack within 144 s of its tenth second. A
picture of the workers is at most 30 s old for those who submit: a worker that stops is told of for
that long, and one that dies until its lease has ended.

## Requests

A task by itself: 4 puts (pack, entry, claim, settle), 3 gets, its deletes, and its share of the
LISTs. An inbox is one LIST a look, for every worker: with `Polling`'s 8 s an idle worker pays $1.62
a month for that, $0.22 for its lease, $0.11 for scavenging, $0.04 for other leases; a fleet pays
$2.60 for `ready/`. A producer pays one LIST in 30 s while it submits, and a GET for each worker
that is new to it.
"""
