"""The tokens of a query, as Spark's lexer cuts them: what comments and layout leave of it. Pure.

Called where a DAG is applied, to find that an edit defines nothing new, and where a query is run,
so that nothing that follows from its text follows from its comments.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

_SQL_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|--(?:\\\r?\n|[^\r\n])*)
    | (?P<comment>/\*(?!\+))
    | [rR]'[^']*' | [rR]"[^"]*"
    | '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | `(?:[^`]|``)*`
    | \d+(?:\.\d*)?(?:[eE][+-]?\d+)?\w* | \.\d+(?:[eE][+-]?\d+)?\w* | \w+
    | /\*\+ | \*/ | [<>=!|&^~:+*/%@\#$?-]+? (?=\s|--|/\*|\*/|[^<>=!|&^~:+*/%@\#$?-]|$)
    | [^'"`]""",
    re.DOTALL | re.VERBOSE,
)
"""What Spark's lexer cuts a query into, and runs of operators as one: `a=-1` is not `a = -1`, which
only means that such an edit counts. A quote that is not closed matches nothing."""
_COMMENT_EDGE: Final = re.compile(r"/\*(?!\+)|\*/")


@lru_cache(maxsize=1024)
def sql_tokens(sql: str) -> tuple[str, ...] | None:
    """The tokens of a query without its comments, of which hints are none.

    None if a quote or a comment is not closed.
    """
    tokens: list[str] = []
    at = 0
    while at < len(sql):
        found = _SQL_TOKEN.match(sql, at)
        if found is None:
            return None
        at = found.end()
        if found["comment"]:
            depth = 1
            while depth:
                edge = _COMMENT_EDGE.search(sql, at)
                if edge is None:
                    return None
                depth += 1 if edge[0] == "/*" else -1
                at = edge.end()
        elif not found["space"]:
            tokens.append(found[0])
    return tuple(tokens)
