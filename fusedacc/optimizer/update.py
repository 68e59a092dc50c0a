"""The update: combine norm, clipping, unscaling and skipping into one multiplier, then run the optimizer.

The multiplier stays on the device and is applied when a kernel reads the gradients anyway. With
`master_weights` the inner optimizer updates the float32 master weights. The update synchronises with a GPU
only if it may have to be skipped and the inner optimizer cannot skip it by itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from ..accumulators import Accumulators, Slot
from ..accumulators.deferred_scale import to_device_of
from ..accumulators.p_grad import SumsForUpdate
from ..accumulators.param import nothing
from ..autograd.registration import HookRegistry
from ..distributed import mesh_norm
from ..kernels import launch_events, norms, torch_state
from ..kernels.constants import norm_kind
from ..kernels.local_parts import is_distributed
from ..kernels.torch_private import FakeTensor, disable_dispatch_modes
from ..kernels.torch_state import to_device
from .master_weights import MasterWeights
from .window import Window

#: torch's optimizers whose fused kernels divide by `grad_scale` and do nothing if `found_inf` is 1.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
#: The same as in torch.nn.utils.clip_grad_norm_.
EPSILON = 1e-6
#: Numbers between this and its inverse are far from overflow and underflow in float32.
MOST = 1e30
_FLOAT32 = struct.Struct("f")


@dataclass(frozen=True)
class UpdateSettings:
    """The wrapper's arguments for clipping and skipping; `checked` validates them."""

    max_grad_norm: float | None
    norm_type: float
    skip_nonfinite: bool

    @classmethod
    def checked(cls, max_grad_norm: Any, norm_type: Any, skip_nonfinite: bool) -> UpdateSettings:
        """Return the settings with numbers as floats, or raise TypeError or ValueError."""
        for name, value in (("max_grad_norm", max_grad_norm), ("norm_type", norm_type)):
            if isinstance(value, bool) or not isinstance(value, Real | None):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0, or None for no clipping; got {max_grad_norm}")
        kind = norm_kind(norm_type)
        return cls(None if max_grad_norm is None else float(max_grad_norm), kind.norm_type, skip_nonfinite)


def takes_scale(inner: Optimizer) -> bool:
    """Whether the inner optimizer's kernel applies `grad_scale` and honours `found_inf`."""
    return type(inner) in FUSED and all(group.get("fused") for group in inner.param_groups)


class Scaling:
    """The multiplier of an update's gradients, and whether they are finite; both may be on the device.

    Args:
        loss_scale: 0-dim; divides the gradients.
        found_inf: 0-dim float32; 1 if the update must be skipped; None: not known yet.
        checks: whether the caller needs `found_inf`.
    """

    def __init__(
        self, loss_scale: Tensor | None = None, found_inf: Tensor | None = None, *, checks: bool = False
    ) -> None:
        # float64 keeps all digits of float64 accumulators and of the reciprocal of a large scale.
        self.multiplier: float | Tensor | None = None
        if loss_scale is not None:
            self.multiplier = loss_scale.double().reciprocal()
        self.found_inf = found_inf
        self.checks = checks
        #: Returns the `Scaling` for the next window, if a `flush()` makes several updates.
        self.go_on: Callable[[], Scaling] | None = None

    def drop_if(self, flag: Tensor) -> None:
        """Skip the update also if `flag`, a 0-dim float32 tensor, is 1."""
        before = self.found_inf
        self.found_inf = flag if before is None else torch.maximum(before, to_device(flag, before.device))

    def multiply(self, ratio: float | Tensor) -> None:
        """Multiply the gradients by one more factor."""
        if isinstance(ratio, Tensor) or ratio != 1.0:
            before = self.multiplier
            self.multiplier = ratio if before is None else before * to_device_of(ratio, before)


class UpdateResult(NamedTuple):
    """What an update has done.

    Attributes:
        returned: what the inner optimizer's step has returned.
        skipped: whether the host has skipped the step.
    """

    returned: Any
    skipped: bool


