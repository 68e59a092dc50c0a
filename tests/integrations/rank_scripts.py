"""Run a script of this folder on two ranks, as torchrun would: `rank_scripts.py NAME`."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

from example_scripts import EXAMPLES
from ranks import fork_ranks
from torch.distributed import TCPStore

RANKS = 2
#: Seconds after which the ranks are ended.
PATIENCE = 600


def run_on_two_ranks(script: str) -> None:
    """Run the `main()` of a script (without ".py") on both ranks, which must succeed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *sys.path]),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, __file__, script]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def main() -> None:
    script = importlib.import_module(Path(sys.argv[1]).stem)  # before the ranks are forked

    def run(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        script.main()

    sys.exit(fork_ranks(RANKS, run))


if __name__ == "__main__":
    main()
