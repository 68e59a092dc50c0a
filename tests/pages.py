"""Runs the Python that a page of docs/integrations shows."""

import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parent.parent / "docs" / "integrations"


def run(page: str, only: str = "", **names: Any) -> dict[str, Any]:
    """The names after all snippets of the page have run, one after the other, with `names` to begin with.

    Args:
        page: its file's name without the suffix.
        only: leave out snippets without this text.
    """
    path = PAGES / f"{page}.md"
    snippets = re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
    assert snippets, path
    for snippet in (each for each in snippets if only in each):
        exec(compile(snippet, str(path), "exec"), names)
    return names
