"""Counters as Prometheus reads them, and that their labels have a bound."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from penstock.dispatcher import metrics as module
from penstock.dispatcher.metrics import OTHERS, Counters
from penstock.dispatcher.tasks.model import AttemptMeasure
from penstock.kernel.prometheus import exposed

_LABEL = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*"'
_SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (\S+)")


def parse(text: str) -> dict[str, dict[str, float]]:
    """The samples of each family; as strict as the format is, and Prometheus' own parser."""
    assert text.endswith("\n")
    families: dict[str, dict[str, float]] = {}
    kinds: dict[str, str] = {}
    name, helped = "", ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped = line.split(" ", 3)[2]
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == helped
            assert name not in families, "a family is told once, in one piece"
            assert kind in ("gauge", "counter", "histogram")
            assert (kind == "counter") == name.endswith("_total")
            families[name], kinds[name] = {}, kind
        else:
            found = _SAMPLE.fullmatch(line)
            assert found is not None, line
            endings = ("_bucket", "_sum", "_count") if kinds[name] == "histogram" else ("",)
            assert found[1] in [name + each for each in endings], line
            assert line.rpartition(" ")[0] not in families[name]
            families[name][line.rpartition(" ")[0]] = float(found[3])
    for each, kind in kinds.items():
        if kind == "histogram":
            _check_histogram(each, families[each])
    return families


def _check_histogram(name: str, samples: dict[str, float]) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for key, value in samples.items():
        if key.startswith(f"{name}_bucket"):
            edge = re.search(r'le="([^"]+)"', key)
            assert edge is not None
            labels = re.sub(r',?le="[^"]+"', "", key).removeprefix(f"{name}_bucket")
            series.setdefault(labels, []).append((float(edge[1]), value))
    for labels, buckets in series.items():
        assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(buckets))
        assert buckets[-1] == (float("inf"), samples[f"{name}_count{labels}"])
        assert f"{name}_sum{labels}" in samples


def _ended(job: str, outcome: str = "completed", seconds: float = 2.0) -> AttemptMeasure:
    return AttemptMeasure(
        job=job, outcome=outcome, seconds=seconds, published_bytes=100, published_rows=7
    )


def test_what_a_scrape_is_told() -> None:
    counters = Counters()
    assert all(not samples for samples in parse(exposed(counters.families())).values())
    counters.note_ended([_ended('a"b\\\n'), _ended("b", "failed"), _ended("b", seconds=1e9)])
    for status in (200, 207, 503):
        counters.note_call(
            listener="internal", method="POST", path="/v1/task/{id}", status=status, seconds=0.01
        )
    counters.note_call(listener="internal", method="", path="", status=404, seconds=0)
    told = parse(exposed(counters.families()))
    assert told["penstock_attempts_total"] == {
        'penstock_attempts_total{job="a\\"b\\\\\\n",outcome="completed"}': 1,
        'penstock_attempts_total{job="b",outcome="completed"}': 1,
        'penstock_attempts_total{job="b",outcome="failed"}': 1,
    }
    assert told["penstock_published_bytes_total"]['penstock_published_bytes_total{job="b"}'] == 200
    ran = told["penstock_attempt_seconds"]
    assert ran['penstock_attempt_seconds_bucket{job="b",le="14400"}'] == 1
    assert ran['penstock_attempt_seconds_count{job="b"}'] == 2
    asked = told["penstock_http_requests_total"]
    where = 'listener="internal",method="POST",path="/v1/task/{id}"'
    assert asked[f'penstock_http_requests_total{{{where},status="2xx"}}'] == 2
    assert asked[f'penstock_http_requests_total{{{where},status="5xx"}}'] == 1
    took = told["penstock_http_request_seconds"]
    # A value that is a bound counts as within it.
    assert took[f'penstock_http_request_seconds_bucket{{{where},le="0.01"}}'] == 3
    assert took[f'penstock_http_request_seconds_bucket{{{where},le="0.005"}}'] == 0


def test_jobs_that_come_and_go_do_not_make_labels_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "JOBS_MAX", 2)
    counters = Counters()
    counters.note_ended([_ended(each) for each in ("a", "b", "c", "d", "a")])
    told = parse(exposed(counters.families()))["penstock_attempts_total"]
    assert list(told.values()) == [2, 2, 1]
    assert any(f'job="{OTHERS}"' in each for each in told)
