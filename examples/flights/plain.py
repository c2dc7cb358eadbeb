"""The pipeline of flights.yaml as one script of bare PySpark, without Penstock.

    python examples/flights/plain.py --days 31 --to /tmp/flights

It computes the same datasets from the same SQL, in the order that a person has written down, and
keeps each as Parquet by day or month. It is what the results of the pipeline are compared with, and
what its speed is measured against. What it does not do: run for the days that are new, go on after
something has died, publish a day as a whole or not at all.
"""

import argparse
from datetime import date, timedelta
from pathlib import Path

import flights
import pyarrow as pa
from pyspark.sql import SparkSession

HERE = Path(__file__).resolve().parent
FIRST_DAY = date(2013, 1, 1)

# Each day's datasets and the SQL that makes them, in an order that works.
DAILY = {
    "flights": "clean.sql",
    "observed": "join_weather.sql",
    "carrier_days": "carrier_days.sql",
    "airport_days": "airport_days.sql",
}
CARRIER_MONTHS = """
SELECT
  substring(_partition, 1, 7) AS _partition, carrier, airline,
  date_format(min(day), 'yyyy-MM') AS month,
  count(DISTINCT day) AS days, sum(flights) AS flights, sum(cancelled) AS cancelled,
  sum(late) AS late, sum(delay_minutes) AS delay_minutes, sum(distance_miles) AS distance_miles,
  sum(known_seats) AS known_seats
FROM carrier_days
GROUP BY ALL
"""
AIRPORT_MONTHS = """
SELECT
  substring(_partition, 1, 7) AS _partition, origin, airport, hour, is_wet,
  date_format(min(day), 'yyyy-MM') AS month,
  sum(flights) AS flights, sum(cancelled) AS cancelled, sum(late) AS late,
  sum(delay_minutes) AS delay_minutes
FROM airport_days
GROUP BY ALL
"""


def days_of(count):
    """The first days of 2013, as partitions are called."""
    return [str(FIRST_DAY + timedelta(days=each)) for each in range(count)]


def compute_references(session, folder):
    """Keep the small tables below the folder, a folder each."""
    for name, table in flights.references().items():
        session.createDataFrame(table).write.parquet(f"{folder}/{name}")
        session.read.parquet(f"{folder}/{name}").createOrReplaceTempView(name)


def compute_days(session, days, folder):
    """Compute every dataset of these days and keep it below the folder, a folder each."""
    for name in ("flights", "weather"):
        tables = [flights.labelled(flights.recorded(name, day), day) for day in days]
        _keep(session, session.createDataFrame(pa.concat_tables(tables)), f"raw_{name}", folder)
    for name, file in DAILY.items():
        _keep(session, session.sql((HERE / file).read_text()), name, folder)
    # A month is made when all of its days are there.
    whole = [day[:7] for day in days if _is_last_of_month(day)]
    for name, text in (("carrier_months", CARRIER_MONTHS), ("airport_months", AIRPORT_MONTHS)):
        made = session.sql(text)
        _keep(session, made.where(made["_partition"].isin(whole)), name, folder)


def _keep(session, frame, name, folder):
    """Write a dataset by its partitions, and let what follows read what was written."""
    frame.write.partitionBy("_partition").parquet(f"{folder}/{name}")
    read = session.read.schema(frame.schema).parquet(f"{folder}/{name}")
    read.createOrReplaceTempView(name)


def _is_last_of_month(day):
    return (date.fromisoformat(day) + timedelta(days=1)).day == 1


def open_session(settings=None):
    """A session with these settings of Spark's; by default as the pipeline's are."""
    builder = SparkSession.builder.master("local[*]").appName("flights")
    for name, value in (settings or DEFAULTS).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}


def main():
    """Read the words, compute, and say how much there is of each dataset."""
    words = argparse.ArgumentParser(description="The flights of 2013, in bare PySpark.")
    words.add_argument("--days", type=int, default=31, choices=range(1, 366), metavar="N")
    words.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    asked = words.parse_args()
    session = open_session()
    compute_references(session, asked.to)
    compute_days(session, days_of(asked.days), asked.to)
    for folder in sorted(asked.to.iterdir()):
        print(f"{folder.name:<16} {session.read.parquet(str(folder)).count():>8} rows")
    session.stop()


if __name__ == "__main__":
    main()
