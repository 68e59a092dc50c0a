"""Runs a script of examples/ as a user does, or in processes that start sooner."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import forked

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


def forked_output_of(script: str, ranks: int = 1) -> str:
    """As `output_of`, in forked processes that have what torchrun would tell them."""
    program = f"import runpy\nrunpy.run_path({str(EXAMPLES / script)!r}, run_name='__main__')\n"
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        running = [forked.start(program, folder=Path(folder), **variables) for variables in of_ranks]
        ended = [each.wait() for each in running]
    assert [each.returncode for each in ended] == [0] * ranks, "\n".join(each.stderr for each in ended)
    return "".join(each.stdout for each in ended)
