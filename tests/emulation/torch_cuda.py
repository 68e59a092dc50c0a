"""Makes `torch.cuda` work on the emulated device.

`activate(library)` replaces the functions that `torch.cuda` takes from a CUDA build with functions of the
device's library. Load that library before torch is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

DEVICES = 2
NAME = "Emulated H100"
CAPABILITY = (9, 0)
MEMORY = 80 << 30

_INT, _ID, _SIZE, _POINTER = (ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p)
#: The functions of device/interface.cpp: the type of the result and the types of the arguments.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "new_stream": (_ID, [_INT]),
    "raw_handle": (_ID, [_ID]),
    "stream_of_handle": (_ID, [_ID, _INT]),
    "current_stream": (_ID, [_INT]),
    "set_stream": (None, [_INT, _ID]),
    "current_device": (_INT, []),
    "set_device": (None, [_INT]),
    "event_new": (_POINTER, []),
    "event_delete": (None, [_POINTER]),
    "event_record": (None, [_POINTER, _ID]),
    "event_wait": (None, [_POINTER, _ID]),
    "event_synchronize": (None, [_POINTER]),
    "stream_synchronize": (None, [_ID]),
    "device_synchronize": (None, []),
    "take_reports": (ctypes.c_char_p, []),
    "set_sync_mode": (None, [_INT]),
    "allocated_bytes": (_SIZE, []),
    "peak_bytes": (_SIZE, []),
    "reset_peak": (None, []),
    "set_limit": (None, [_SIZE]),
    "is_captured": (_INT, [_ID]),
    "begin_capture": (None, [_ID]),
    "end_capture": (_POINTER, []),
    "replay": (None, [_POINTER, _ID]),
    "delete_tape": (None, [_POINTER]),
    "resize_storage": (None, [_POINTER, _SIZE]),
}

#: The library's functions. `activate` sets them.
device = SimpleNamespace()


def _bind(library: ctypes.CDLL) -> None:
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"emu_{name}")
        function.restype = result
        function.argtypes = arguments
        setattr(device, name, function)


def take_reports() -> list[str]:
    """Return the errors that the device has reported since the last call."""
    return device.take_reports().decode().splitlines()


def _index(given: Any) -> int:
    if given is None:
        return device.current_device()
    if isinstance(given, int):
        return given
    index = torch.device(given).index
    return device.current_device() if index is None else index


class Stream(torch.Stream):
    """Replaces `torch.cuda.Stream`."""

    def __new__(cls, device_: Any = None, priority: int = 0, **given: Any) -> Stream:
        if "stream_id" in given:
            index = given["device_index"]
            number = given["stream_id"]
        else:
            index = _index(given.get("device", device_))
            number = device.new_stream(index)
        return super().__new__(cls, stream_id=number, device_index=index, device_type=1)

    @property
    def cuda_stream(self) -> int:
        return device.raw_handle(self.stream_id)

    def wait_stream(self, other: torch.Stream) -> None:
        self.wait_event(Event().recorded(other))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).recorded(self)

    def synchronize(self) -> None:
        device.stream_synchronize(self.stream_id)

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> Stream:
        self._context = on_stream(self)
        self._context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)


class Event:
    """Replaces `torch.cuda.Event`. The elapsed time is always 1 ms."""

    def __init__(self, *options: Any, **named: Any) -> None:
        self._event = device.event_new()

    def recorded(self, stream: torch.Stream) -> Event:
        device.event_record(self._event, stream.stream_id)
        return self

    def record(self, stream: torch.Stream | None = None) -> None:
        self.recorded(stream or current_stream())

    def wait(self, stream: torch.Stream | None = None) -> None:
        device.event_wait(self._event, (stream or current_stream()).stream_id)

    def synchronize(self) -> None:
        device.event_synchronize(self._event)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0

    def __del__(self) -> None:
        device.event_delete(self._event)


def current_stream(given: Any = None) -> Stream:
    index = _index(given)
    return Stream(stream_id=device.current_stream(index), device_index=index)


def default_stream(given: Any = None) -> Stream:
    index = _index(given)
    return Stream(stream_id=index, device_index=index)


def stream_from_external(raw: int, given: Any = None) -> Stream:
    index = _index(given)
    return Stream(stream_id=device.stream_of_handle(raw, index), device_index=index)


class ExternalStream(Stream):
    """Replaces `torch.cuda.ExternalStream`. Like PyTorch's, it makes a new stream for the handle 0."""

    def __new__(cls, raw: int, device_: Any = None, **given: Any) -> ExternalStream:
        if raw == 0:
            return super().__new__(cls, device_, **given)
        index = _index(given.get("device", device_))
        return super().__new__(cls, stream_id=device.stream_of_handle(raw, index), device_index=index)


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Replaces `torch.cuda.stream`: also makes the stream's device current."""
    if stream is None:
        yield
        return
    index = stream.device_index
    device_before = device.current_device()
    before = device.current_stream(index)
    device.set_device(index)
    device.set_stream(index, stream.stream_id)
    try:
        yield
    finally:
        device.set_stream(index, before)
        device.set_device(device_before)


