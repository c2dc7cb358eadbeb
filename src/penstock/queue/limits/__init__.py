"""Limits: how many tasks of a key run at a time, or start in a time, in the whole fleet.

A task falls under the limit whose key was given at its submit. One cell a limit,
`limits/{key}.json`, holds its definition, which users write, and a share for every worker that
holds or waits for something of it, which that worker writes. A key without an object is unlimited.

**Concurrency.** A worker holds permits under a lease of `LEASE_SECONDS` (60 s), renewed at a third.
Three rules keep the tasks that run at or below the limit at every moment of the store's time:

- C1 Only its worker changes a share. Others remove it, and only when it has surely ended
  (`earliest >= ends`), or its process has, with all its children, by the lock that proves it
  (`penstock.queue.incarnation`); by no other sign.
- C2 A share grows only if all shares together then stay within the limit. It may always shrink or
  be renewed as it is. So a limit that is lowered while it is held gives nothing until enough was
  returned.
- C3 A worker runs at most as many tasks as its share has permits, and none at `ends`: it interrupts
  them `MARGIN_SECONDS` (10 s) before, if it could not renew, and starts none from then on. What has
  leave to start, but not yet started when a share came back smaller, does not start. A handler that
  does not heed its interruption keeps its permit for as long as its worker renews it. When the
  worker has stopped or is cut off, the share ends by itself, within `LEASE_SECONDS` of its last
  write: a handler that ignores its interruption for longer exceeds the limit.

A write of unknown outcome counts as the worse of the two: the worker goes on with the fewer
permits and the earlier end. Shares are written as absolute values, so the next write that succeeds
says what is so, whatever became of the one before.

Fairness: a share also says how many more its worker would take. While the shares together want
more than there is, each gets its max-min fair part and holders return what they have above that as
their tasks end. If there are more workers than permits, the permits go round: whoever has held for
`TURN_SECONDS` (20 s) lets those go first who have waited longest. So every worker that waits gets a
permit after at most a turn, a renewal and the tasks that run, for each `limit` workers before it.

**Rate.** A bucket of `burst` tokens that fills by `rate` a second; a start takes one. Taking and
starting are two moments, and the promise is about starts: at most `burst + rate * t` in any t
seconds of the store's time. So a token that was taken counts as not yet back until its worker says
when it was used:

- `full_ms` is the time at which the bucket would be full again if every start that was reported
  was all there was. A report of k starts, the last of them surely before l, moves it to
  max(full_ms, l) + k / rate.
- A share's `tokens` are those that were taken and not reported. Tokens may be taken while
  (full_ms - now) * rate, the tokens of all shares and the new ones are together at most `burst`,
  by the earliest that now may be.
- R1 A token is used before its share ends, by the latest that now may be.
- R2 A share that has surely ended leaves its tokens as if they had been used at its end.
- R3 A report is the number of all starts of this worker under the share, so that to report twice is
  to report once.

Why that holds: let D be the starts so far less what has flowed in since, but never less than
nothing: the promise is that D never exceeds `burst`. For the reported starts alone D is at most
(full_ms - now) * rate, in whatever order the reports come, since each is put at or after its true
moment. Every other start adds at most one, and is among the tokens of a share. So D and what may
still start together are at most `burst` when tokens are taken, and a start moves one from the
second to the first.

A definition may change at any time: what is held stays held, what was used stays used. Workers
hear of it with their next write, within 20 s; of a limit where there was none within
`ABSENT_SECONDS` (30 s), and what ran before that counts from then on.

**What a crash leaves.** Before a write: nothing. After one: a share that nobody uses, which ends
within `LEASE_SECONDS`; until then its permits and tokens are missing. A process that is only slow
stops by itself (C3, R1) before others count on it.

**What it costs.** A worker keeps permits that it uses again, so a steady load writes once every
20 s per worker and key, however many tasks run. To begin and to end are a PUT each, to wait is a
GET every 5 s and a PUT every 20 s. With a rate, a worker takes tokens about once a second at the
most, the more at once the higher the rate, and reports in the same write: up to 86,400 PUTs a day
($0.43) for a worker and key that is busy all the time. Idle workers, and keys that nobody uses,
cost nothing. One object takes about 15 swaps a second on S3, for the whole fleet: workers ask the
more rarely the more of them there are.
"""