class Update:
    """Runs the inner optimizer on the final gradients."""

    def __init__(
        self,
        inner: Optimizer,
        accumulators: Accumulators,
        window: Window,
        registry: HookRegistry,
        masters: MasterWeights | None,
        settings: UpdateSettings,
    ) -> None:
        self.settings = settings
        #: The norm of the last update's gradient before clipping: 0-dim; None if it was not computed.
        self.grad_norm: Tensor | None = None
        #: Whether the last `prepare` has scaled the accumulators or replaced them by scaled casts. It must
        #: not run twice then, so an exception taints the window.
        self.has_scaled_sums = False
        #: Number of updates skipped on the device: 0-dim int64, or None before the first that could be.
        self.skipped: Tensor | None = None
        #: A weak reference to the `PipelineSteps` if a pipeline schedule is attached.
        self.pipeline: Callable[[], Any] = nothing
        self._inner = inner
        self._accumulators = accumulators
        self._window = window
        self._registry = registry
        self._masters = masters
        self.expect_norm(is_scaled=False)

    def expect_norm(self, is_scaled: bool) -> None:
        """Note whether the next update needs the norm. is_scaled: whether its losses are scaled."""
        settings = self.settings
        needs_norm = is_scaled or settings.max_grad_norm is not None or settings.skip_nonfinite
        self._accumulators.update_needs_norm = needs_norm

    def describe(self, casts: bool) -> str:
        """Say what happens to the final accumulators. casts: whether they may be cast: no master weights."""
        asked = []
        if self.settings.max_grad_norm is not None:
            kind = norm_kind(self.settings.norm_type).name
            asked.append(f"clip to {kind} norm {self.settings.max_grad_norm:g}")
        if self.settings.skip_nonfinite:
            asked.append("skip updates with inf or nan")
        slots = self._accumulators.slots
        is_cast = casts and any(slot.update_dtype != slot.accumulate_dtype for slot in slots)
        name = type(self._inner).__name__
        if not asked:
            cast = "cast to the dtype of p.grad, " if is_cast else ""
            return f"{cast}then {name}; a loss scale or device weights would be folded in"
        if takes_scale(self._inner):
            where = "in the pass that casts" if is_cast else f"inside {name}'s fused kernel"
        else:
            one_pass = "in one pass, with the cast" if is_cast else "in one pass"
            where = f"{one_pass}; {name} does not scale by itself"
            if self.settings.skip_nonfinite:
                where += "; dropping waits for the device"
        return f"{', '.join(asked)} {where}; p.grad is read for the norm"

    def step(
        self, ratio: float | Tensor | None, scaling: Scaling, arguments: Mapping[str, Any]
    ) -> UpdateResult:
        """Run the inner optimizer's step on the accumulators times `ratio`; None skips it, as all weights
        are 0. Sets `scaling.found_inf` if needed.
        """
        if ratio is None:
            return UpdateResult(None, skipped=True)
        if self._registry.reshaped:
            self._check_state()
        invalid = self._window.weights_invalid if isinstance(ratio, Tensor) else None
        if invalid is not None:
            scaling.drop_if(invalid)
        scaling.multiply(ratio)
        try:
            with launch_events.phase("update"), self.on_masters():
                kernel_skips = self.prepare(scaling)
                found_inf = scaling.found_inf
                if found_inf is not None and not kernel_skips and self._is_set(found_inf):
                    return UpdateResult(None, skipped=True)
                if found_inf is not None and kernel_skips:
                    if self.skipped is None:
                        self.skipped = torch.zeros((), dtype=torch.int64, device=found_inf.device)
                    self.skipped += to_device(found_inf.ne(0), self.skipped.device)
                return UpdateResult(self._step_inner(arguments), skipped=False)
        except BaseException:
            if self.has_scaled_sums:
                self._window.tainted = "an exception has interrupted an update that had scaled its gradients"
            raise
        finally:
            self.release()

    def _step_inner(self, arguments: Mapping[str, Any]) -> Any:
        try:
            return self._inner.step(**arguments)
        except RuntimeError as error:
            if not self._window.dropped_graph:
                raise
            raise RuntimeError(
                f"{type(self._inner).__name__}.step() failed. The gradients of backward(create_graph=True) "
                "had a graph, and the window's sums do not keep it. If this step() differentiates p.grad, "
                "use gradient_accumulation_steps=1, with accumulate_dtype equal to the parameters' dtype, or "
                "the manual loop (gradient_accumulation_steps=None)"
            ) from error

    @contextlib.contextmanager
    def on_masters(self, slots: list[Slot] | None = None) -> Iterator[None]:
        """Context: the parameters of `slots` (None: all with gradients) are their float32 masters, if any."""
        if self._masters is None:
            yield
            return
        if slots is None:
            slots = self._accumulators.sums_for_update().slots
        try:
            with self._masters.swapped(slots):
                yield
        finally:
            self._registry.reregister(slots)

    def _check_state(self) -> None:
        """Raise if the optimizer's state has a parameter's old shape: fused kernels write out of bounds."""
        for slot, former in self._registry.reshaped.items():
            if self._accumulators.grads.current(slot) is None:
                continue
            for name, value in self._inner.state.get(slot.param, {}).items():
                shape = value.shape if isinstance(value, Tensor) and value.dim() else slot.shape
                if shape in former and shape != slot.param.shape:
                    raise RuntimeError(
                        f"the optimizer's state {name!r} of parameter {slot.name!r} is of shape "
                        f"{tuple(shape)}, the parameter's former shape; it is {tuple(slot.param.shape)} "
                        "now. Delete optimizer.state[parameter], or give it tensors of the new shape, and "
                        "call step() again"
                    )

    def _is_set(self, found_inf: Tensor) -> bool:
        """Whether the flag is 1. Synchronises with a GPU."""
        if torch_state.capturing():
            raise RuntimeError(
                f"an update that may be dropped cannot be captured with {type(self._inner).__name__} here: "
                "the host would decide. Allowed: Adam, AdamW, SGD and Adagrad with fused=True, after a first "
                "update"
            )
        return type(found_inf) is not FakeTensor and bool(found_inf.item())

    def release(self) -> None:
        """Remove the `grad_scale` and `found_inf` that `prepare` gave to the inner optimizer."""
        for name in ("grad_scale", "found_inf"):
            self._inner.__dict__.pop(name, None)

    def prepare(self, scaling: Scaling) -> bool:
        """Prepare every p.grad, and return whether the inner optimizer's kernel skips on inf and nan."""
        self.has_scaled_sums = False
        sums = self._accumulators.sums_for_update()
        multiplier = self._measure(scaling, sums)
        # With accumulators on CPU and GPU, torch's CPU kernel reads the scale before it arrives.
        kernel = takes_scale(self._inner) and len(sums.on_gpu) < 2
        # The kernel's float32 scale would cost float64 its digits, and casts must be scaled before.
        uniform = not sums.need_casts and torch.float64 not in sums.dtypes
        if kernel and multiplier is not None and uniform:
            device = sums.tensors[0].device if sums.tensors else None
            self._accumulators.fill_p_grad(sums)
            if isinstance(multiplier, Tensor):
                divisor = multiplier.reciprocal().float()
            else:
                divisor = torch.full((), 1.0 / multiplier, dtype=torch.float32, device=device)
            # Only optimizers whose kernel divides have this attribute. torch's GradScaler sets it too.
            self._inner.grad_scale = divisor  # type: ignore[attr-defined]
        else:
            self.has_scaled_sums = multiplier is not None
            self._accumulators.fill_p_grad(sums, 1.0 if multiplier is None else multiplier)
        if scaling.found_inf is None or not kernel or self._would_leave_garbage():
            return False
        self._inner.found_inf = scaling.found_inf  # type: ignore[attr-defined]
        return True

    def _measure(self, scaling: Scaling, sums: SumsForUpdate) -> float | Tensor | None:
        """Return the multiplier of the accumulators, including clipping; None means 1."""
        multiplier = scaling.multiplier
        checks = self.settings.skip_nonfinite or scaling.checks
        pipeline = self.pipeline()
        if pipeline is not None and scaling.found_inf is not None:
            scaling.found_inf = pipeline.any_rank(scaling.found_inf)
        if self.settings.max_grad_norm is None and not checks:
            self.grad_norm = None
            return multiplier
        dtype = torch.float64 if torch.float64 in sums.dtypes else torch.float32
        if pipeline is not None:
            norm, nonfinite = pipeline.whole_norm(dtype)
        elif not sums.tensors:
            self.grad_norm = None
            return multiplier
        else:
            norm, nonfinite = self._norm(sums, dtype)
        if multiplier is not None:
            norm = (norm * to_device_of(multiplier, norm)).to(norm.dtype)
        self.grad_norm = norm
        if checks:
            scaling.drop_if(nonfinite)
        if self.settings.max_grad_norm is None:
            return multiplier
        # Not with casts: a scaled cast frees its accumulator before the inner optimizer runs
        # (`ParamGrads.place_cast`). If the host found that the scale is 1, both would be in memory.
        on_host = type(norm) is Tensor and norm.device.type == "cpu" and not sums.need_casts
        if multiplier is None and on_host:
            known = clip_on_host(norm, self.settings.max_grad_norm)
            if known is not None:
                return None if known == 1.0 else known
        clip = (self.settings.max_grad_norm / (norm + EPSILON)).clamp(max=1.0)
        return clip if multiplier is None else clip * to_device_of(multiplier, clip)

    def own_norm(self) -> Tensor:
        """Return the norm of this wrapper's accumulators in float64, 0 if there are none."""
        sums = self._accumulators.sums_for_update()
        device = sums.tensors[0].device if sums.tensors else None
        zero = torch.zeros(1, dtype=torch.float64, device=device)  # float64 makes the norm float64
        return self._norm(sums, torch.float64, zero)[0] if sums.tensors else zero[0]

    def _norm(self, sums: SumsForUpdate, dtype: torch.dtype, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Return the accumulators' norm and a float32 flag for inf and nan.

        others: partial norms of other tensors.
        """
        tensors = sums.tensors
        has_subclasses = not set(map(type, tensors)) <= {Tensor}
        module = mesh_norm if has_subclasses and any(map(is_distributed, tensors)) else norms
        return module.norm_with_partials(
            tensors, list(others), self.settings.norm_type, dtype, self._accumulators.backend
        )

    def _would_leave_garbage(self) -> bool:
        """Whether a skipped first step would leave torch's fused SGD with uninitialised momentum buffers."""
        state = self._inner.state
        return type(self._inner) is torch.optim.SGD and any(
            group["momentum"] and state.get(param, {}).get("momentum_buffer") is None
            for group in self._inner.param_groups
            for param in group["params"]
            if param.requires_grad
        )

    # Distributed checkpoint creates the state of a new optimizer this way: it assigns zero gradients, sets
    # every lr to 0 and calls step() once (torch.distributed.checkpoint.state_dict, `_init_optim_state`).

    def is_asked_for_state(self) -> bool:
        """Whether a `step()` now is that call of distributed checkpoint."""
        if self._inner.state or any(group.get("lr", 1.0) != 0.0 for group in self._inner.param_groups):
            return False
        trained = [slot for slot in self._accumulators.slots if slot.param.requires_grad]
        # This synchronises with a GPU, but only while there is no state yet and every lr is 0.
        return bool(trained) and all(map(_was_given_zeros, trained))

    def make_state(self) -> None:
        """Let the inner optimizer create its state from the zeros in p.grad."""
        with_zeros = [slot for slot in self._accumulators.slots if slot.param.grad is not None]
        with self.on_masters(with_zeros):
            if self._masters is not None:
                for slot in with_zeros:
                    gradient = slot.param.grad
                    assert gradient is not None
                    slot.param.grad = None
                    slot.param.grad = gradient.to(slot.param.dtype)
            self._inner.step()


def _was_given_zeros(slot: Slot) -> bool:
    """Whether p.grad holds zeros that other code has put there."""
    gradient = slot.param.grad
    if gradient is None or slot.is_placed(gradient) or gradient.grad_fn is not None:
        return False
    return not gradient.any()


def clip_on_host(norm: Tensor, limit: float) -> float | None:
    """Return the clipping factor that torch's operators would compute from a norm on the CPU, bit for bit;
    None unless the norm is float32, and it and the factor are far from the ends of its range.

    A number costs less than five operators on one element, and a factor of 1 no pass over the gradients.
    """
    size = norm.item() if norm.dtype is torch.float32 else math.nan
    if not (size < MOST and 1 / MOST < limit < MOST):
        return None
    # float64 rounds sums, products and quotients of float32 numbers so that the second rounding is exact.
    factor = _single(_single(1.0 / _single(size + _single(EPSILON))) * _single(limit))
    return min(factor, 1.0) if factor > 1 / MOST else None


def _single(number: float) -> float:
    """Round to float32."""
    return _FLOAT32.unpack(_FLOAT32.pack(number))[0]


#: Vector lengths, in elements, of the CPUs that torch has kernels for.
VECTORS = (4, 8, 16, 32, 64, 128)


@functools.cache
def unwritten_from(dtype: torch.dtype) -> int | None:
    """Return the smallest size that torch's fused SGD on a CPU fails to write; None: it writes all.

    In torch 2.13 its loop over full vectors of 16-bit parameters stores nothing; only the remaining elements
    are written (pytorch/pytorch#191763).
    """
    with disable_dispatch_modes(), torch.no_grad():
        for size in VECTORS:
            param = torch.zeros(size, dtype=dtype)
            gradient = torch.ones(size, dtype=dtype)
            sgd(
                [param],
                [gradient],
                [None],
                fused=True,
                lr=1.0,
                weight_decay=0.0,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            if not bool(param.all()):
                return size
    return None


def warn_of_unwritten(inner: Optimizer, groups: Iterable[dict[str, Any]], stacklevel: int) -> None:
    """Warn if a step of `inner` leaves a parameter of these groups unwritten."""
    if not isinstance(inner, torch.optim.SGD):
        return
    for param in itertools.chain.from_iterable(group["params"] for group in groups if group.get("fused")):
        if param.device.type == "cpu" and param.dtype in (torch.bfloat16, torch.float16):
            size = unwritten_from(param.dtype)
            if size is not None and param.numel() >= size:
                dtype = str(param.dtype).removeprefix("torch.")
                warnings.warn(
                    f"SGD(fused=True) of torch {torch.__version__} leaves most elements of {dtype} "
                    f"parameters of {size} elements and more on a CPU unwritten: they do not train, with or "
                    "without this wrapper (pytorch/pytorch#191763). Set fused=False or master_weights=True",
                    stacklevel=stacklevel,
                )
                return
