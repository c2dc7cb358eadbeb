"""What somebody who looks into a queue wants to know: its tasks, its figures, its dead letters.

Called by the command line and by a console. Everything here only reads, except `run_monitor`,
which does what `penstock.queue.monitor` does. What is seen is a moment that is over: a task may
move between a list and the read that follows it, and is then shown where it was found, or not at
all. What cannot be read (not ours, damaged, of a later release) stops nobody: it is named in
`notes`, one sentence each, and left out. The modules say how many requests they make.
"""

from penstock.queue.inspection.alone import MonitorPass as MonitorPass
from penstock.queue.inspection.alone import run_monitor as run_monitor
from penstock.queue.inspection.figures import Stats as Stats
from penstock.queue.inspection.figures import stats as stats
from penstock.queue.inspection.following import Follower as Follower
from penstock.queue.inspection.following import Happened as Happened
from penstock.queue.inspection.tasks import Listing as Listing
from penstock.queue.inspection.tasks import dead_letters as dead_letters
from penstock.queue.inspection.tasks import find_tasks as find_tasks
from penstock.queue.inspection.tasks import list_tasks as list_tasks
