"""The example of FSDP2."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from example_scripts import EXAMPLES


def test_the_example_runs_under_torchrun(tmp_path):
    pytest.importorskip("sklearn", reason="the examples read scikit-learn's digits")
    paths = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / "fsdp2.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    updates, accuracy = re.search(r"(\d+) updates, accuracy .*: ([\d.]+)%", done.stdout).groups()
    assert int(updates) == 10 * 12  # 750 images of a rank are 23 micro-batches of 32 and one of 14
    assert float(accuracy) > 85
