"""Copies of the project with one mutant each, for `tests/mutants.py` and `tests/emulation/mutants.py`."""

import contextlib
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from build_cache import cached, contents, version_of
from mutant import Mutant
from torch.utils.cpp_extension import include_paths

from fusedacc.kernels import engine_command

ROOT = Path(__file__).resolve().parents[1]
#: Folders to copy, because a mutant may change them or because their files look for the root. All others
#: become links.
COPIED = ("csrc", "fusedacc", "tests")
#: The folder of the native module's sources.
MODULE = "csrc/autograd"
COMPILER = "c++"
#: The engine's flags, but without optimization and warnings.
FLAGS = ("-O0", *(flag for flag in engine_command.FLAGS if flag not in ("-O2", *engine_command.WARNINGS)))


def files(root: Path, mutant: Mutant) -> list[Path]:
    """Return the source files that contain the mutant's text."""
    where = root / mutant.where
    sources = [where] if where.is_file() else sorted(where.rglob("*.py"))
    if mutant.where == MODULE:
        sources = sorted([*where.glob("*.cpp"), *where.glob("*.h")])
    return [source for source in sources if mutant.old in source.read_text()]


def occurrences(mutant: Mutant) -> int:
    """Return how often the mutant's text occurs."""
    return sum(source.read_text().count(mutant.old) for source in files(ROOT, mutant))


@contextlib.contextmanager
def project(mutant: Mutant | None = None) -> Iterator[Path]:
    """Copy the project and put the mutant into the copy. Compile the native module again if it has changed.

    Raises subprocess.CalledProcessError if the module does not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for source in ROOT.iterdir():
            if source.name in COPIED:
                shutil.copytree(source, copy / source.name)
            elif source.name != ".pytest_cache":
                (copy / source.name).symlink_to(source)
        if mutant is not None:
            (target,) = files(copy, mutant)
            target.write_text(target.read_text().replace(mutant.old, mutant.new))
            if mutant.where.startswith(MODULE):
                _compile_module(copy, target)
        yield copy


def _compile_module(copy: Path, changed: Path) -> None:
    """Compile a copy's native module. Objects of unchanged sources come from the cache of test programs."""
    sources = sorted((copy / MODULE).glob("*.cpp"))
    if changed in sources:
        objects = [_compile([changed], copy), _unchanged(changed.name) / "module.o"]
    else:
        objects = [_compile(sources, copy)]
    module = next((copy / "fusedacc").glob(f"_autograd.torch-{torch.__version__}.*.so"))
    command = engine_command.link([COMPILER], Path(torch.__file__).parent, objects, module)
    subprocess.run(command, check=True)


def _unchanged(changed: str) -> Path:
    """Return a folder with an object of all sources but `changed`."""
    sources = [source for source in sorted((ROOT / MODULE).glob("*.cpp")) if source.name != changed]
    texts = [source.read_bytes() for source in sources]
    headers = contents(ROOT / "csrc" / "common")
    headers += [header.read_bytes() for header in sorted((ROOT / MODULE).glob("*.h"))]
    made_from = [*FLAGS, torch.__version__, version_of(COMPILER), *texts, *headers]
    return cached("mutants", made_from, lambda folder: _compile(sources, folder))


def _precompiled() -> Path:
    """Return a header with all headers of other projects that the module includes. The compiler has read it.

    It halves the time of a mutant.
    """
    texts = [source.read_text() for source in (*(ROOT / MODULE).iterdir(), *(ROOT / "csrc/common").iterdir())]
    included = sorted({line for text in texts for line in re.findall(r"^#include <(?!cuda).*>$", text, re.M)})

    def make(folder: Path) -> None:
        header = folder / "others.h"
        header.write_text("\n".join(included) + "\n")
        _run_compiler("-x", "c++-header", str(header), "-o", f"{header}.gch")

    made_from = [*FLAGS, torch.__version__, version_of(COMPILER), *included]
    return cached("headers", made_from, make) / "others.h"


def _compile(sources: Iterable[Path], folder: Path) -> Path:
    """Compile these sources together into an object in `folder`, without optimization."""
    together, result = folder / "module.cpp", folder / "module.o"
    together.write_text("".join(f'#include "{source}"\n' for source in sources))
    _run_compiler("-include", str(_precompiled()), "-c", str(together), "-o", str(result))
    return result


def _run_compiler(*arguments: str) -> None:
    folders = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    subprocess.run([COMPILER, *FLAGS, *folders, *arguments], check=True)
