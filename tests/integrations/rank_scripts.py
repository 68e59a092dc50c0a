"""Runs a script of this folder as torchrun would, on two ranks of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from example_scripts import EXAMPLES
from torch.distributed import TCPStore

#: Seconds after which both are ended.
PATIENCE = 600


def run_on_two_ranks(script: str) -> None:
    """Run it twice at once; both must succeed. They meet at a store of this process, as torchrun's do.

    Args:
        script: its name, without the ending.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *sys.path]),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(Path(__file__).with_name(f"{script}.py"))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"} for rank in range(2)]
    ranks = [subprocess.Popen(command, env=shared | each, **pipes) for each in own]
    try:
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
