"""Programs in new processes, as `python -c` makes them, but with torch loaded.

They are forked from a process that has only imported torch, what an optimizer's first step imports, and what
programs of many ranks import. That saves three seconds each. A test of variables that an import reads needs a
real new process.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess

#: Makes the processes. Tests that make other processes use it too.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.tensor",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.pipelining",
    ]
)


@dataclass
class Running:
    """A program that has been started."""

    process: ForkServerProcess
    printed: Path

    def wait(self, seconds: float = 600) -> CompletedProcess[str]:
        """Its exit status (below 0: by which signal it has died), and what it has printed."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        out, err = (self.printed.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
        shutil.rmtree(self.printed.parent)
        return CompletedProcess(self.process.name, self.process.exitcode or 0, out, err)


def start(
    program: str,
    *arguments: str,
    root: Path | None = None,
    folder: Path | None = None,
    **variables: str | None,
) -> Running:
    """Start a program.

    Args:
        program: its text.
        arguments: `sys.argv[1:]`.
        root: where it finds the package; None: where the tests do.
        folder: where it runs; None: where the tests do.
        variables: changes of the environment; None takes one out.
    """
    import fusedacc  # the new process imports this file, and its package by itself

    changed = os.environ | variables
    environment = {name: value for name, value in changed.items() if value is not None}
    printed = Path(tempfile.mkdtemp(prefix="forked-")) / "printed"
    root = root or Path(fusedacc.__file__).parents[1]
    process = context.Process(
        target=_run, args=(program, arguments, str(root), str(folder or Path.cwd()), environment, printed)
    )
    process.start()
    return Running(process, printed)


def run(
    program: str,
    *arguments: str,
    root: Path | None = None,
    folder: Path | None = None,
    **variables: str | None,
) -> CompletedProcess[str]:
    """As `start`, to its end."""
    return start(program, *arguments, root=root, folder=folder, **variables).wait()


def _run(
    program: str,
    arguments: tuple[str, ...],
    root: str,
    folder: str,
    environment: dict[str, str],
    printed: Path,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(printed.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, root)
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
