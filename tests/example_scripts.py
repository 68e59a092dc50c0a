"""Runs a script of examples/ as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def output_of(script: str, ranks: int | None = None) -> str:
    """What it prints, run by itself in an empty folder; on so many ranks by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, *(torchrun if ranks else []), str(EXAMPLES / script)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert found.returncode == 0, found.stderr
    return found.stdout
