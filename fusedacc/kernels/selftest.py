"""Check a backend's results on this GPU once, before the backend is used.

The first selection of a backend for a GPU runs a check of about a second against plain torch
(`selftest_checks`). Results are kept in `cache_folder`, by the GPU's name, the driver, torch,
Triton and the library. If several processes of a host start at once, one runs the check and the others wait
for its result. This process no longer uses a backend that fails; `registry.obstacle` returns the reason.
`FUSEDACC_SELFTEST=0` disables checks. `python -m fusedacc selftest` checks the CPU's backends.

A check waits for the device, so it cannot run during a CUDA graph capture or a trace. Then it is deferred
(`Deferred`): the backend is used without a check, which runs later (`retry`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from . import cache_folder, library, torch_private, torch_state
from .checks import switch
from .machine_names import processor, version

#: "0": no checks; "1", "" or not set: checks.
VARIABLE = "FUSEDACC_SELFTEST"
FILE = "selftests.json"
#: Device types on which backends are checked before use.
DEVICE_TYPES = ("cuda",)
HOW_TO_REPORT = "run `python -m fusedacc selftest`, and open an issue with the file that it writes"

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")
Check = Callable[[], str | None]


class Deferred(Exception):
    """A check cannot run now, because of a capture, a trace or a lack of memory."""


_lock = threading.RLock()
_this_thread = threading.local()
#: Results by machine: the problem of each subject, None if there was none.
_results: dict[str, dict[str, str | None]] = {}
#: Failures by machine, and why.
_failed: dict[str, dict[str, str]] = {}
_warned: set[tuple[str, str]] = set()
_caches: list[Any] = []
_suspended = False
#: Deferred selections with their arguments, in order.
deferred: dict[tuple[Any, ...], None] = {}
#: Number of failures. A cached selection of a backend must be repeated when it has grown.
num_failures = 0


def _applies_to(device: torch.device) -> bool:
    return device.type in DEVICE_TYPES and not (_suspended or is_off())


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Context: nothing is checked, and earlier failures have no effect."""
    global _suspended
    forget()
    _suspended = True
    try:
        yield
    finally:
        _suspended = False
        forget()


def is_off() -> bool:
    """Return whether checks are disabled, by FUSEDACC_SELFTEST."""
    on = "backends are checked on a GPU before they are used"
    return switch(VARIABLE, on=on, off="no checks", unset="checks") is False


def remembered(function: Function) -> Function:
    """`functools.cache` that is cleared when a backend fails."""
    cached = functools.cache(function)
    _caches.append(cached)
    return cached  # type: ignore[return-value]  # mypy has another type for cached functions


def checks() -> Any:
    """Return the module of the checks, which imports the registry and so cannot be imported above."""
    return importlib.import_module(f"{__package__}.selftest_checks")


def problem_of(component: str, part: str, device: torch.device, check: Check) -> str | None:
    """Return what is wrong with results on a device, by an earlier check or a new one.

    component: what is no longer used after a failure, such as a backend's name. part: what is checked of it,
    such as a pair of dtypes. check: returns what is wrong, or None; an exception is a failure too. Raises
    `Deferred` if the check cannot run now, and RuntimeError if it has left the device unusable in this
    process.
    """
    if not _applies_to(device):
        return None
    with _lock:
        known = failure(component, device)
        if known is not None:
            return known
        here = machine(device)
        subject = f"{component}: {part}"
        if subject not in _results[here]:
            if not _may_check(device):
                raise Deferred(subject)
            with cache_folder.locked(FILE):
                _load(device)
                if subject not in _results[here]:
                    _check_now(component, part, device, check)
        return failure(component, device)


def failure(component: str, device: torch.device) -> str | None:
    """Return why results on a device are not trusted, from the checks so far."""
    if not _applies_to(device):
        return None
    here = machine(device)
    with _lock:
        if here not in _results:
            _load(device)
        return _failed.get(here, {}).get(component)


def failures(device: torch.device) -> dict[str, str]:
    """Return what has failed on a device, and why."""
    failure("", device)  # reads the file if necessary
    return dict(_failed.get(machine(device), {}))


def results(device: torch.device) -> dict[str, str | None]:
    """Return the checks on a device, by this process or an earlier one: problems, or None."""
    with _lock:
        _load(device)
        return dict(_results[machine(device)])


def exclude(component: str, device: torch.device, why: str) -> None:
    """Stop using something on a device in this process. It may have failed on another rank."""
    global num_failures
    with _lock:
        known = _failed.setdefault(machine(device), {})
        if component not in known:
            known[component] = why
            num_failures += 1
            for cache in _caches:
                cache.cache_clear()


def record(component: str, part: str, device: torch.device, problem: str | None) -> None:
    """Store the result of a check, here and in the file."""
    with _lock, cache_folder.locked(FILE):
        _store(component, part, device, problem)


def _store(component: str, part: str, device: torch.device, problem: str | None) -> None:
    """As `record`, while the file is locked."""
    here = machine(device)
    subject = f"{component}: {part}"
    _results.setdefault(here, {})[subject] = problem
    with contextlib.suppress(OSError, RuntimeError):  # then only this process knows it
        results = cache_folder.read(FILE)
        results.setdefault(here, {})[subject] = {"problem": problem, "checked_at": time.time()}
        cache_folder.write(FILE, results)
    if problem is not None:
        exclude(component, device, f"{part}: {problem}")


