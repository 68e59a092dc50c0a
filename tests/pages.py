"""Runs the Python code on a page of docs/integrations."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

PAGES = Path(__file__).resolve().parent.parent / "docs" / "integrations"


def run(page: str, only: str = "", **names: Any) -> dict[str, Any]:
    """Run all snippets of a page, one after the other, and return their variables.

    Args:
        page: the page's file name without the suffix.
        names: the variables to start with.
        only: skip snippets that do not contain this text.
    """
    for snippet in (each for each in snippets_of(page) if only in each):
        exec(compile(snippet, f"{page}.md", "exec"), names)
    return names


def snippets_of(page: str) -> list[str]:
    path = PAGES / f"{page}.md"
    snippets = re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)
    assert snippets, path
    return snippets


def load(page: str, folder: Path) -> ModuleType:
    """Write all snippets of a page to a file, and import it. Triton reads the sources of its kernels."""
    file = folder / f"{Path(page).name}_page.py"
    file.write_text("\n\n".join(snippets_of(page)))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
