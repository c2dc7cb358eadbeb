"""The page of queries: rows, a chart, an error with its place, cancelling, a download."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.window import Window

SLOW = "WITH RECURSIVE t AS (SELECT 1 a UNION ALL SELECT a + 1 FROM t) SELECT max(a) FROM t"


def test_a_query_is_typed_run_charted_and_downloaded(seen: Window) -> None:
    page = seen.page
    seen.open("/query")
    editor = page.get_by_label("SQL", exact=True)
    editor.fill("SELECT i AS n, i * i AS square, 'row <b>' || i AS name FROM range(5) t(i)")
    editor.press("Control+Enter")
    told = page.locator("[data-told]")
    # The first query starts the service.
    expect(told).to_contain_text("5 rows in", timeout=60_000)
    expect(page.locator("[data-result] tbody tr")).to_have_count(5)
    expect(page.locator("[data-result] tbody tr").last).to_contain_text("row <b>4")
    expect(page.locator("[data-chart] svg .bar")).to_have_count(5)
    expect(page.locator("[data-past] li").first).to_contain_text("range(5)")
    with page.expect_download() as got:
        page.get_by_role("button", name="Download", exact=True).click()
    assert got.value.suggested_filename == "query.csv"
    text = got.value.path().read_text()
    assert text.splitlines()[:2] == ["n,square,name", "0,0,row <b>0"]
    # A mistake is told with its place, in words and in the text.
    editor.fill("SELECT 1,\n       nope")
    page.get_by_role("button", name="Run").click()
    expect(told).to_contain_text("nope")
    expect(page.locator("[data-place]")).to_have_text(re.compile(r"line 2: +nope\n +\^"))
    assert editor.evaluate("each => each.selectionStart") == 17
    # The browser notes that it was refused, and nothing else.
    (noted,) = seen.wrong
    assert "status of 422" in noted
    seen.wrong.clear()
    editor.fill(SLOW)
    page.get_by_role("button", name="Run").click()
    expect(told).to_have_text("Running…")
    page.get_by_role("button", name="Cancel").click()
    expect(told).to_have_text("Cancelled.")
