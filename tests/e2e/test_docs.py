"""What the documentation shows to type, typed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_WHOLE = "asyncio.run(main())"


def _python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def _runnable(block: str, folder: Path) -> str:
    """The block as a program: whole as it is, or as the body of a coroutine with a store.

    Tests are called, as pytest does it.
    """
    url = f"file://{folder}/bucket"
    block = re.sub(r"file:///tmp/bucket|s3://my-bucket(/some/prefix)?", url, block)
    if _WHOLE in block:
        return block
    tests = re.findall(r"^def (test_\w+)\(\)", block, re.MULTILINE)
    if tests:
        return block + "".join(f"\n{test}()" for test in tests)
    body = "\n".join(f"    {line}" for line in block.splitlines())
    opened = f"    from penstock.store import open_store\n    store = await open_store({url!r})\n"
    return f"import asyncio\nasync def main():\n{opened}{body}\n{_WHOLE}\n"


def _promised(block: str) -> list[str]:
    """What the comment behind a `print` says that it prints."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/store.md", "docs/queue.md"])
def test_the_python_on_a_page_runs_and_prints_what_it_says(page: str, tmp_path: Path) -> None:
    blocks = [block for block in _python_blocks(page) if "import pytest" not in block]
    assert blocks
    for number, block in enumerate(blocks):
        program = _runnable(block, tmp_path / str(number))
        (tmp_path / str(number)).mkdir()
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0, f"{block}\n{ran.stderr}"
        printed = ran.stdout.splitlines()
        missing = [line for line in _promised(block) if line not in printed]
        assert not missing, f"{block}\nprints {printed}"
