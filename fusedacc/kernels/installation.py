"""How fusedacc was installed, and so what builds its compiled files again."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

#: The package's folder, with the compiled files.
FOLDER = Path(__file__).parents[1]
_PYTHON = shlex.quote(sys.executable or "python")
#: Build with the installed torch, and change no other package.
_PIP = f"{_PYTHON} -m pip install --no-build-isolation --no-deps --force-reinstall"
_IN_CHECKOUT = f"run in a checkout of fusedacc: {_PIP} ."


def how_to_build() -> str:
    """Return what to do to build the compiled files for this torch and Python. It begins with a verb."""
    checkout = FOLDER.parent
    if (checkout / "csrc").is_dir() and (checkout / "setup.py").is_file():
        return f"run in {shlex.quote(str(checkout))}: {_PYTHON} setup.py build_ext --inplace"
    found = importlib.metadata.distributions(name="fusedacc", path=[str(FOLDER.parent)])
    distribution = next(iter(found), None)
    if distribution is None:
        return _IN_CHECKOUT
    origin = distribution.read_text("direct_url.json")
    if origin is None:  # from a package index
        return f"run: {_PIP} --no-cache-dir --no-binary fusedacc fusedacc=={distribution.version}"
    source = _source(json.loads(origin))
    return _IN_CHECKOUT if source is None else f"run: {_PIP} --no-cache-dir {shlex.quote(source)}"


def _source(origin: dict[str, Any]) -> str | None:
    """Return what pip can build again: a folder, an archive of sources, or a repository. None for a wheel.

    origin: the content of `direct_url.json` (PEP 610).
    """
    url = str(origin["url"])
    if "vcs_info" in origin:
        facts = origin["vcs_info"]
        return f"{facts['vcs']}+{url}@{facts.get('requested_revision') or facts['commit_id']}"
    if url.endswith(".whl"):
        return None
    parts = urlsplit(url)
    if parts.scheme != "file":
        return url
    path = Path(unquote(parts.path))
    return str(path) if path.exists() else None
