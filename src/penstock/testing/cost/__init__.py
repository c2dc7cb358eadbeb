"""What a queue costs: the real code, in virtual time, over a bucket whose requests are counted.

    figures = price(Workload(workers=50, tasks_per_day=100_000))
    figures.dollars_per_month, figures.start_seconds(50)

A fleet of real workers runs over one bucket in memory that answers like S3: after 20 to 40 ms,
dated to the second. It is simulated twice: with its load, and with nothing to do. What is counted
begins when the fleet has warmed up, or has been idle for an hour. The same workload gives the same
figures, on every machine.

Used by `penstock cost`, by tests, and by users who want to know before they pay.
"""

from penstock.testing.cost.bill import CAUSES, Bill, percentile
from penstock.testing.cost.load import Window, Workload, window_of
from penstock.testing.cost.report import Figures, Growth, price, price_modes, saturate
from penstock.testing.cost.runs import (
    Idle,
    Saturated,
    Steady,
    run_backlog,
    run_idle,
    run_saturated,
    run_steady,
)

__all__ = [
    "CAUSES",
    "Bill",
    "Figures",
    "Growth",
    "Idle",
    "Saturated",
    "Steady",
    "Window",
    "Workload",
    "percentile",
    "price",
    "price_modes",
    "run_backlog",
    "run_idle",
    "run_saturated",
    "run_steady",
    "saturate",
    "window_of",
]
