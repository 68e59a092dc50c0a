"""Runs a script as two ranks on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fusedacc


def run_on_two_ranks(folder: Path, text: str) -> None:
    """Run a script twice at once, with its rank and a file to meet at as arguments; both must succeed."""
    script = folder / "rank.py"
    script.write_text(text)
    path = os.pathsep.join([str(Path(fusedacc.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder / "rendezvous")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
