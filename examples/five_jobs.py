"""The functions of five_jobs.yaml. Start the worker in this folder, so that it finds them.

A function is given its task: what it reads, where it may write, and which partition it is about.
It writes files, and what it has written is published when it returns. See docs/dag.md and
`penstock.runtimes.task`.
"""

import csv
import hashlib
import statistics
from pathlib import Path

SALES_AN_HOUR = 200
SHOPS = ("north", "south", "west")


def clean(task):
    """One hour of sales, without doubles and without what cannot be."""
    seen = set()
    rows = []
    for number, sale in enumerate(_heard(task.partition_key or "all")):
        if sale["id"] not in seen and float(sale["amount"]) > 0:
            seen.add(sale["id"])
            rows.append(sale)
        if number % 100 == 99:
            task.progress(sales=number + 1)
    _write(task.outputs["sales"].path / "sales.csv", rows)


def totals(task):
    """What each shop has sold."""
    sums = dict.fromkeys(SHOPS, 0.0)
    for sale in _read(task.inputs["sales"].path / "sales.csv"):
        sums[sale["shop"]] += float(sale["amount"])
    currency = task.config["currency"]
    rows = [
        {"shop": shop, "total": f"{total:.2f}", "currency": currency}
        for shop, total in sums.items()
    ]
    _write(task.outputs["totals"].path / "totals.csv", rows)


def outliers(task):
    """The sales that are far from all others."""
    sales = _read(task.inputs["sales"].path / "sales.csv")
    amounts = [float(sale["amount"]) for sale in sales]
    limit = statistics.mean(amounts) + task.config["deviations"] * statistics.pstdev(amounts)
    rows = [sale for sale in sales if float(sale["amount"]) > limit]
    _write(task.outputs["outliers"].path / "outliers.csv", rows)


def report(task):
    """A page about the hour. When one of its inputs changes, the other may not be there yet."""
    lines = [f"# Sales of {task.partition_key}", ""]
    if task.inputs["totals"].is_there:
        rows = _read(task.inputs["totals"].path / "totals.csv")
        lines += [f"- {row['shop']}: {row['total']} {row['currency']}" for row in rows]
    if task.inputs["remarks"].is_there:
        remarks = _read(task.inputs["remarks"].path / "outliers.csv")
        lines.append(f"- remarkable sales: {len(remarks)}")
    (task.outputs["report"].path / "report.md").write_text("\n".join(lines) + "\n")


def _heard(hour):
    """The sales of an hour as the tills have sent them. A real job would read them somewhere."""
    for number in range(SALES_AN_HOUR):
        digest = hashlib.sha256(f"{hour}/{number}".encode()).digest()
        cents = int.from_bytes(digest[:3], "big") % 10_000
        if digest[3] < 3:
            cents *= 20  # somebody buys a lot
        if digest[4] < 3:
            cents = -cents  # a till that was wrong
        sale = {
            "id": f"{hour}/{number}",
            "shop": SHOPS[digest[5] % len(SHOPS)],
            "amount": f"{cents / 100:.2f}",
        }
        yield sale
        if digest[6] < 10:
            yield sale  # a till that was not sure


def _read(file: Path):
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def _write(file: Path, rows):
    with file.open("w", newline="") as opened:
        fields = list(rows[0]) if rows else ["id", "shop", "amount"]
        writer = csv.DictWriter(opened, fields)
        writer.writeheader()
        writer.writerows(rows)
