"""Runs the Python code on a page of docs/integrations."""

import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parent.parent / "docs" / "integrations"


def run(page: str, only: str = "", **names: Any) -> dict[str, Any]:
    """Run all snippets of a page, one after the other, and return their variables.

    Args:
        page: the page's file name without the suffix.
        names: the variables to start with.
        only: skip snippets that do not contain this text.
    """
    path = PAGES / f"{page}.md"
    snippets = re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
    assert snippets, path
    for snippet in (each for each in snippets if only in each):
        exec(compile(snippet, str(path), "exec"), names)
    return names
