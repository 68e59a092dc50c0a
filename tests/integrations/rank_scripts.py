"""Runs a script of this folder as torchrun would, on two ranks of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from example_scripts import EXAMPLES

#: Seconds after which both are ended.
PATIENCE = 240


def run_on_two_ranks(script: str) -> None:
    """Run it twice at once; both must succeed.

    Args:
        script: its name, without the ending.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *sys.path]),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(f"{script}.py"))],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
