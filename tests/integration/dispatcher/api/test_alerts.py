"""`GET /v1/alerts`: what is the matter, for programs."""

from __future__ import annotations

from penstock.protocol.steering import AlertsAnswer, AlertState, NoticeState
from tests.integration.dispatcher.alerting import judge_of
from tests.integration.dispatcher.api.conftest import Perform
from tests.integration.dispatcher.api.stage import Stage, read, refused
from tests.integration.dispatcher.test_alerts import HOOK, die
from tests.integration.dispatcher.test_deployment import Pipeline


def test_alerts_are_told_with_their_notices_and_rules(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        empty = read(await stage.public.get("/v1/alerts"), AlertsAnswer)
        assert (empty.alerts, empty.rules, empty.judged_at) == ([], [], None)
        await stage.apply()
        await die(Pipeline(stage.world))
        await judge_of(stage.world, HOOK).turn()
        answer = read(await stage.public.get("/v1/alerts?state=open"), AlertsAnswer)
        (alert,) = answer.alerts
        assert (alert.rule, alert.subject, alert.state) == ("dead_tasks", "clean", AlertState.OPEN)
        (notice,) = alert.notices
        assert (notice.destination, notice.state) == ("webhook", NoticeState.DUE)
        assert notice.due_at is not None
        assert answer.destinations == ["webhook"]
        # The address of a webhook is a secret.
        assert "127.0.0.1:9" not in (await stage.public.get("/v1/alerts")).text
        over = read(await stage.public.get("/v1/alerts?state=over"), AlertsAnswer)
        assert over.alerts == []

    on_stage(story)


def test_pages_go_back_and_wrong_words_are_refused(on_stage: Perform) -> None:
    async def story(stage: Stage) -> None:
        await stage.world.rows(
            "INSERT INTO alert (rule, kind, subject, summary, path)"
            " SELECT 'r', 'k', n::text, 'so', '/x' FROM generate_series(1, 5) AS n"
        )
        first = read(await stage.public.get("/v1/alerts?limit=3"), AlertsAnswer)
        assert ([each.id for each in first.alerts], first.before) == ([5, 4, 3], 3)
        path = f"/v1/alerts?limit=3&before={first.before}"
        second = read(await stage.public.get(path), AlertsAnswer)
        assert ([each.id for each in second.alerts], second.before) == ([2, 1], None)
        for query in ("state=shut", "limit=0", "limit=1001", "before=x"):
            refused(await stage.public.get(f"/v1/alerts?{query}"), 422)

    on_stage(story)
