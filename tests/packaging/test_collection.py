"""Which tests are collected where only some of the frameworks of tests/integrations are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_one_framework_without_the_others_stops_no_collection(tmp_path: Path) -> None:
    """As where an image has Accelerate for other work: the GPU tests must still be found."""
    package, metadata = tmp_path / "accelerate", tmp_path / "accelerate-1.15.0.dist-info"
    for folder in (package, metadata):
        folder.mkdir()
    (package / "__init__.py").touch()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.15.0\n")
    paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "cuda"]
    rooms = [path for path in (ROOT / "tests").iterdir() if path.is_dir()]
    others = [f"--ignore={path}" for path in rooms if path.name not in ("cuda", "integrations")]
    found = subprocess.run(
        [*command, "tests", *others],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "tests/cuda/test_cuda_ops.py" in found.stdout
    assert "error" not in found.stdout.lower()
