"""The whole queue in one process, as a function of a seed: people, workers, faults, and a referee.

`penstock.testing.simulator.worlds.run_world(seed, mode)` runs one world and tells what was wrong
with it. The code that runs is the real one: `Queue`, `Worker` and `Monitor`. What is simulated is
everything around it: machines that crash, freeze and have wrong clocks (`machines`), a network that
loses, delays and doubles requests, producers, cancellers and operators (`people`), workers that
come and go (`fleet`), handlers that fail, hang and dawdle (`deeds`). A referee sees every write
that reaches the bucket and every start of a handler, on true time (`referee`, `ownership`).

Used by `penstock sim`, and by the tests of the queue.
"""
