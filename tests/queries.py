"""Pairs of queries: edits that change comments and layout alone, and edits that change more."""

from __future__ import annotations

from typing import Final

SAME_TOKENS: Final = (
    ("SELECT k FROM raw", "SELECT k -- the key\nFROM raw"),
    ("SELECT k, v FROM raw", "SELECT k,v\n\tFROM   raw\n"),
    ("SELECT k FROM raw", "/* a /* nested */ comment */ SELECT k/**/FROM raw"),
    ("SELECT /*+ COALESCE(1) */ k FROM raw", "SELECT /*+ COALESCE( 1 )*/k FROM raw"),
    ("SELECT k FROM raw", "SELECT k -- goes on \\\nhere\nFROM raw"),
    ("SELECT '--' AS a, '/*' AS b FROM raw", "SELECT '--' AS a,'/*' AS b FROM raw -- '"),
    ("SELECT k+1 AS n FROM raw", "SELECT k + 1 AS n FROM raw"),
    ("SELECT count(*) FROM raw", "SELECT count( * ) FROM raw"),
    ("SELECT 'it''s', \"a\"\"b\", `c``d` FROM raw", "SELECT 'it''s',\"a\"\"b\" , `c``d` FROM raw"),
    ("SELECT r'\\' AS a FROM raw", "SELECT r'\\'  AS a -- '\n FROM raw"),
    ("SELECT 1.5e-3 AS n, .5 AS m FROM raw", "SELECT  1.5e-3 AS n,.5 AS m FROM raw"),
)
OTHER_TOKENS: Final = (
    ("SELECT k FROM raw", "SELECT K FROM raw"),
    ("SELECT k FROM raw", "SELECT k AS key FROM raw"),
    ("SELECT /*+ REPARTITION(2) */ k FROM raw", "SELECT k FROM raw"),
    ("SELECT '-- a' AS k FROM raw", "SELECT '-- b' AS k FROM raw"),
    ("SELECT 'a b' AS k FROM raw", "SELECT 'a  b' AS k FROM raw"),
    ("SELECT 'a''b' AS k FROM raw", "SELECT 'a' 'b' AS k FROM raw"),
    ("SELECT 1 - -1 AS k FROM raw", "SELECT 1 --1 AS k\n AS k FROM raw"),
    ("SELECT 1.5e-3 AS n FROM raw", "SELECT 1.5e - 3 AS n FROM raw"),
    ("SELECT `a b` FROM raw", "SELECT `a  b` FROM raw"),
    ("SELECT k FROM raw /* one", "SELECT k FROM raw /* other"),
    ("SELECT 1 /* a /*+ b */ AS x -- */\n FROM raw", "SELECT 1 FROM raw"),
    ("SELECT k FROM raw WHERE a < b", "SELECT k FROM raw WHERE a <= b"),
)
