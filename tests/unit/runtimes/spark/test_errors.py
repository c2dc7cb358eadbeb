"""Spark's errors as sentences: the real texts of Spark, without a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pickle import PicklingError

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException

from penstock.kernel.errors import Damaged, Unavailable, WorkFailed
from penstock.runtimes.spark.errors import failed, is_too_large, why_jvm_ended
from penstock.runtimes.spark.job_config import JobConfig

SQL = JobConfig(operator="spark.sql", sql="SELECT a,\n  b\nFROM raw", sql_file="clean.sql")


SYNTAX = """
[PARSE_SYNTAX_ERROR] Syntax error at or near 'id'. SQLSTATE: 42601 (line 2, pos 5)

== SQL ==
SELECT id
-----^^^
"""
COLUMN = """[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `b` cannot be resolved.\
 Did you mean one of the following? [`a`]. SQLSTATE: 42703; line 2 pos 2;
'Project [id#0L]
+- Range (0, 10)
"""
LOST = """Job aborted due to stage failure: Task 0 in stage 2.0 failed 1 times, most recent\
 failure: Lost task 0.0: ExecutorLostFailure (executor 1 exited)
Driver stacktrace:
"""
BOOM = "[USER_RAISED_EXCEPTION] boom SQLSTATE: P0001"
NO_COLUMN = """clean.sql, line 2 (b): A column with name `b` cannot be resolved.\
 Did you mean one of the following? [`a`]. [UNRESOLVED_COLUMN.WITH_SUGGESTION]"""
NO_SYNTAX = "clean.sql, line 2 (b): Syntax error at or near 'id'. [PARSE_SYNTAX_ERROR]"


class Said(PySparkException):
    """An error with just these words, and neither a condition nor a state of its own."""

    def __init__(self, words: str, trace: str = "") -> None:
        super().__init__(words)
        self._words = words
        self._stackTrace = trace

    def __str__(self) -> str:
        return self._words


class Thrown(Py4JError):  # type: ignore[misc]  # py4j has no types
    """An error of the JVM that PySpark has no class for."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words = words

    def __str__(self) -> str:
        return self.words


Thrown.__module__ = Py4JError.__module__


@pytest.mark.parametrize(
    ("words", "reason", "is_retried"),
    [
        (SYNTAX, NO_SYNTAX, False),
        (COLUMN, NO_COLUMN, False),
        (BOOM, "clean.sql: boom. [USER_RAISED_EXCEPTION]", False),
        (LOST, "clean.sql: Lost task 0.0: ExecutorLostFailure (executor 1 exited).", True),
    ],
)
def test_sparks_words_become_a_sentence(words: str, reason: str, is_retried: bool) -> None:
    found = failed(Said(words), SQL)
    assert found.reason == reason
    assert found.is_retried is is_retried


WAITED = (
    "An error occurred while calling o1.getResult.\n"
    ": org.apache.spark.SparkException: Exception thrown in awaitResult: \n"
    "\tat org.apache.spark.util.SparkThreadUtils$.awaitResult(SparkThreadUtils.scala:70)\n"
)
UNREAD = (
    "Caused by: org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while"
    " reading file file:///data/part-0.parquet.  SQLSTATE: KD001\n\tat org.apache.X.y(X.scala)\n"
)
DAMAGED = (
    "Caused by: java.lang.RuntimeException: file:/data/part-0.parquet is not a Parquet file."
    " Expected magic number at tail, but found [120]\n\tat org.apache.X.y(X.scala)\n\t... 9 more\n"
)
RAISED = (
    "Caused by: org.apache.spark.SparkRuntimeException: [USER_RAISED_EXCEPTION] The result has rows"
    " whose _partition is 'null' SQLSTATE: P0001\n\tat org.apache.X.y(X.scala:1)\n"
)
MEMORY = (
    "Caused by: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage"
    " 6.0 failed 4 times, most recent failure: Lost task 1.0 (TID 8): "
    "java.lang.OutOfMemoryError: Java heap space\n\tat java.util.X.y(X.java:1)\n"
    "\nDriver stacktrace:\n\tat org.apache.X.y(X.scala:1)\n"
    "Caused by: java.lang.OutOfMemoryError: Java heap space\n\tat java.util.X.y(X.java:1)\n"
)
DIED = (
    "Caused by: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage"
    " 0.0 failed 1 times, most recent failure: Lost task 0.0 (TID 0): org.apache.spark"
    ".SparkException: Python worker exited unexpectedly (crashed).\n\tat org.apache.X.y(X.scala)\n"
    "Caused by: java.io.EOFException\n\tat java.base/java.io.X.y(X.java:1)\n"
)
NULL = (
    "Caused by: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage"
    " 6.0 failed 1 times, most recent failure: Lost task 1.0 (TID 8):"
    " java.lang.NullPointerException\n\tat java.util.X.y(X.java:1)\n\nDriver stacktrace:\n"
    "Caused by: java.lang.NullPointerException\n\tat java.util.X.y(X.java:1)\n"
)


@pytest.mark.parametrize(
    ("trace", "reason", "is_retried"),
    [
        (
            UNREAD + DAMAGED,
            (
                "Encountered error while reading file file:///data/part-0.parquet."
                " [FAILED_READ_FILE.NO_HINT] file:/data/part-0.parquet is not a Parquet file."
                " Expected magic number at tail, but found [120]."
            ),
            True,
        ),
        (
            RAISED,
            "The result has rows whose _partition is 'null'. [USER_RAISED_EXCEPTION]",
            False,
        ),
        (
            MEMORY,
            (
                "Spark failed: Spark ran out of memory: give the JVM more by driver_memory, or"
                " executors of a cluster by spark.executor.memory, or this job alone by its"
                " resources.memory."
            ),
            True,
        ),
        (NULL, "Spark failed: NullPointerException.", True),
        (
            DIED,
            (
                "Spark failed: A Python worker of Spark died while it ran a function of the job:"
                " the function ended its process, it crashed, or it was killed because the machine"
                " was short of memory."
            ),
            True,
        ),
    ],
)
def test_what_somebody_waited_for_is_told_by_its_cause(
    trace: str, reason: str, is_retried: bool
) -> None:
    found = failed(Thrown(WAITED + trace))
    assert found.reason == reason
    assert found.is_retried is is_retried


def test_a_plan_that_is_too_deep_is_told_as_that() -> None:
    thrown = (
        "An error occurred while calling o1.select.\n: java.lang.StackOverflowError\n\tat X.y\n"
    )
    assert "The plan is nested too deeply" in failed(Thrown(thrown)).reason


def test_times_that_spark_cannot_read_are_told_with_what_to_do() -> None:
    for said in (
        "[PARQUET_TYPE_ILLEGAL] Illegal Parquet type: INT64 (TIMESTAMP(NANOS,false)).",
        (
            "[FAILED_READ_FILE.PARQUET_COLUMN_DATA_TYPE_MISMATCH] Encountered error while reading"
            " file f. Data type mismatches when reading Parquet column [at]. Expected Spark type"
            " timestamp_ntz, actual Parquet type INT64."
        ),
    ):
        assert failed(Said(f"{said} SQLSTATE: 42846")).reason.endswith("coerce_timestamps='us').")


def test_the_root_of_an_error_with_a_condition_is_told_behind_it() -> None:
    said = "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file f. SQLSTATE: KD001"
    error = Said(said, f"org.apache.spark.SparkException: {said}\n\tat X\n{DAMAGED}")
    assert failed(error).reason == (
        "Encountered error while reading file f. [FAILED_READ_FILE.NO_HINT]"
        " file:/data/part-0.parquet is not a Parquet file. Expected magic number at tail, but found"
        " [120]."
    )


def test_what_python_raised_on_an_executor_comes_first() -> None:
    words = (
        "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
        '  File "jobs/x1.py", line 30, in bad\n    raise ValueError("oh no")\n'
        "    ^^^^^^^^^^^\nValueError: oh no\n SQLSTATE: 38000"
    )
    found = failed(Said(words))
    assert found.reason.splitlines() == [
        "ValueError: oh no",
        '  File "jobs/x1.py", line 30, in bad',
        '    raise ValueError("oh no")',
    ]
    assert found.is_retried


def test_our_own_errors_keep_their_words() -> None:
    assert failed(WorkFailed("No.", is_retried=False)).is_retried is False
    damaged = failed(Damaged("Broken.", location="x", hint="Make it again."))
    assert (damaged.reason, damaged.is_retried) == ("Broken. Make it again.", False)
    assert failed(Unavailable("Away.")).is_retried
    assert failed(Py4JNetworkError("Answer from Java side is empty")).reason == (
        "Spark failed: Answer from Java side is empty"
    )


def test_a_result_that_does_not_fit_is_known() -> None:
    words = "Total size of serialized results is bigger than spark.driver.maxResultSize (1.0 GiB)"
    assert is_too_large(Said(words))
    assert not is_too_large(Said("other"))


def test_what_executors_lack_is_told_without_sparks_own_trace() -> None:
    trace = '  File "pyspark/worker.py", line 75, in read_command\n    loads(file)\n'
    said = f"Traceback (most recent call last):\n{trace}ModuleNotFoundError: No module named 'm'\n"
    found = failed(Said(f"Job aborted: {said} SQLSTATE: 38000\n\tat org.apache"))
    assert found.reason.startswith("ModuleNotFoundError: No module named 'm'. Executors have no")
    assert "worker.py" not in found.reason
    assert found.is_retried
    locked = failed(PicklingError("Could not serialize object: cannot pickle '_thread.lock'"))
    assert locked.reason.endswith("cannot pickle '_thread.lock'")
    assert not locked.is_retried


def test_what_is_passed_on_is_not_where_it_failed() -> None:
    @contextmanager
    def around() -> Iterator[None]:
        try:
            yield
        except TypeError as error:
            raise ValueError("mine") from error

    with pytest.raises(ValueError, match="mine") as raised, around():
        raise TypeError
    said = failed(raised.value).reason
    assert said.startswith("ValueError: mine")
    assert "contextlib" not in said


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (None, "does not answer any more"),
        (3, "ran out of memory: its heap is 2g"),
        # Of Spark, whose buffers for Arrow and for the network are not in the heap.
        (52, "ran out of memory: its heap is 2g"),
        (-9, "was killed by signal 9"),
        (1, "ended with exit code 1; its log says why"),
    ],
)
def test_the_exit_code_of_a_jvm_says_why_it_ended(code: int | None, said: str) -> None:
    assert said in why_jvm_ended(code, memory="2g")
