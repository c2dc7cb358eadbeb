"""The plots of a queue: what waits by age, what ended, and how long tasks waited to start. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.console.drawing.plots import Mark, Plot, stacked
from penstock.console.rendering import length, number
from penstock.queue.inspection.ended import OUTCOMES, Minute
from penstock.queue.inspection.figures import AgeStats


def ages_plot(ages: Sequence[AgeStats]) -> Plot:
    """What is ready and what is in progress, by how long ago it was submitted or due."""
    names = [_age_name(ages, place) for place in range(len(ages))]
    places = [
        (name, {"waiting": float(each.ready), "running": float(each.in_progress)})
        for name, each in zip(names, ages, strict=True)
    ]
    said = [
        f"{name}: {number(each.ready)} waiting and {number(each.in_progress)} in progress"
        for name, each in zip(names, ages, strict=True)
        if each.ready or each.in_progress
    ]
    told = f"By age. {'; '.join(said) or 'Nothing waits and nothing runs'}."
    drawn = stacked(places, told=told, series=("waiting", "running"))
    # They are few: each has its name.
    width = (drawn.width - drawn.left) / len(names)
    marks = [Mark(drawn.left + (at + 0.5) * width, name) for at, name in enumerate(names)]
    return replace(drawn, marks=marks)


def ended_plot(minutes: Sequence[Minute]) -> Plot:
    """What has settled, minute by minute."""
    places = [
        (_ago(minutes, place), {what: float(count) for what, count in each.outcomes})
        for place, each in enumerate(minutes)
    ]
    sums = {
        name: sum(count for each in minutes for what, count in each.outcomes if what == name)
        for name in OUTCOMES
    }
    shown = tuple(name for name in OUTCOMES if sums[name]) or OUTCOMES[:1]
    said = ", ".join(f"{number(sums[name])} {name}" for name in shown if sums[name])
    told = f"Ended in the last hour: {said}."
    if not said:
        told = "Nothing has ended in the last hour, as far as is known."
    return stacked(places, told=told, series=shown)


def starts_plot(minutes: Sequence[Minute], *, told: str) -> Plot:
    """How long those had waited that started, minute by minute."""
    places = [
        (
            _ago(minutes, place),
            {"half": each.median_seconds, "most": each.most_seconds - each.median_seconds},
        )
        for place, each in enumerate(minutes)
    ]
    drawn = stacked(places, told=told, series=("half", "most"))
    said = {label: _waited(label, each) for (label, _), each in zip(places, minutes, strict=True)}
    bars = [replace(bar, told=said[bar.told.partition(": ")[0]]) for bar in drawn.bars]
    return replace(drawn, bars=bars)


def _waited(label: str, each: Minute) -> str:
    median, most = length(each.median_seconds), length(each.most_seconds)
    return f"{label}: {number(each.starts)} started, half within {median}, 19 of 20 within {most}"


def _ago(minutes: Sequence[Minute], place: int) -> str:
    ago = len(minutes) - 1 - place
    return f"{ago} min ago" if ago else "now"


def _age_name(ages: Sequence[AgeStats], place: int) -> str:
    below = ages[place].below_seconds
    if below is None:
        return f"over {length(ages[place - 1].below_seconds)}"
    return f"< {length(below)}"
