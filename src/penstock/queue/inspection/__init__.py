"""Reading a queue for people: tasks, statistics, recent activity, dead letters.

Called by the command line and the console. Everything here only reads; `run_monitor` is that of
`penstock.queue.maintenance`. A reading is a moment that is over: a task may move between a list
and the read that follows, and is then shown where it was found, or not at all. What cannot be
read (not ours, damaged, of a later release) stops nobody: `notes` names it, one sentence each.
The modules say how many requests they make.
"""

from __future__ import annotations

from penstock.queue.inspection.activity import QueueFollower as QueueFollower
from penstock.queue.inspection.activity import TaskHappening as TaskHappening
from penstock.queue.inspection.stats import Stats as Stats
from penstock.queue.inspection.stats import stats as stats
from penstock.queue.inspection.task_search import TaskListing as TaskListing
from penstock.queue.inspection.task_search import dead_letters as dead_letters
from penstock.queue.inspection.task_search import find_tasks as find_tasks
from penstock.queue.inspection.task_search import list_tasks as list_tasks
from penstock.queue.maintenance import MonitorPass as MonitorPass
from penstock.queue.maintenance import run_monitor as run_monitor
