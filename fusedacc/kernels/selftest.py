"""Whether a backend's results are right on this GPU: checked once, before the backend is used.

The first selection of a backend for a GPU runs a check of about a second against plain torch
(`selftest_checks`). Results are kept in the folder of `tuning_cache`, by the name of the GPU, the driver,
torch, Triton and the library. If several processes of a host ask at once, one runs the check, and the others
wait for its result. A backend that fails is not used by this process any more: `registry.obstacle` gives the
reason. `FUSEDACC_SELFTEST=0` turns all of this off. A CPU's backends are checked by `python -m fusedacc
selftest`.

A check waits for the device. While a CUDA graph is captured or a model is traced it cannot run, and is
deferred (`Deferred`): the backend is used as if there were no check, and the check runs later (`retry`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from . import library, torch_state, tuning, tuning_cache
from .environment import switch, version

#: "0": no checks; "1", "" or not set: checks.
VARIABLE = "FUSEDACC_SELFTEST"
FILE = "selftests.json"
#: Types of devices on which backends are checked before they are used.
DEVICE_TYPES = ("cuda",)
HOW_TO_REPORT = "run `python -m fusedacc selftest`, and open an issue with the file that it writes"

Function = TypeVar("Function", bound=Callable[..., Any])
Check = Callable[[], str | None]


class Deferred(Exception):
    """A check cannot run now, because of a capture, a trace or a lack of memory."""


_lock = threading.RLock()
#: Of each machine: who was checked with what, and the problem; None if there was none.
_results: dict[str, dict[str, str | None]] = {}
#: Of each machine: who has failed, and why.
_failed: dict[str, dict[str, str]] = {}
_warned: set[tuple[str, str]] = set()
_caches: list[Any] = []
_suspended = False
#: Functions with arguments whose checks were deferred, in order.
deferred: dict[tuple[Any, ...], None] = {}
#: How often a backend was found to fail. Who keeps a choice of a backend chooses again when it has grown.
num_failures = 0


def _applies_to(device: torch.device) -> bool:
    return device.type in DEVICE_TYPES and not (_suspended or is_off())


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Context: nothing is checked, and what was found before keeps no backend from being used."""
    global _suspended
    forget()
    _suspended = True
    try:
        yield
    finally:
        _suspended = False
        forget()


def is_off() -> bool:
    """Whether nothing is checked.

    Raises:
        ValueError: FUSEDACC_SELFTEST is neither "0" nor "1".
    """
    on = "backends are checked on a GPU before they are used"
    return switch(VARIABLE, on=on, off="no checks", unset="checks") is False


def remembered(function: Function) -> Function:
    """`functools.cache` that forgets when a backend is found to fail."""
    cached = functools.cache(function)
    _caches.append(cached)
    return cached  # type: ignore[return-value]  # mypy knows a cached function by another type


# Results


def checks() -> Any:
    """Return the module of the checks. It imports the registry of backends, which asks for it."""
    return importlib.import_module(f"{__package__}.selftest_checks")


def problem_of(who: str, what: str, device: torch.device, check: Check) -> str | None:
    """Return what is wrong with results on a device, from an earlier check or a new one.

    who: what is not used any more after a failure, such as a backend's name. what: what of it is checked,
    such as a pair of dtypes. check: returns what is wrong, or None; an exception is a failure too.

    Raises:
        Deferred: the check cannot run now.
        RuntimeError: the check has left the device unusable in this process.
    """
    if not _applies_to(device):
        return None
    with _lock:
        known = failure(who, device)
        if known is not None:
            return known
        here, subject = machine(device), f"{who}: {what}"
        if subject not in _results[here]:
            if not _may_check(device):
                raise Deferred(subject)
            with tuning_cache.locked(FILE):
                _load(here)
                if subject not in _results[here]:
                    _check_now(here, who, what, device, check)
        return failure(who, device)


def failure(who: str, device: torch.device) -> str | None:
    """Return why results on a device are not trusted, as far as checks have run."""
    if not _applies_to(device):
        return None
    here = machine(device)
    with _lock:
        if here not in _results:
            _load(here)
        return _failed.get(here, {}).get(who)


def failures(device: torch.device) -> dict[str, str]:
    """Return who has failed on a device, and why."""
    failure("", device)  # reads the file, where nothing has
    return dict(_failed.get(machine(device), {}))


def results(device: torch.device) -> dict[str, str | None]:
    """Return what was checked on a device, by this process or an earlier one: problems, or None."""
    with _lock:
        _load(machine(device))
        return dict(_results[machine(device)])


def exclude(who: str, device: torch.device, why: str) -> None:
    """Use something no more on a device, in this process: it has failed, maybe on another rank."""
    _exclude(machine(device), who, why)


def _exclude(here: str, who: str, why: str) -> None:
    global num_failures
    with _lock:
        known = _failed.setdefault(here, {})
        if who not in known:
            known[who] = why
            num_failures += 1
            for cache in _caches:
                cache.cache_clear()


