"""Watches a script: wraps functions of torch and registers hooks, and records passes and updates.

- `torch.autograd.backward` and `grad` are wrapped. A hook on each parameter sketches what autograd delivers.
- Hooks before and after every optimizer's `step()` sketch the gradients that it uses.
- `zero_grad`, `clip_grad_norm_` and `GradScaler` are wrapped, to tell what they did to the gradients.

Nothing is changed but attributes of torch's modules and classes, which `stop` puts back.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import statistics
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ..kernels import torch_private
from .amounts import Amount
from .call_sites import call_site
from .frameworks import FrameworkOptimizers
from .guard import CannotAuditError, guarded
from .leaves import GradState, Leaves, grad_state, is_distributed, local_part
from .loss import Loss, Node, read_loss
from .optimizers import OptimizerRecord, Optimizers, parameters_of
from .records import BackwardPass, Equations, History, Update
from .shards import find_unsharded, first_row
from .sketch_sets import SketchPages, SketchSet, mask_of
from .sketches import SketchMap
from .wording import format_count, format_names

#: The key of a pass's number in the metadata of a graph node. A loss that has it went through backward()
#: before.
METADATA_KEY = "fusedacc.audit"
#: The name of autograd's nodes of leaves.
ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
#: Passes without an update, after which the audit ends.
MAX_PASSES = 2**14
#: The position of the argument `retain_graph` of `torch.autograd.backward` and `grad`.
RETAIN_GRAPH = {"backward": 2, "grad": 3}


@dataclass(eq=False)
class OpenUpdate:
    """An update whose `step()` runs.

    Attributes:
        update: what is recorded so far.
        record: its optimizer.
        params: the parameters.
        leaves: numbers of the leaves whose gradients they get.
        sketches: of the gradients that the optimizer uses.
        unclip: by parameter: the factor that undoes what torch's clipping has shrunk alone.
        decay: sketches of the parameters, if other code has changed gradients, maybe by weight decay.
        is_outer: whether the optimizer has called another one, which has made the update.
    """

    update: Update
    record: OptimizerRecord
    params: list[Tensor]
    leaves: list[int]
    sketches: list[Tensor]
    unclip: list[float]
    decay: list[Tensor] = field(default_factory=list)
    is_outer: bool = False


@dataclass(eq=False)
class OpenStep:
    """A call of `step()` that runs.

    Attributes:
        optimizer: whose step it is.
        update: what is recorded; None: there is no gradient, or nothing is recorded yet.
        handle: of the hook that records the update, if the optimizer has hooks of its own.
    """

    optimizer: Any
    update: OpenUpdate | None = None
    handle: RemovableHandle | None = None

    def remove_hook(self) -> None:
        if self.handle is not None:
            self.handle.remove()


class Watcher:
    """Records the passes and updates of a script.

    Args:
        history: where they are recorded.
        on_update: called with each update, the optimizer's last update, and passes with inf or nan.
        on_end_of_step: called after each update, outside of the audit's guard, with the optimizer's number.
        model: names the parameters. None: look for the modules that have them.
    """

    def __init__(
        self,
        history: History,
        on_update: Callable[[Update, Update | None, list[BackwardPass]], None],
        on_end_of_step: Callable[[int], None],
        model: nn.Module | None = None,
    ) -> None:
        self.history = history
        self.optimizers = Optimizers(history, model)
        #: Seconds that the audit took.
        self.seconds = 0.0
        self.is_closed = False
        #: Calls of `step()` of optimizers without any gradient.
        self.steps_without_gradients = 0
        self._on_update = on_update
        self._on_end_of_step = on_end_of_step
        self._leaves = Leaves(self._receive)
        self._sketch = SketchMap().sketch
        self._pages = SketchPages()
        self._current: BackwardPass | None = None
        #: Passes since the last update of any optimizer.
        self._num_waiting = 0
        self._undo: list[Callable[[], None]] = []
        self._step_hooks: list[RemovableHandle] = []
        self._open_steps: list[OpenStep] = []
        #: Names of the nodes at which the search for a loss's reduction has ended.
        self._names_of_ends: set[str] = set()
        #: `Optimizers.versions()` after the last pass.
        self._versions = 0
        #: The loss scale of a GradScaler.
        self._scale: Any = 1.0
        #: By a parameter's id: sketch of p.grad before clip_grad_value_, and state of p.grad after it.
        self._unclipped: dict[int, tuple[Tensor, GradState]] = {}
        self._frameworks = FrameworkOptimizers(self._wrap, self.record_update, self.finish_update)

    # Beginning and end

    def start(self) -> None:
        """Wrap torch's functions, and register the hooks of all optimizers."""
        self._step_hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._wrap(torch.autograd, "backward", functools.partial(self._run_backward, "backward"))
        self._wrap(torch.autograd, "grad", functools.partial(self._run_backward, "grad"))
        self._wrap(Optimizer, "__init__", self._init_optimizer)
        self._wrap(Optimizer, "__setstate__", self._restore_optimizer)
        for owner in (Optimizer, nn.Module):
            self._wrap(owner, "zero_grad", self._zero_grad)
        self._wrap(torch.amp.GradScaler, "scale", self._scaler_scale)
        self._wrap(torch.amp.GradScaler, "unscale_", self._scaler_unscale)
        self._wrap(torch.amp.GradScaler, "step", self._scaler_step)
        # clip_grad_norm_ calls the first by its private name.
        self._wrap(nn.utils.clip_grad, torch_private.CLIP_GRADS_WITH_NORM, self._clip)
        self._wrap(nn.utils, "clip_grads_with_norm_", self._clip)
        for module in (nn.utils, nn.utils.clip_grad):
            self._wrap(module, "clip_grad_value_", self._clip_values)
        self._note_existing_optimizers()

    def stop_watching(self) -> None:
        """Put everything back, and remove all hooks but those of `step()`, which may be running."""
        self.is_closed = True
        while self._undo:
            self._undo.pop()()
        self._leaves.remove_hooks()

    def remove_step_hooks(self) -> None:
        """Remove the hooks of `step()`. Not from inside of them: torch iterates over all such hooks."""
        for step in self._open_steps:  # an exception has ended them
            step.remove_hook()
        for handle in self._step_hooks:
            handle.remove()

    def stop(self, reason: str) -> None:
        """End because the audit cannot look at something, or has failed."""
        self.history.add_note(f"the audit stopped: {reason}")
        self.history.failed = True
        self.stop_watching()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a function by `around(function, *arguments)`."""
        original = getattr(owner, name)

        @functools.wraps(original)  # with its signature: Accelerate reads that of zero_grad
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        def undo() -> None:
            # Other code may have replaced the wrapper, and may call it. The wrapper then only calls on.
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)

        setattr(owner, name, wrapper)
        self._undo.append(undo)

    # Backward passes

    def _run_backward(
        self, how: Literal["backward", "grad"], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a backward pass. Passes inside it belong to it, as in reentrant checkpoints."""
        is_outermost = self._current is None
        name = "tensors" if how == "backward" else "outputs"
        roots = args[0] if args else kwargs.get(name)
        if roots is not None and not isinstance(roots, Tensor | list | tuple):
            # An iterator can be read only once.
            roots = tuple(roots) if hasattr(roots, "__iter__") else (roots,)
            args, kwargs = ((roots, *args[1:]), kwargs) if args else (args, {**kwargs, name: roots})
        given = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        position = RETAIN_GRAPH[how]
        keeps_graph = args[position] if len(args) > position else kwargs.get("retain_graph")
        self._open_pass(how, roots, given, keeps_graph)
        try:
            return call(*args, **kwargs)
        except BaseException:
            if is_outermost and self._current is not None:
                self._current.excused = "failed"
            raise
        finally:
            if is_outermost:
                self._close_pass()

    @guarded
    def _open_pass(
        self, how: Literal["backward", "grad"], roots: Any, given: Any, keeps_graph: bool | None
    ) -> None:
        """Read the graph before it runs: hook its leaves, and find out what the loss is."""
        listed = [roots] if isinstance(roots, Tensor) else list(roots or ())
        tensors = [root for root in listed if isinstance(root, Tensor)]
        has_other_inputs, earlier = self._hook_leaves([root.grad_fn for root in tensors])
        if self._current is not None:
            return
        loss, end = Loss(), None
        if how == "backward" and len(tensors) == 1 and tensors[0].numel() == 1:
            with contextlib.suppress(RuntimeError):  # the graph was freed, or a saved tensor was changed
                loss, end = read_loss(tensors[0].grad_fn)
                given = given[0] if isinstance(given, tuple | list) and given else given
                if isinstance(given, Tensor):
                    loss = replace(loss, factor=loss.factor * abs(float(given)))
        number, site = self.history.num_passes, call_site()
        current = BackwardPass(number, how, loss, site, SketchSet(self._pages), scale=self._scale)
        current.has_other_inputs, current.keeps_graph = has_other_inputs, bool(keeps_graph)
        current.evaluating = self.optimizers.evaluating()
        if end is not None and end.name() == ACCUMULATE_GRAD:  # a leaf's node is in all graphs
            end = None
        own = None if end is None else end.metadata.get(METADATA_KEY)
        current.contains = tuple(each for each in earlier if each != own)
        current.repeats = own
        if end is not None:
            end.metadata[METADATA_KEY] = number
            self._names_of_ends.add(end.name())
        self._current = current
        self._frameworks.wrap_imported()

    def _hook_leaves(self, roots: list[Node]) -> tuple[bool, list[int]]:
        """Watch the parameters of a graph.

        Returns:
            Whether it has a leaf that is no parameter, and earlier passes whose losses are part of it.
        """
        seen: set[Node] = set()
        waiting, has_other_inputs, earlier = list(roots), False, []
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
            name = node.name()
            # Reading `metadata` allocates it, in every node of the graph. That would fragment the heap.
            if name in self._names_of_ends and METADATA_KEY in node.metadata:
                earlier.append(node.metadata[METADATA_KEY])
            if name == ACCUMULATE_GRAD:
                if isinstance(node.variable, nn.Parameter):
                    self._leaves.watch(node.variable)
                elif not self._leaves.is_watched(node.variable):
                    has_other_inputs = True
        return has_other_inputs, earlier

    @guarded
    def _receive(self, number: int, gradient: Tensor) -> None:
        """Sketch a gradient that a backward pass delivers."""
        if type(gradient) not in (Tensor, nn.Parameter):  # a fake tensor
            return
        if gradient.is_meta:
            raise CannotAuditError(
                "the model is on the meta device, where gradients have no numbers: train it on a real device"
            )
        if self._current is None:  # a backward pass that did not go through torch.autograd.backward
            number_of_pass, site = self.history.num_passes, call_site()
            self._current = BackwardPass(number_of_pass, "other", Loss(), site, SketchSet(self._pages))
            torch_private.queue_callback(self._close_pass)
        current = self._current
        if torch.finfo(gradient.dtype).eps > torch.finfo(current.dtype).eps:
            current.dtype = gradient.dtype
        current.num_hooked += self._leaves.is_changed_by_hooks(number, gradient)
        current.sketches.add(number, self._sketch(gradient, gradient.shape))

    @guarded
    def _close_pass(self) -> None:
        current, self._current = self._current, None
        if current is None or not current.sketches:
            return
        current.is_finite = current.sketches.is_finite()
        current.leaves = current.sketches.mask
        leaves = self._leaves.find_all(current.sketches)
        self._leaves.forget_clip_factors(leaves)
        self._unclipped.clear()
        self._versions = self.optimizers.versions()
        if current.how == "backward":
            self._leaves.remember(leaves)
        self.history.passes.append(current)
        self.optimizers.hold(current)
        self._num_waiting += 1
        if self._num_waiting > MAX_PASSES:
            self._stop_without_updates()

    def _stop_without_updates(self) -> None:
        """End the watch, so that memory does not grow in a script that makes no updates any more."""
        if not self.history.num_updates:
            raise CannotAuditError(f"no optimizer made an update in {MAX_PASSES} backward passes")
        self.history.add_note(f"the audit ended after {MAX_PASSES} backward passes without an update")
        self.stop_watching()

    # What other code does with gradients

    def _init_optimizer(self, call: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        call(optimizer, *args, **kwargs)
        self._note_parameters(optimizer)

    def _restore_optimizer(self, call: Callable[..., Any], optimizer: Any, state: Any) -> None:
        call(optimizer, state)
        self._note_restored(optimizer)

    @guarded
    def _note_restored(self, optimizer: Any) -> None:
        """Note that an optimizer was loaded, copied or unpickled.

        Its sums may come from elsewhere, as when a wrapper resumes in the middle of a window. The passes of
        its open window need not count then.
        """
        self._note_parameters(optimizer)
        record = self.optimizers.record_of(optimizer)
        record.is_restored = True
        for each in self.history.window(record.number):
            if each.leaves & record.owned_mask:
                each.excused = each.excused or "used"

    @guarded
    def _note_existing_optimizers(self) -> None:
        """Note the parameters of the optimizers that exist when the audit begins."""
        for each in [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]:
            if hasattr(each, "param_groups"):
                self._note_parameters(each)

    @guarded
    def _note_parameters(self, optimizer: Any) -> None:
        record = self.optimizers.record_of(optimizer)
        for param in parameters_of(optimizer):
            self._own(record, param)

    def _own(self, record: OptimizerRecord, param: Tensor) -> int:
        """Note that an optimizer has a parameter. Return the number of the leaf whose gradients it gets."""
        number = self._leaves.number_of_gradient(param)
        record.owned.setdefault(number, weakref.ref(param))
        record.owned_mask |= 1 << number
        self.history.owned_by_any |= 1 << number
        return number

    def _zero_grad(self, call: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> None:
        are_written = self._are_written()
        call(owner, *args, **kwargs)
        self._note_cleared(owner, bool(are_written))

    @guarded
    def _are_written(self) -> bool:
        """Return whether parameters were written since the last backward pass."""
        return self.optimizers.versions() != self._versions

    @guarded
    def _note_cleared(self, owner: Any, are_written: bool) -> None:
        call = call_site().describe("zero_grad()")
        self.optimizers.note_cleared(owner)
        for each in self.history.passes_since(max(self.history.window_starts.values(), default=0)):
            each.cleared = each.cleared or call
            if are_written:  # code that is no optimizer has changed the parameters, as SAM does
                each.excused = "used"

    def _clip(self, call: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Run torch's clipping, and measure its factor on one element."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before, changed = self._largest_element(params), self._changed(params)
        result = call(params, *args, **kwargs)
        self._note_clipped(params, before, changed or set())
        return result

    @guarded
    def _changed(self, params: list[Tensor]) -> set[int]:
        return self._leaves.changed(params)

    @guarded
    def _largest_element(self, params: list[Tensor]) -> tuple[Tensor, float] | None:
        """Return a view of the largest element of the first gradient that is not zero, and its size."""
        for param in params:
            if param.grad is None or param.grad.layout is not torch.strided:
                continue
            gradient = local_part(param.grad)
            if gradient.numel():
                index = torch.unravel_index(gradient.abs().argmax(), gradient.shape)
                element = gradient[tuple(map(int, index))]  # a view in any memory format
                size = float(element.abs())
                if size and math.isfinite(size):
                    return element, size
        return None

    @guarded
    def _note_clipped(
        self, params: list[Tensor], before: tuple[Tensor, float] | None, changed: set[int]
    ) -> None:
        factor = 1.0
        if before is not None:
            element, size = before
            factor = float(element.abs()) / size
        factor = factor if math.isfinite(factor) else 1.0
        for param in params:
            self._leaves.multiply_clip_factor(param, factor)
            if id(param) in self._unclipped and id(param) not in changed and param.grad is not None:
                sketch, _ = self._unclipped[id(param)]
                self._unclipped[id(param)] = sketch * factor, grad_state(param.grad)
        if self.history.passes:
            self.history.passes[-1].clipped = call_site().line
        # A gradient that other code had changed before still counts as changed.
        self._leaves.remember(param for param in params if id(param) not in changed)

    def _clip_values(self, call: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Sketch gradients before torch clips their elements, because afterwards they are no sum."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before = self._sketch_gradients(params)
        result = call(params, *args, **kwargs)
        self._note_values_clipped(params, before or {})
        return result

    @guarded
    def _sketch_gradients(self, params: list[Tensor]) -> dict[int, Tensor]:
        gradients = [(param, param.grad) for param in params]
        return {
            id(param): self._sketch(gradient, param.shape)
            for param, gradient in gradients
            if gradient is not None and not is_distributed(gradient)
        }

    @guarded
    def _note_values_clipped(self, params: list[Tensor], before: dict[int, Tensor]) -> None:
        changed = self._leaves.changed(params)
        for param in params:
            if id(param) in before and param.grad is not None:
                self._unclipped[id(param)] = before[id(param)], grad_state(param.grad)
        if changed:
            self.history.add_note("clip_grad_value_ clips elements; the weights are those before it")
        self._leaves.remember(params)

    def _scaler_scale(self, call: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        result = call(scaler, outputs)
        self._note_scale(scaler)
        return result

    @guarded
    def _note_scale(self, scaler: Any) -> None:
        scale = scaler._scale if scaler.is_enabled() else None
        self._scale = 1.0 if scale is None else scale.detach().clone()

    def _scaler_unscale(self, call: Callable[..., Any], scaler: Any, optimizer: Any) -> None:
        params = parameters_of(optimizer)
        changed = self._changed(params) or set()
        call(scaler, optimizer)
        self._remember([param for param in params if id(param) not in changed])

    @guarded
    def _remember(self, params: list[Tensor]) -> None:
        self._leaves.remember(params)

    def _scaler_step(
        self, call: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        before = self.history.num_updates
        result = call(scaler, optimizer, *args, **kwargs)
        is_skipped = self.history.num_updates == before and scaler.is_enabled()
        # The wrapper of this project counts micro-batches in step().
        if is_skipped and not hasattr(optimizer, "micro_step"):
            self._skip_window(optimizer)
        return result

    @guarded
    def _skip_window(self, optimizer: Any) -> None:
        """Note that an update does not take place, because gradients have inf or nan."""
        number = self.optimizers.record_of(optimizer).number
        self._leaves.forget_clip_factors(parameters_of(optimizer))
        for each in self.history.window(number):
            each.excused = "nonfinite"
        self.history.window_starts[number] = self.history.num_passes

    # Updates

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_closed:
            return None
        step = OpenStep(optimizer)
        for each in self._open_steps:
            if each.optimizer is optimizer:  # an exception has ended it
                each.remove_hook()
        self._open_steps = [each for each in self._open_steps if each.optimizer is not optimizer] + [step]
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

        def record(*_: Any) -> None:
            step.update = self._record_step(optimizer)

        if not callable(closure):
            if optimizer._optimizer_step_pre_hooks:  # they may change gradients, so look after them
                step.handle = optimizer.register_step_pre_hook(record)
            else:
                record()
            return None

        def watched_closure(*closure_args: Any, **closure_kwargs: Any) -> Any:
            if step.update is not None:  # an earlier evaluation of this step, as LBFGS makes
                self.finish_update(optimizer, step.update)
                step.update = None
            result = closure(*closure_args, **closure_kwargs)
            record()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched_closure}
        return (args[0], watched_closure, *args[2:]), kwargs

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._open_steps and self._open_steps[-1].optimizer is optimizer:
            step = self._open_steps.pop()
            step.remove_hook()
            self.finish_update(optimizer, step.update)

    def _record_step(self, optimizer: Any) -> OpenUpdate | None:
        params = parameters_of(optimizer)
        return self.record_update(optimizer, params, used_gradients(optimizer, params))

    @guarded
    def record_update(
        self, optimizer: Any, params: list[Tensor], gradients: Sequence[Tensor | None]
    ) -> OpenUpdate | None:
        """Sketch the gradients that an optimizer is about to use. None: it makes no update."""
        record = self.optimizers.record_of(optimizer)
        params, gradients = self._visible(params, gradients)
        self._find_substitutes(record, params, gradients)
        leaves = [self._own(record, param) for param in params]
        found_inf = getattr(optimizer, "found_inf", None)  # of a GradScaler, for a fused optimizer
        if found_inf is not None and float(found_inf):
            self._skip_window(optimizer)
            return None
        passes = self.history.window(record.number)
        passes += [] if self._current is None else [self._current]  # an optimizer that steps inside backward
        mask = mask_of(leaves)
        passes = [each for each in passes if each.sketches.mask & mask]
        if all(each is None for each in gradients) and not record.is_cleared:
            self.steps_without_gradients += 1
            return None
        update = Update(record.number, passes, call_site())
        update.is_restored = record.is_restored
        open_update = OpenUpdate(update, record, params, leaves, [], [])
        if _only_makes_state(optimizer, gradients):
            return None
        scale = getattr(optimizer, "grad_scale", None)  # by which a fused optimizer divides
        for param, gradient in zip(params, gradients, strict=True):
            sketch = self._sketch_used(update, param, gradient)
            open_update.sketches.append(sketch if scale is None else sketch / float(scale))
        update.is_touched |= scale is not None
        self._note_clipping(open_update)
        if update.is_touched and not update.is_sharded:
            open_update.decay = [self._sketch(param, param.shape) for param in params]
        return open_update

    def _visible(
        self, params: list[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Leave out parameters whose gradients modules add to main_grad by themselves."""
        hidden = [getattr(param, "grad_added_to_main_grad", False) for param in params]
        if not any(hidden):
            return params, gradients
        self.history.add_note(
            f"{sum(hidden)} of {len(params)} parameters were not checked: modules add their gradients to "
            "main_grad by themselves, so autograd delivers none (in Megatron-Core: "
            "gradient_accumulation_fusion)"
        )
        return (
            [param for param, is_hidden in zip(params, hidden, strict=True) if not is_hidden],
            [gradient for gradient, is_hidden in zip(gradients, hidden, strict=True) if not is_hidden],
        )

    def _sketch_used(self, update: Update, param: Tensor, gradient: Tensor | None) -> Tensor:
        if gradient is None:
            return self._sketch(torch.zeros(0, device=param.device), param.shape)
        if is_distributed(gradient):
            update.is_sharded = True
            return self._sketch(local_part(gradient), gradient.shape, first_row(gradient))
        update.dtype = gradient.dtype
        update.is_touched |= self._leaves.is_changed(param, gradient)
        unclipped, state = self._unclipped.get(id(param), (None, None))
        if unclipped is not None and state == grad_state(gradient):
            return unclipped
        return self._sketch(gradient, param.shape)

    def _note_clipping(self, open_update: OpenUpdate) -> None:
        """Note the factor of the clipping. Parameters that torch's clipping shrank alone get a note."""
        factors = [self._leaves.clip_factor(param) for param in open_update.params]
        usual = statistics.median_low(factors or [1.0])
        open_update.update.clipped = usual or 1.0  # a clipping to 0 leaves nothing to judge
        open_update.unclip = [usual / factor if factor and usual else 1.0 for factor in factors]

    def finish_update(self, optimizer: Any, open_update: OpenUpdate | None) -> None:
        """Keep an update that has taken place."""
        if open_update is None or open_update.is_outer or self.is_closed:
            return
        params = {*map(id, open_update.params)}
        for step in self._open_steps:  # optimizers that call this one
            if step.optimizer is not optimizer:
                number = self.optimizers.record_of(step.optimizer).number
                self.history.window_starts[number] = self.history.num_passes
            outer = step.update
            if outer is not None and outer is not open_update and params & {*map(id, outer.params)}:
                outer.is_outer = True
        self._keep(optimizer, open_update)
        self._on_end_of_step(open_update.record.number)

    @guarded
    def _keep(self, optimizer: Any, open_update: OpenUpdate) -> None:
        history, record, update = self.history, open_update.record, open_update.update
        number = record.number
        update.misses_passes = record.misses_passes
        record.is_cleared = record.misses_passes = False
        self._num_waiting = 0
        if number not in history.optimizers:
            history.optimizers[number] = len(history.optimizers), type(optimizer).__name__
            if dist.is_available() and dist.is_initialized():
                history.rank, history.num_ranks = dist.get_rank(), dist.get_world_size()
        history.update_counts[number] += 1
        record.used_at = history.num_updates
        history.window_starts[number] = history.num_passes + (self._current is not None)
        self.optimizers.name_parameters(record, open_update.params)
        update.number, update.names, update.shapes = (
            history.update_counts[number],
            record.names,
            record.shapes,
        )
        self._note_lone_clipping(open_update)
        # A backward pass forgets only those of leaves: not those of FSDP2's shards and of float32 copies.
        self._leaves.forget_clip_factors(open_update.params)
        for each in update.passes:
            each.scale = float(each.scale)
        originals = find_repetitions(update)
        evaluating = frozenset(each.number for each in update.passes if number in each.evaluating)
        update.evaluating = evaluating if len(evaluating) < len(update.passes) else frozenset()
        dtypes = [update.dtype, *(each.dtype for each in update.passes)]
        update.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        infinite = [each for each in update.passes if not each.is_finite]
        update.passes = [each for each in update.passes if each.is_finite and originals[each.number] is each]
        update.equations = make_equations(open_update)
        record.last_sketches = SketchSet(self._pages)
        for leaf, sketch in zip(open_update.leaves, open_update.sketches, strict=True):
            if leaf not in record.last_sketches:
                record.last_sketches.add(leaf, sketch)
        former, record.last_update, record.is_restored = record.last_update, update, False
        self._on_update(update, former, infinite)
        self.optimizers.free_sketches()

    def _note_lone_clipping(self, open_update: OpenUpdate) -> None:
        names = open_update.update.names
        alone = [
            names[i]
            for i, factor in enumerate(open_update.unclip)
            if not math.isclose(factor, 1, rel_tol=0.02)
        ]
        if alone:
            self.history.add_note(
                f"{format_names(alone)}: clip_grad_norm_ shrinks them by another factor than the rest"
            )

    def _find_substitutes(
        self, record: OptimizerRecord, params: list[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        """Find the parameters that get the gradients of others: FSDP2's shards, and float32 copies."""
        if any(map(is_distributed, params)):
            if record.number in self.history.optimizers:
                return
            for shard, whole in find_unsharded():
                self._leaves.let_stand_for(shard, whole)
            for each in self.optimizers:  # so that passes are kept for optimizers that step later
                for reference in list(each.owned.values()):
                    if (param := reference()) is not None:
                        self._own(each, param)
        else:
            self._find_copies(record, dict(zip(params, gradients, strict=True)))

    def _find_copies(self, record: OptimizerRecord, gradients: dict[Tensor, Tensor | None]) -> None:
        """Match an optimizer's copies, by their values, with the parameters that get gradients.

        A parameter without a gradient in the first update is matched in a later one.
        """
        if record.number in self.history.optimizers:
            if not self._leaves.has_substitutes:
                return
            params = [param for param in gradients if not self._leaves.is_substituted(param)]
            if not 0 < len(params) < len(gradients):
                return
            gradients = {param: gradients[param] for param in params}
        numbers = {number for each in self.history.window(record.number) for number in each.sketches}
        if not numbers.isdisjoint(map(self._leaves.watch, gradients)):
            return
        free = self._leaves.find_all(numbers - self.optimizers.owned_numbers())
        for param, gradient in gradients.items():
            equal = [
                leaf
                for leaf in free
                if leaf.shape == param.shape and torch.equal(leaf, param.to(leaf.device, leaf.dtype))
            ]
            if gradient is not None and equal:
                found = max(equal, key=lambda leaf: self._likeness(record, leaf, gradient))
                free = [leaf for leaf in free if leaf is not found]
                number = self._leaves.let_stand_for(param, found)
                record.owned.pop(number, None)
                record.owned_mask &= ~(1 << number)

    def _likeness(self, record: OptimizerRecord, leaf: Tensor, gradient: Tensor) -> float:
        """Return the cosine of a gradient and the sum of what the window's passes deliver to a leaf.

        It tells parameters of equal values apart, as those of normalization layers at the beginning.
        """
        number, wanted = self._leaves.watch(leaf), self._sketch(gradient, leaf.shape)
        passes = [each.sketches for each in self.history.window(record.number) if number in each.sketches]
        total = torch.stack([sketches[number] for sketches in passes]).sum(0)
        return float(torch.nn.functional.cosine_similarity(total, wanted.to(total.device), dim=0))


def used_gradients(optimizer: Any, params: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradients that an optimizer uses.

    torch's own optimizers use p.grad. Others may use `main_grad`, in which Megatron-Core and Primus add the
    gradients of all micro-batches.
    """
    step = getattr(type(optimizer), "step", None)
    is_of_torch = getattr(step, "__module__", "").startswith("torch.")
    return [param.grad if is_of_torch else _main_grad(param) for param in params]


def _only_makes_state(optimizer: Any, gradients: Sequence[Tensor | None]) -> bool:
    """Return whether a step changes nothing, as `torch.distributed.checkpoint` makes it before it loads."""
    rates = [group.get("lr", 1.0) for group in getattr(optimizer, "param_groups", ())]
    if not rates or any(rates):
        return False
    given = [gradient for gradient in gradients if gradient is not None]
    return bool(given) and not any(map(torch.any, given))


def _main_grad(param: Tensor) -> Tensor | None:
    """Return `main_grad` if there is one and other code has added to it, else p.grad."""
    main_grad = getattr(param, "main_grad", None)
    if isinstance(main_grad, Tensor) and (param.grad is None or bool(main_grad.any())):
        return main_grad
    return param.grad


def find_repetitions(update: Update) -> dict[int, BackwardPass]:
    """Find losses that go through backward() twice, and count their runs.

    Returns:
        By a pass's number: the first pass of the same loss.
    """
    originals = {each.number: each for each in update.passes}
    for each in update.passes:
        original = None if each.repeats is None else originals.get(each.repeats)
        if original is not None and all(
            torch.allclose(each.sketches[leaf], original.sketches[leaf]) for leaf in each.sketches
        ):
            original.runs += 1
            originals[each.number], each.excused = original, "used"
    contained = Counter(
        originals[number].number for each in update.passes for number in each.contains if number in originals
    )
    if contained:
        number, count = contained.most_common(1)[0]
        times = float(count + 1)
        text = "a loss that went through backward() is part of a later loss, so it counts up to {times.most} "
        text += "times"
        amounts = {"times": Amount.of(format_count, times)}
        update.add_problem("double", "part", text, at=originals[number], factor=times, amounts=amounts)
    return originals


def make_equations(open_update: OpenUpdate) -> Equations:
    """Put the sketches of an update into columns."""
    sketches, leaves = open_update.sketches, open_update.leaves

    def column(known: SketchSet | None) -> Tensor:
        parts = [
            torch.zeros_like(sketch) if known is None or leaf not in known else known[leaf]
            for leaf, sketch in zip(leaves, sketches, strict=True)
        ]
        return torch.cat(parts).cpu()

    used = torch.cat([each * factor for each, factor in zip(sketches, open_update.unclip, strict=True)]).cpu()
    columns = [column(each.sketches) for each in open_update.update.passes]
    passes = torch.stack(columns, 1) if columns else used.new_zeros(len(used), 0)
    owners = torch.repeat_interleave(torch.tensor([len(sketch) for sketch in sketches], device="cpu"))
    decay = torch.cat(open_update.decay).cpu() if open_update.decay else None
    return Equations(passes, used, column(open_update.record.last_sketches), owners, decay)