class OnDevice:
    """Replaces `torch.cuda.device`."""

    def __init__(self, given: Any) -> None:
        self.idx = _index(given)

    def __enter__(self) -> None:
        self._before = _exchange_device(self.idx)

    def __exit__(self, *exception: Any) -> None:
        device.set_device(self._before)


def _exchange_device(index: int) -> int:
    before = device.current_device()
    if index >= 0:
        device.set_device(index)
    return before


class CUDAGraph:
    """Replaces `torch.cuda.CUDAGraph` with a recording of operations."""

    def __init__(self, *options: Any, **named: Any) -> None:
        self._tape: int | None = None

    def take_tape(self) -> None:
        self._tape = device.end_capture()

    def replay(self) -> None:
        device.replay(self._tape, device.current_stream(device.current_device()))

    def reset(self) -> None:
        if self._tape is not None:
            device.delete_tape(self._tape)
        self._tape = None

    def pool(self) -> tuple[int, int]:
        return (0, 0)


class Capture:
    """Replaces `torch.cuda.graph`."""

    _default_stream: Stream | None = None

    def __init__(self, graph: CUDAGraph, pool: Any = None, stream: Any = None, **options: Any) -> None:
        if Capture._default_stream is None:
            Capture._default_stream = Stream()
        self._graph = graph
        self._stream = stream or Capture._default_stream

    def __enter__(self) -> None:
        device.device_synchronize()
        gc.collect()
        self._context = on_stream(self._stream)
        self._context.__enter__()
        device.begin_capture(self._stream.stream_id)

    def __exit__(self, *exception: Any) -> None:
        self._graph.take_tape()
        self._context.__exit__(*exception)


def is_capturing() -> bool:
    return bool(device.is_captured(device.current_stream(device.current_device())))


#: The mode that `torch.cuda.set_sync_debug_mode` has set: 0, 1 or 2.
_sync_mode = 0


def _set_sync_debug_mode(mode: int | str) -> None:
    global _sync_mode
    names = {"default": 0, "warn": 1, "error": 2}
    _sync_mode = names[mode] if isinstance(mode, str) else mode
    device.set_sync_mode(_sync_mode)


#: The share of the device's memory that may be allocated.
_memory_fraction = 1.0


def _set_memory_fraction(fraction: float, given: Any = None) -> None:
    global _memory_fraction
    _memory_fraction = fraction
    device.set_limit(int(fraction * MEMORY))


