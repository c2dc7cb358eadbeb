"""The map of shards: a cell for each, whoever holds it, and words for all of it."""

from __future__ import annotations

from penstock.console.charts import SHARD_CELLS_MAX, letter_of, runs_of, shard_map


def test_every_shard_has_a_cell_with_its_holder_and_its_tasks() -> None:
    drawn = shard_map({"bob": range(2, 4), "ada": (0,)}, [5, 0, 1, 0])
    assert [(each.name, each.letter, each.runs) for each in drawn.holders] == [
        ("ada", "A", "0"),
        ("bob", "B", "2\N{EN DASH}3"),
    ]
    holders = [each.holder.letter if each.holder else "" for each in drawn.cells]
    assert holders == ["A", "", "B", "B"]
    assert [each.told for each in drawn.cells][:3] == [
        "Shard 0, owned by ada, 5 tasks unsettled",
        "Shard 1, unowned, 0 tasks unsettled",
        "Shard 2, owned by bob, 1 task unsettled",
    ]
    assert drawn.told == "4 shards, 2 owners, 1 shards unowned"


def test_of_a_shard_that_moves_one_holder_is_shown() -> None:
    drawn = shard_map({"bob": (0,), "ada": (0,)}, [0])
    assert [each.holder_told for each in drawn.cells] == ["ada"]


def test_many_shards_share_cells_and_say_so() -> None:
    drawn = shard_map({"ada": range(8), "bob": range(24, 40)}, [1] * 4096)
    assert len(drawn.cells) == SHARD_CELLS_MAX
    assert drawn.shards_a_cell == 16
    assert drawn.cells[0].told == ("Shards 0\N{EN DASH}15, owned by several, 16 tasks unsettled")
    assert drawn.cells[2].holder_told == "several"
    assert drawn.cells[3].holder_told == "nobody"
    assert sum(each.tasks for each in drawn.cells) == 4096


def test_letters_do_not_end_with_the_alphabet() -> None:
    assert [letter_of(each) for each in (0, 25, 26, 51, 52, 702)] == [
        "A",
        "Z",
        "AA",
        "AZ",
        "BA",
        "AAA",
    ]


def test_runs_are_written_short() -> None:
    assert runs_of([]) == ""
    assert runs_of([3, 1, 2, 7, 9, 10]) == "1\N{EN DASH}3, 7, 9\N{EN DASH}10"
