"""The remarks that people have written about a month, as they were delivered: a CSV file.

    penstock trigger desk --partition 2013-01 --payload '{"file": "/path/to/2013-01.csv"}'

`penstock demo` tells of remarks that are not there, so that there is a task to mend and to replay.
"""

import csv
from datetime import date
from pathlib import Path


def take(task):
    """Read the file that the event names, and keep its rows."""
    month = date.fromisoformat(f"{task.partition_key}-01")
    file = Path(task.payload["file"])
    if not file.exists():
        raise FileNotFoundError(
            f"The remarks of {month:%B %Y} were not delivered: there is no file {file}."
        )
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    with (task.output.path / "remarks.csv").open("w", newline="") as opened:
        writer = csv.DictWriter(opened, ["day", "airport", "remark"])
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} remarks of {month:%B %Y} are taken.")
