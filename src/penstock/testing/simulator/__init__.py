"""The whole queue in one process, as a function of a seed: clients, workers, faults, and a referee.

`penstock.testing.simulator.worlds.run_world(seed, mode)` runs one world and reports the
violations. The code that runs is the real one: `Queue`, `Worker` and `Monitor`. Everything
around it is simulated: machines that crash, freeze and have wrong clocks (`machines`), a
network that loses, delays and duplicates requests, producers, cancellers, operators, and
workers that come and go (`worlds`), handlers that fail, hang and are slow (`plans`). A
referee sees every write that reaches the bucket and every start of a handler, on true time
(`referee`).

Used by `penstock sim`, and by the tests of the queue.
"""

from __future__ import annotations