def record(who: str, what: str, device: torch.device, problem: str | None) -> None:
    """Keep the result of a check, here and in the file, whatever was known."""
    with _lock, tuning_cache.locked(FILE):
        _keep(machine(device), who, what, problem)


def _keep(here: str, who: str, what: str, problem: str | None) -> None:
    """As `record`, by the process that has the file's lock."""
    subject = f"{who}: {what}"
    _results.setdefault(here, {})[subject] = problem
    _write(here, subject, problem)
    if problem is not None:
        _exclude(here, who, f"{what}: {problem}")


def defer(select: Callable[..., object], *arguments: object) -> None:
    """Note a selection whose check was deferred, for `retry`."""
    key = (select, *arguments)
    deferred[key] = None


def retry() -> None:
    """Run the checks that were deferred and can run now.

    Raises:
        RuntimeError: a backend has failed that was asked for by name.
    """
    for key in list(deferred):
        select, *arguments = key
        with contextlib.suppress(Deferred):
            deferred.pop(key, None)
            select(*arguments)
            continue
        deferred[key] = None


def warn_once(who: str, device: torch.device, instead: str) -> None:
    """Warn of a failure on a device, once for each kind of device."""
    why = failure(who, device)
    if why is None or (machine(device), who) in _warned:
        return
    _warned.add((machine(device), who))
    warnings.warn(
        f"fusedacc: the self-test of {who!r} has failed on {device} ({_name(device)}): {why}. {instead} is "
        f"used instead. Please report it: {HOW_TO_REPORT}",
        RuntimeWarning,
        stacklevel=2,
    )


def forget() -> None:
    """Let go of what this process knows; the file stays."""
    with _lock:
        for known in (_results, _failed, _warned, deferred):
            known.clear()
        for cache in (*_caches, machine):
            cache.cache_clear()


# Checks


def _may_check(device: torch.device) -> bool:
    """Whether nothing would record a check, or break by its wait for the device."""
    with torch_state.on_device(device):
        captures = torch_state.capturing()
    traces = torch.compiler.is_compiling() or torch._guards.detect_fake_mode() is not None
    return not (captures or traces) and tuning.may_try()


def _check_now(here: str, who: str, what: str, device: torch.device, check: Check) -> None:
    usable: Exception | None = None
    try:
        with undisturbed(device):
            problem = check()
    except torch.OutOfMemoryError as error:
        raise Deferred(f"{who}: {what}") from error
    except Exception as error:  # whatever a broken kernel or installation raises
        problem = first_line(error)
        usable = _left_unusable(device)
    _keep(here, who, what, problem)
    if usable is not None:
        raise RuntimeError(
            f"the self-test of {who!r} on {device} has left the device unusable in this process: {problem}. "
            f"Start again: {who!r} will not be used then. Please report it: {HOW_TO_REPORT}"
        ) from usable


def _left_unusable(device: torch.device) -> Exception | None:
    """The error that a device returns from now on, after an illegal access of a kernel."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        return error
    return None


def first_line(error: Exception) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Keep a check from what surrounds it, as `tuning.undisturbed`; it may wait for the device."""
    with tuning.undisturbed(), torch.autocast(device.type, enabled=False), torch_state.on_device(device):
        if device.type != "cuda":
            yield
            return
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


# The machine and the file


@functools.cache
def machine(device: torch.device) -> str:
    """What a result depends on: the device's name, the driver, torch, Triton and our kernels."""
    versions = [f"{name} {version(name) or 'not installed'}" for name in ("fusedacc", "triton")]
    parts = (_name(device), f"driver {driver()}", f"torch {torch.__version__}", *versions)
    return "; ".join([*parts, f"kernels {_kernels():08x}"])


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else tuning.processor()


@functools.cache
def driver() -> str:
    """The version of the NVIDIA driver, or of ROCm; "none" without one."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    with contextlib.suppress(OSError, IndexError):
        # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ...
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return next(word for word in line.split() if word[0].isdigit() and "." in word)
    number = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return f"for CUDA {number // 1000}.{number % 1000 // 10}" if number else "none"


@functools.cache
def _kernels() -> int:
    """A number that changes with the compiled library and the Triton kernels."""
    sources = sorted((Path(__file__).parent / "triton").glob("*.py"))
    code = 0
    for path in (library.LIBRARY, *sources):
        with contextlib.suppress(OSError):
            code = zlib.crc32(path.read_bytes(), code)
    return code


def _load(here: str) -> None:
    """Take over what the file has of a machine, and this process has not found out itself."""
    known = _results.setdefault(here, {})
    for subject, entry in tuning_cache.read(FILE).get(here, {}).items():
        problem = entry.get("problem") if isinstance(entry, Mapping) else None
        if isinstance(entry, Mapping) and isinstance(problem, str | None) and subject not in known:
            known[subject] = problem
            if problem is not None:
                who, _, what = subject.partition(": ")
                _exclude(here, who, f"{what}: {problem}")


def _write(here: str, subject: str, problem: str | None) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # then it holds for this process
        found = tuning_cache.read(FILE)
        found.setdefault(here, {})[subject] = {"problem": problem, "checked_at": time.time()}
        tuning_cache.write(FILE, found)
