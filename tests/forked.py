"""Runs programs in new processes, like `python -c` but with torch already imported.

The processes are forked from a process that has imported torch, pytest, and the modules that an optimizer's
first step and programs with many ranks import. That saves three seconds per program. A test of environment
variables that an import reads needs a new interpreter instead.
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

#: The process that forks new ones. Tests that start other processes use it too.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.tensor",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.pipelining",
        "pytest",
    ]
)


@dataclass
class Running:
    """A program that was started."""

    process: ForkServerProcess
    printed: Path

    def wait(self, seconds: float = 600) -> CompletedProcess[str]:
        """Return the exit status (negative: the signal that killed the process) and the output."""
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
        root: the folder that contains the package. None: the same as for the tests.
        folder: the working directory. None: the same as for the tests.
        variables: changes to environment variables. None removes a variable.
    """
    import fusedacc  # the new process imports this file, and then imports the package itself

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
    """Run a program to its end. The arguments are those of `start`."""
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