class Properties:
    """The result of `torch.cuda.get_device_properties`."""

    name = NAME
    major, minor = CAPABILITY
    multi_processor_count = 132
    total_memory = MEMORY
    warp_size = 32
    L2_cache_size = 50 << 20
    uuid = "emulated"


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _clone_storage(clone: Callable[..., Any]) -> Callable[..., Any]:
    """Make `UntypedStorage.clone` work for CUDA storages. PyTorch's needs a function that is missing here."""

    def replacement(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return clone(self)
        with torch.no_grad():
            return _bytes_of(self).clone().untyped_storage()

    return replacement


def _copy_storage(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Make `UntypedStorage.copy_` work between host and device."""

    def replacement(
        self: torch.UntypedStorage, source: torch.UntypedStorage, *options: Any
    ) -> torch.UntypedStorage:
        if self.device.type == source.device.type == "cpu":
            return copy(self, source, *options)
        with torch.no_grad():
            _bytes_of(self).copy_(_bytes_of(source))
        return self

    return replacement


def _move_storage(move: Callable[..., Any]) -> Callable[..., Any]:
    """Make `UntypedStorage.to` work for CUDA. PyTorch's cannot make a storage on the device."""

    def replacement(self: torch.UntypedStorage, target: torch.device, *options: Any) -> torch.UntypedStorage:
        if target.type != "cuda":
            return move(self, target, *options)
        with torch.no_grad():
            return _bytes_of(self).to(target, copy=True).untyped_storage()

    return replacement


def _resize_storage(resize: Callable[..., Any]) -> Callable[..., Any]:
    """Make `UntypedStorage.resize_` work for CUDA storages."""

    def replacement(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)
        device.resize_storage(self._cdata, size)
        return self

    return replacement


def activate(library: ctypes.CDLL) -> None:
    """Replace the functions that `torch.cuda` takes from a CUDA build by those of the device's library."""
    _bind(library)
    cuda = torch.cuda
    c = torch._C
    replaced: dict[str, Any] = {
        # Availability and properties.
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: DEVICES,
        "get_device_capability": lambda given=None: CAPABILITY,
        "get_device_properties": lambda given=None: Properties(),
        "get_device_name": lambda given=None: NAME,
        "get_arch_list": lambda: ["sm_90"],
        # The current device.
        "current_device": lambda: device.current_device(),
        "set_device": lambda given: device.set_device(_index(given)),
        "device": OnDevice,
        "_exchange_device": _exchange_device,
        # Dynamo needs two functions.
        "_maybe_exchange_device": lambda index: _exchange_device(index),
        # Streams, events and graphs.
        "Stream": Stream,
        "Event": Event,
        "ExternalStream": ExternalStream,
        "stream": on_stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": lambda stream: device.set_stream(stream.device_index, stream.stream_id),
        "get_stream_from_external": stream_from_external,
        "synchronize": lambda given=None: device.device_synchronize(),
        "set_sync_debug_mode": _set_sync_debug_mode,
        "get_sync_debug_mode": lambda: _sync_mode,
        "_sleep": lambda cycles: None,
        "CUDAGraph": CUDAGraph,
        "graph": Capture,
        "is_current_stream_capturing": is_capturing,
        # Memory.
        "mem_get_info": lambda given=None: (MEMORY - device.allocated_bytes(), MEMORY),
        "memory_allocated": lambda given=None: device.allocated_bytes(),
        "memory_reserved": lambda given=None: device.allocated_bytes(),
        "max_memory_allocated": lambda given=None: device.peak_bytes(),
        "max_memory_reserved": lambda given=None: device.peak_bytes(),
        "reset_peak_memory_stats": lambda given=None: device.reset_peak(),
        "memory_stats": lambda given=None: {},
        "get_per_process_memory_fraction": lambda given=None: _memory_fraction,
        "set_per_process_memory_fraction": _set_memory_fraction,
        "empty_cache": lambda: None,
        # Both devices use the CPU's generator.
        "get_rng_state": lambda given="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, given="cuda": torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * DEVICES,
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    cuda.streams.Stream = Stream
    cuda.streams.Event = Event
    cuda.streams.ExternalStream = ExternalStream
    cuda.graphs.CUDAGraph = CUDAGraph
    cuda.graphs.graph = Capture
    cuda.graphs.is_current_stream_capturing = is_capturing
    torch.backends.cuda.is_built = lambda: True
    cuda.profiler.start = cuda.profiler.stop = lambda: None
    below: dict[str, Any] = {
        "_cuda_isCurrentStreamCapturing": is_capturing,
        "_cuda_getCurrentRawStream": lambda given: device.raw_handle(device.current_stream(_index(given))),
        "_cuda_getDevice": lambda: device.current_device(),
        "_cuda_setDevice": lambda index: device.set_device(index),
        "_cuda_exchangeDevice": _exchange_device,
        "_cuda_maybeExchangeDevice": _exchange_device,
        "_cuda_getDeviceCount": lambda: DEVICES,
        "_cuda_getDefaultStream": lambda index: (index, index, 1),
        "_cuda_CUDAAllocator_AllocatorState": object,
    }
    for name, value in below.items():
        setattr(c, name, value)
    torch.UntypedStorage.clone = _clone_storage(torch.UntypedStorage.clone)
    torch.storage._to = _move_storage(torch.storage._to)
    torch.UntypedStorage.resize_ = _resize_storage(torch.UntypedStorage.resize_)
    torch.UntypedStorage.copy_ = _copy_storage(torch.UntypedStorage.copy_)
