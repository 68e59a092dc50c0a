"""The process of one try, as its parent sees it: started, followed, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

from . import trial

#: Characters of what a child has written that an error repeats.
TAIL = 4000
#: Seconds: how often a child is looked at, and how long it may take to exit.
_LOOK, _EXIT = 0.1, 10.0


class Outcome(NamedTuple):
    """How a try ended. `why`: it did not fit; `doubtful`: perhaps for want of memory, perhaps not; `lacked`:
    bytes, at least, 0 where that is not known."""

    fits: bool
    doubtful: bool = False
    why: str = ""
    lacked: int = 0


class Child:
    """A process that tries one size. When the context ends, so do it and all that it has started."""

    def __init__(self, order: trial.Order, timeout: float, tell: Callable[[int, int, int], None]) -> None:
        self.order, self.timeout, self.tell = order, timeout, tell
        self.budget: int | None = None
        self.done = 0
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Child:
        with contextlib.ExitStack() as opened:
            #: Has no name in the file system.
            self.written = opened.enter_context(tempfile.TemporaryFile())
            self.ours, theirs = Pipe()
            opened.enter_context(self.ours)
            opened.callback(self._end)
            with theirs:
                self._start(theirs)
            self._keep = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._keep.close()

    def _start(self, theirs: Connection) -> None:
        path = [os.path.abspath(each) for each in sys.path]
        code = f"import sys; sys.path[:] = {path!r}; from fusedacc.planner.trial import main; "
        self.process = subprocess.Popen(
            [
                os.fsdecode(spawn.get_executable()),
                # This interpreter's options (-O, -W, -X), as multiprocessing hands them on; no stub has it.
                *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                *("-X", "faulthandler", "-c", f"{code}main({theirs.fileno()})"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self.written,
            stderr=self.written,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def _end(self) -> None:
        if self.process is not None and self.process.returncode is None:
            # Nobody has waited for it: its number, and so its group's, cannot be anybody else's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def outcome(self) -> Outcome:
        """Follow the child until it ends."""
        try:
            self.ours.send(self.order)
            while True:
                said = self._next()
                if isinstance(said, trial.Loaded):
                    self.budget = said.budget
                elif isinstance(said, trial.Updated):
                    self.done += 1
                    self.tell(self.order.size, self.done, self.order.updates)
                elif isinstance(said, trial.Failed):
                    return self._failed(said)
                else:
                    self._ends(_EXIT)
                    return Outcome(True)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            return self._died()

    def _next(self) -> object:
        """What the child says next."""
        began = time.monotonic()
        while not self.ours.poll(_LOOK):
            # What it has started may hold its end of the connection open.
            if self._ends(0) and not self.ours.poll(0):
                raise EOFError
            if time.monotonic() - began > self.timeout:
                assert self.process is not None
                os.kill(self.process.pid, signal.SIGABRT)  # writes its stack
                self._ends(1.0)
                raise TimeoutError(
                    f"{self._where()} took longer than the timeout of {self.timeout:g} s{self._tail()}"
                )
        return self.ours.recv()

    def _ends(self, seconds: float) -> bool:
        """Whether the process ends by itself in that time. It stays a zombie, which keeps its number."""
        assert self.process is not None
        end = time.monotonic() + seconds
        while os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def _where(self) -> str:
        if self.budget is None:
            return "loading torch and the step in a process of its own"
        return f"update {self.done + 1} with micro-batch size {self.order.size}"

    def _tail(self) -> str:
        """The end of what the process has written. The open file, and its offset, are shared: no seeking."""
        length = os.fstat(self.written.fileno()).st_size
        text = os.pread(self.written.fileno(), TAIL, max(0, length - TAIL)).decode(errors="replace").strip()
        return f"; its process had written:\n{text}" if text else ""

    def _failed(self, said: trial.Failed) -> Outcome:
        if said.kind == "memory":
            return Outcome(False, False, said.what, said.lacked)
        if said.kind == "doubtful":
            return Outcome(False, True, f"{said.what}\n\n{said.trace}")
        try:
            problem = pickle.loads(said.problem)
        except Exception:  # of a class that is not here, or that takes other arguments
            problem = None
        raise RuntimeError(f"{self._where()} failed: {said.what}\n\n{said.trace}{self._tail()}") from (
            problem if isinstance(problem, BaseException) else None
        )

    def _died(self) -> Outcome:
        """Without a word: by the system's hand, or in C++."""
        assert self.process is not None
        alone = self._ends(_EXIT)
        self._end()
        code, tail = self.process.returncode, self._tail()
        how = f"died by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        what = f"the process {how}{tail}" if alone else f"the process closed its connection{tail}"
        if self.budget is None:
            raise RuntimeError(f"{self._where()} failed: {what}")
        # SIGKILL is what the system sends where its memory runs out.
        short = alone and (code == -signal.SIGKILL or trial.SHORT.search(tail) is not None)
        return Outcome(False, not short, what)
