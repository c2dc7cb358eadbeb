"""What people are told of an error of theirs."""

from __future__ import annotations

import pytest

from penstock.runtimes.user_code import told


def test_what_does_not_parse_is_told_by_its_error_first() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("x = = 1\n", "shop.py", "exec")
    first, *rest = told(caught.value)[0].splitlines()
    assert first.startswith("SyntaxError: ")
    assert rest[0] == '  File "shop.py", line 1'
    assert rest[1].strip() == "x = = 1"
