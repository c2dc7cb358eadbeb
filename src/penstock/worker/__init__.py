"""The pipeline worker: waits for wake-ups, claims tasks, runs them, and reports how they ended.

| module | owns |
|---|---|
| `worker` | the life of a worker: start, drain, stop; the pruner of old attempt logs |
| `claim_scheduler` | which operator to claim for next, hellos, wake-ups |
| `executor` | the attempts that run here, from claim to reported end |
| `attempt` | one attempt: time limit, interruption, outcome |
| `assignment_codec` | the dispatcher's assignment as work, and results as completions |
| `sandbox` | folder, user, token and credentials of an attempt |
| `secrets` | the values of a job's secrets |
| `heartbeat_sender` | leases, cancellations, new tokens |
| `reporter` | events and progress of running work, and completions |
| `recovery` | the journal of held attempts, and the ends of those of a killed worker |
| `client` | calls to the dispatcher's internal API: HTTP, failover, backoff |
| `settings` | what can be set |
"""

from __future__ import annotations
