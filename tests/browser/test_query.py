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
    # What was run before is a click away, and so are names: quoted where that is needed.
    editor.fill("SELECT count(*) FROM ")
    editor.press("End")
    datasets = page.get_by_role("region", name="Datasets")
    one = datasets.locator("details").first
    one.locator("summary").click()
    name = one.locator("summary").inner_text()
    one.get_by_role("button", name=f"Insert {name}").click()
    quoted = name if re.fullmatch("[a-z_][a-z0-9_]*", name) else f'"{name}"'
    expect(editor).to_have_value(f"SELECT count(*) FROM {quoted}")
    page.locator("[data-past] button").first.click()
    expect(editor).to_have_value(re.compile(r"range\(5\)"))
    page.get_by_role("button", name="Explain").click()
    expect(told).to_have_text("How it would be run:")
    expect(page.locator("[data-place]")).to_contain_text("RANGE")
    expect(page.locator("[data-result]")).to_be_hidden()
    # As of a time before there was anything.
    editor.fill(f"SELECT count(*) FROM {quoted}")
    page.get_by_label("As of: a time or the id of a snapshot").fill("2001-02-03")
    page.get_by_role("button", name="Run").click()
    expect(told).to_contain_text("no snapshot as old as 2001-02-03")
    page.get_by_label("As of: a time or the id of a snapshot").fill("")
    editor.fill("SELECT 7 AS n")
    for form, starts in {"jsonl": b'{"n":7}', "parquet": b"PAR1", "arrow": b"\xff\xff"}.items():
        page.get_by_label("Format of the download").select_option(form)
        with page.expect_download() as got:
            page.get_by_role("button", name="Download", exact=True).click()
        assert got.value.suggested_filename == f"query.{form}"
        assert got.value.path().read_bytes().startswith(starts)
    (noted,) = seen.wrong
    assert "status of 422" in noted
    seen.wrong.clear()
    # A mistake is told with its place, in words and in the text.
    editor.fill("SELECT 1,\n       nope")
    page.get_by_role("button", name="Run").click()
    expect(told).to_contain_text("nope")
    expect(page.locator("[data-place]")).to_have_text(re.compile(r"line 2: +nope\n +\^"))
    assert editor.evaluate("each => each.selectionStart") == 17
    # Characters that are two in the browser, or many bytes, move the mark nowhere.
    editor.fill("SELECT '😀é', nope")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("[data-place]")).to_have_text(
        "line 1: SELECT '😀é', nope\n" + " " * 21 + "^"
    )
    assert editor.evaluate("each => each.value.slice(each.selectionStart)") == "nope"
    (noted,) = {*seen.wrong}
    assert "status of 422" in noted
    seen.wrong.clear()
    # No number is rounded by the browser, and what is none is told and not drawn.
    editor.fill(
        "SELECT 9007199254740993 + i AS n, 12345678901234567890.12 + i AS d, CASE i WHEN 1 THEN"
        " 'inf'::DOUBLE ELSE i END AS f FROM range(3) t(i)"
    )
    page.get_by_role("button", name="Run").click()
    expect(page.locator("[data-result] tbody tr").first).to_have_text(
        "900719925474099312345678901234567890.120"
    )
    expect(page.locator("[data-result] tbody tr").nth(1)).to_contain_text("Infinity")
    page.locator("[data-y]").select_option("2")
    expect(page.locator("[data-chart] svg .bar")).to_have_count(2)
    editor.fill("SELECT 1,\n       nope")
    page.get_by_role("button", name="Run").click()
    expect(told).to_contain_text("nope")
    # The browser notes that it was refused, and nothing else.
    (noted,) = seen.wrong
    assert "status of 422" in noted
    seen.wrong.clear()
    editor.fill(SLOW)
    page.get_by_role("button", name="Run").click()
    expect(told).to_have_text("Running…")
    page.get_by_role("button", name="Cancel").click()
    expect(told).to_have_text("Cancelled.")
