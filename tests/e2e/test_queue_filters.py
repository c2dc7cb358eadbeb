"""`penstock queue` with tags, options of submit, `tail` and `reshard`, as people type them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.test_queue_command import User


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


def test_tags_are_submitted_shown_filtered_and_cancelled_by(user: User) -> None:
    words = ("--tag", "env=prod", "--tag", "team=a=b", "--priority", "3", "--limit", "api")
    prod = user.said("submit", "resize", "1", *words, "--expires", "600").strip()
    test = user.said("submit", "resize", "2", "--tag", "env=test").strip()
    bare = user.said("submit", "resize", "3").strip()
    shown = user.said("get", prod)
    for line in (
        "priority   3\n",
        "limit      api\n",
        "tags       env=prod team=a=b\n",
        "expires  ",
    ):
        assert line in shown
    assert user.json("get", prod)["tags"] == {"env": "prod", "team": "a=b"}
    for forms, ids in (
        (["env=prod"], {prod}),
        (["env!=prod"], {test, bare}),
        (["env"], {prod, test}),
        (["env", "team=a=b"], {prod}),
    ):
        given = [word for form in forms for word in ("--tag", form)]
        assert {task["id"] for task in user.json("list", *given)["tasks"]} == ids
    assert f"{test}  cancelled" in user.said("cancel", "--tag", "env=test")
    assert user.json("get", test)["status"] == "cancelled"
    assert user.json("get", prod)["status"] == user.json("get", bare)["status"] == "ready"


def test_a_tag_that_nobody_has_is_named_and_never_means_everything(user: User) -> None:
    user.said("submit", "resize", "--tag", "env=prod")
    listed = user.here("list", "--tag", "evn=prod")
    assert listed.returncode == 0
    assert "no task in sight has a tag 'evn'; is 'env' meant?" in listed.stderr
    for words, which in (
        (("cancel",), "that can be cancelled"),
        (("replay", "--failed"), "that has failed"),
    ):
        ran = user.here(*words, "--tag", "evn!=prod")
        assert ran.returncode == 2
        assert f"no task {which} has a tag 'evn'" in ran.stderr
    assert user.json("list")["tasks"][0]["status"] == "ready"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("list", "--tag", "env~prod"), "'env~prod' is not a tag filter."),
        (("list", "--tag", "env==prod"), "'env==prod' has one '=' too many."),
        (("submit", "resize", "--tag", "env==prod"), "Write env=prod."),
        (("cancel", "--tag", "=x"), "'=x' is not a tag filter."),
        (("cancel",), "Name the tasks to cancel by their ids, or by --type and --tag."),
        (
            ("cancel", "x", "--tag", "a"),
            "Name the tasks to cancel by their ids, or by --type and --tag.",
        ),
        (("replay", "x", "--tag", "a"), "--tag goes with --failed."),
        (("submit", "t", "--tag", "x"), "'x' is not a tag."),
        (("submit", "t", "--tag", "x=1", "--tag", "x=2"), "The tag 'x' is given twice."),
        (("submit", "t", "--tag", "a b=1"), "'a b' is not the name of a tag."),
        (("submit", "t", "--at", "noon"), "'noon' is not a time."),
        (("submit", "t", "--at", "2030-01-01"), "does not say its zone."),
        (("submit", "t", "--at", "2999-01-31T06:00Z"), "2999-01-31T06:00:00+00:00 is more than a"),
        (("submit", "t", "--delay", "1e9"), "from 0 to 31,622,400."),
        (
            ("schedule", "add", "n", "--cron", "x"),
            "--cron: CRON is given without a name.\n  Write penstock queue schedule add NAME",
        ),
        (("submit", "t", "--expires", "0"), "A task cannot expire after 0.0 s"),
        (("tail", "--tag", "~"), "'~' is not a tag filter."),
        (("reshard", "--shards", "5"), "A queue cannot have 5 shards."),
    ],
)
def test_bad_words_are_told_in_one_sentence(words: tuple[str, ...], said: str, user: User) -> None:
    user.said("submit", "other")
    ran = user.here(*words)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert [task["type"] for task in user.json("list")["tasks"]] == ["other"]


def test_tail_tells_what_happens_and_ends_on_a_signal(user: User) -> None:
    user.said("submit", "resize", "--tag", "env=old")
    following = user.start("tail", "--every", "0.1", "--json", "--tag", "env=new")
    try:
        assert following.stderr is not None
        assert following.stderr.readline().startswith("Following 'default'")
        task = user.said("submit", "resize", "--tag", "env=new").strip()
        user.said("cancel", "--tag", "env=new")
        assert following.stdout is not None
        told = [json.loads(following.stdout.readline()) for _ in range(2)]
        assert [(each["what"], each["id"]) for each in told] == [
            ("submitted", task),
            ("cancelled", task),
        ]
        assert told[0]["at"].endswith("Z")
        following.send_signal(signal.SIGINT)
        rest, errors = following.communicate(timeout=60)
        assert (following.returncode, rest, errors) == (0, "", "")
    finally:
        following.kill()
        following.wait()


def test_reshard_says_what_was_and_what_is(user: User) -> None:
    user.said("submit", "resize")
    said = user.said("reshard", "--shards", "128")
    assert "has 128 shards now; before it had 64. Workers move to them within 100 s;" in said
    assert "has 128 shards already." in user.said("reshard", "--shards", "128")
    again = user.json("reshard", "--shards", "32")
    assert again == {"before": 128, "shards": 32, "era": 2}
    assert user.json("stats")["shards"] == 32