def now_or_deferred(
    select: Callable[..., Result], select_untested: Callable[..., Result], *arguments: Any
) -> Result:
    """Return `select(*arguments)`. If its check cannot run now, note it for `retry` and select untested."""
    try:
        return select(*arguments)
    except Deferred:
        key = (select, *arguments)
        deferred[key] = None
        return select_untested(*arguments)


def retry() -> None:
    """Run the deferred checks that can run now. Raises RuntimeError if a backend requested by name has
    failed.
    """
    for key in list(deferred):
        select, *arguments = key
        with contextlib.suppress(Deferred):
            deferred.pop(key, None)
            select(*arguments)
            continue
        deferred[key] = None


def warn_once(component: str, device: torch.device, instead: str) -> None:
    """Warn of a failure on a device, once for each kind of device."""
    why = failure(component, device)
    if why is None or (machine(device), component) in _warned:
        return
    _warned.add((machine(device), component))
    warnings.warn(
        f"fusedacc: the self-test of {component!r} has failed on {device} ({_name(device)}): {why}. "
        f"{instead} is used instead. Please report it: {HOW_TO_REPORT}",
        RuntimeWarning,
        stacklevel=2,
    )


def forget() -> None:
    """Drop what this process knows; the file stays."""
    with _lock:
        for known in (_results, _failed, _warned, deferred):
            known.clear()
        for cache in (*_caches, machine):
            cache.cache_clear()


def _may_check(device: torch.device) -> bool:
    """Return whether no capture, trace, transform or other check is active."""
    with torch_state.on_device(device):
        captures = torch_state.capturing()
    traces = torch.compiler.is_compiling() or torch_private.active_fake_mode() is not None
    transforms = torch.jit.is_tracing() or torch_private.innermost_transform() is not None
    return not (captures or traces or transforms or getattr(_this_thread, "checking", False))


def _check_now(component: str, part: str, device: torch.device, check: Check) -> None:
    unusable: Exception | None = None
    try:
        with undisturbed(device):
            problem = check()
    except torch.OutOfMemoryError as error:
        raise Deferred(f"{component}: {part}") from error
    except Exception as error:  # whatever a broken kernel or installation raises
        problem = first_line(error)
        unusable = _left_unusable(device)
    _store(component, part, device, problem)
    if unusable is not None:
        raise RuntimeError(
            f"the self-test of {component!r} on {device} has left the device unusable in this process: "
            f"{problem}. Start again: {component!r} will not be used then. Please report it: {HOW_TO_REPORT}"
        ) from unusable


def _left_unusable(device: torch.device) -> Exception | None:
    """Return the device's error after an illegal access of a kernel, or None."""
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
    """Context: isolate a check from modes, autocast, autograd and garbage collection; it may wait for the
    device.
    """
    collects = gc.isenabled()
    gc.disable()
    _this_thread.checking = True
    try:
        with (
            torch_private.disable_dispatch_modes(),
            torch_private.DisableTorchFunction(),
            torch.autocast("cpu", enabled=False),
            torch.autocast(device.type, enabled=False),
            torch.inference_mode(False),
            torch.no_grad(),
            torch_state.on_device(device),
            _waiting_allowed(device),
        ):
            yield
    finally:
        _this_thread.checking = False
        if collects:
            gc.enable()


@contextlib.contextmanager
def _waiting_allowed(device: torch.device) -> Iterator[None]:
    """Context: torch does not complain if the host waits for a GPU."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@functools.cache
def machine(device: torch.device) -> str:
    """Return what a result depends on: the device's name, the driver, torch, Triton and our kernels."""
    versions = [f"{name} {version(name) or 'not installed'}" for name in ("fusedacc", "triton")]
    parts = (_name(device), f"driver {driver()}", f"torch {torch.__version__}", *versions)
    return "; ".join([*parts, f"kernels {_kernels():08x}"])


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


@functools.cache
def driver() -> str:
    """Return the version of the NVIDIA driver or of ROCm; "none" without one."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    with contextlib.suppress(OSError, IndexError):
        # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ...
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return next(word for word in line.split() if word[0].isdigit() and "." in word)
    number = torch_private.cuda_driver()
    return f"for CUDA {number // 1000}.{number % 1000 // 10}" if number else "none"


@functools.cache
def _kernels() -> int:
    """Return a checksum of the compiled library and the Triton kernels."""
    sources = sorted((Path(__file__).parent / "triton").glob("*.py"))
    code = 0
    for path in (library.LIBRARY, *sources):
        with contextlib.suppress(OSError):
            code = zlib.crc32(path.read_bytes(), code)
    return code


def _load(device: torch.device) -> None:
    """Adopt the file's results that this process has not found itself."""
    known = _results.setdefault(machine(device), {})
    for subject, entry in cache_folder.read(FILE).get(machine(device), {}).items():
        problem = entry.get("problem") if isinstance(entry, Mapping) else None
        if isinstance(entry, Mapping) and isinstance(problem, str | None) and subject not in known:
            known[subject] = problem
            if problem is not None:
                component, _, part = subject.partition(": ")
                exclude(component, device, f"{part}: {problem}")
