"""Test collection in an environment with some of the frameworks of tests/integrations."""

from pathlib import Path

import forked

ROOT = Path(__file__).resolve().parents[2]


def test_one_framework_without_the_others_does_not_stop_collection(tmp_path: Path) -> None:
    """Some images have Accelerate for other work. The GPU tests must still be found."""
    package, metadata = tmp_path / "accelerate", tmp_path / "accelerate-1.15.0.dist-info"
    package.mkdir(), metadata.mkdir()
    (package / "__init__.py").touch()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerate\nVersion: 1.15.0\n")
    folders = [path for path in (ROOT / "tests").iterdir() if path.is_dir()]
    others = [f"--ignore={path}" for path in folders if path.name not in ("cuda", "integrations")]
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "cuda"]
    program = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    found = forked.run(program, *options, "tests", *others, root=tmp_path, folder=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "tests/cuda/test_cuda_ops.py" in found.stdout
    assert "error" not in found.stdout.lower()
