"""Backward passes: `torch.autograd.backward` and `grad` are wrapped, and hooks sketch what they deliver."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..kernels import torch_private
from .call_sites import call_site
from .guard import CannotAuditError, guarded
from .kept_gradients import look_at_kept
from .loss import Loss, Node, read_loss
from .records import BackwardPass
from .sketch_sets import SketchSet
from .watch_state import WatchState

#: The key of a pass's number in the metadata of a graph node. A loss that has it went through backward()
#: before.
METADATA_KEY = "fusedacc.audit"
#: The name of autograd's nodes of leaves.
ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
#: Passes without an update, after which the audit ends.
MAX_PASSES = 2**14
#: The position of the argument `retain_graph` of `torch.autograd.backward` and `grad`.
RETAIN_GRAPH = {"backward": 2, "grad": 3}


class BackwardPasses:
    """Records backward passes.

    Args:
        watch: the state of the watch.
        before_pass: called before each pass, for modules that were imported since.
    """

    def __init__(self, watch: WatchState, before_pass: Callable[[], None]) -> None:
        self.watch = watch
        self._before_pass = before_pass
        watch.leaves.receive = self._receive
        #: Names of the nodes at which the search for a loss's reduction has ended.
        self._names_of_ends: set[str] = set()

    def start(self) -> None:
        """Wrap the functions that run backward passes."""
        self.watch.wrap(torch.autograd, "backward", functools.partial(self._run_backward, "backward"))
        self.watch.wrap(torch.autograd, "grad", functools.partial(self._run_backward, "grad"))

    def _run_backward(
        self, how: Literal["backward", "grad"], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a backward pass. Passes inside it belong to it, as in reentrant checkpoints."""
        is_outermost = self.watch.current is None
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
            if is_outermost and self.watch.current is not None:
                self.watch.current.excused = "failed"
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
        if self.watch.current is not None:
            return
        loss, end = Loss(), None
        if how == "backward" and len(tensors) == 1 and tensors[0].numel() == 1:
            with contextlib.suppress(RuntimeError):  # the graph was freed, or a saved tensor was changed
                loss, end = read_loss(tensors[0].grad_fn)
                given = given[0] if isinstance(given, tuple | list) and given else given
                if isinstance(given, Tensor):
                    loss = replace(loss, factor=loss.factor * abs(float(given)))
        watch, site = self.watch, call_site()
        number, sketches = watch.history.num_passes, SketchSet(watch.pages)
        current = BackwardPass(number, how, loss, site, sketches, scale=watch.loss_scale)
        current.has_other_inputs, current.keeps_graph = has_other_inputs, bool(keeps_graph)
        current.evaluating = self.watch.optimizers.evaluating()
        if end is not None and end.name() == ACCUMULATE_GRAD:  # a leaf's node is in all graphs
            end = None
        own = None if end is None else end.metadata.get(METADATA_KEY)
        current.contains = tuple(each for each in earlier if each != own)
        current.repeats = own
        if end is not None:
            end.metadata[METADATA_KEY] = number
            self._names_of_ends.add(end.name())
        for record in self.watch.optimizers:
            look_at_kept(record, watch.leaves)
        self.watch.current = current
        self._before_pass()

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
                    self.watch.leaves.watch(node.variable)
                elif not self.watch.leaves.is_watched(node.variable):
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
        if self.watch.current is None:  # a backward pass that did not go through torch.autograd.backward
            number_of_pass, sketches = self.watch.history.num_passes, SketchSet(self.watch.pages)
            self.watch.current = BackwardPass(number_of_pass, "other", Loss(), call_site(), sketches)
            torch_private.queue_callback(self._close_pass)
        current = self.watch.current
        if torch.finfo(gradient.dtype).eps > torch.finfo(current.dtype).eps:
            current.dtype = gradient.dtype
        current.num_hooked += self.watch.leaves.is_changed_by_hooks(number, gradient)
        current.sketches.add(number, self.watch.sketch(gradient, gradient.shape))

    @guarded
    def _close_pass(self) -> None:
        current, self.watch.current = self.watch.current, None
        if current is None or not current.sketches:
            return
        current.is_finite = current.sketches.is_finite()
        current.leaves = current.sketches.mask
        leaves = self.watch.leaves.find_all(current.sketches)
        self.watch.leaves.forget_clip_factors(leaves)
        self.watch.unclipped.clear()
        current.versions = self.watch.versions = self.watch.optimizers.versions()
        if current.how == "backward":
            self.watch.leaves.remember(leaves)
        self.watch.history.passes.append(current)
        self.watch.optimizers.hold(current)
        self.watch.num_waiting += 1
        if self.watch.num_waiting > MAX_PASSES:
            self._stop_without_updates()

    def _stop_without_updates(self) -> None:
        """End the watch, so that memory does not grow in a script that makes no updates any more."""
        if not self.watch.history.num_updates:
            raise CannotAuditError(f"no optimizer made an update in {MAX_PASSES} backward passes")
        self.watch.history.add_note(f"the audit ended after {MAX_PASSES} backward passes without an update")
        self.watch.close()
