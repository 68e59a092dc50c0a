"""The wrapper's checkpoints and pickles."""

from __future__ import annotations

from typing import Any

from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ..accumulators import Accumulators
from ..autograd.capture import Capture
from ..distributed import Place
from . import checkpoint, pickling
from .accumulation import Accumulation
from .master_weights import MasterWeights
from .parameters import ParameterSet
from .window import Window


class Saving:
    """What users save, load, copy and pickle of the wrapper."""

    optimizer: Optimizer
    _window: Window
    _accumulators: Accumulators
    _accumulation: Accumulation
    _capture: Capture
    _masters: MasterWeights | None
    _parameter_set: ParameterSet
    _slots: list
    _follow: Any
    _count_skipped: Any
    _build: Any

    @_disable_dynamo
    def state_dict(self, include_partial: bool = True) -> dict[str, Any]:
        """The inner optimizer's state, and with `include_partial` a part-filled window's sums and counters.

        Without a part-filled window the result loads into the bare inner optimizer too. With `data_parallel`
        a part-filled window's sums are each rank's own row of DTensors: save on every rank, by
        torch.distributed.checkpoint or to a file for each. With FSDP2 and reduction="normalized" every rank
        calls this at once in mid-window: their weights are summed.

        Raises:
            RuntimeError: the window's sums are neither old nor new after an exception (see `discard`), a
                parameter's shape has changed in mid-window, or gradients that `accumulate(model)` has left
                unsynchronised.
        """
        self._capture.drop_failed_backwards()
        self._window.check_untainted()
        if include_partial:
            self._window.check_synchronised("state_dict(include_partial=True) would save one rank's part")
        self._follow()
        self._count_skipped()
        parts = self._window, self._accumulators, self._masters
        return checkpoint.save(self.optimizer, *parts, include_partial, self._place)

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, from here or from the bare inner optimizer.

        Raises:
            ValueError, TypeError: the checkpoint does not fit; everything is left as it was, but for tensors
                that an inner optimizer with a `load_state_dict` of its own has written in place by then.
                What its state must be like only that one knows: what it takes is not looked at.
        """
        self._capture.drop_failed_backwards()
        self._follow()
        self._count_skipped()
        try:
            parts = self._window, self._accumulators, self._masters
            checkpoint.load(self.optimizer, *parts, state_dict, self._place)
            if self._accumulation.ranks.parallel is not None:
                self._accumulation.ranks.parallel.abandon()
        finally:
            self._parameter_set.forget_choices()
            self._parameter_set.forget_casts()
            self._capture.registry.reregister(self._slots if self._masters is not None else ())
            self._capture.registry.refresh()

    @property
    def _place(self) -> Place:
        parallel = self._accumulation.ranks.parallel
        return Place() if parallel is None else parallel.place

    def __getstate__(self) -> dict[str, Any]:
        self._capture.drop_failed_backwards()
        if self._place.count > 1 and not self._window.empty:
            raise RuntimeError(
                "a copy or a pickle of the optimizer has no data_parallel, and this window holds one rank's "
                "part of the sums; allowed: between windows, or state_dict()"
            )
        self._follow()
        self._count_skipped()
        own = {name: value for name, value in self.__dict__.items() if name not in _REBUILT}
        return own | pickling.carried(self._window, self._accumulators, self._masters)

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state)
        kept = {name: own.pop(name, None) for name in pickling.NAMES}  # an older pickle lacks some
        window = Window(kept["schedule"], kept["reduction"], bool(kept["private"]))
        settings = own.pop("_accumulate_dtype"), kept["backend"], own.pop("_finishing")
        seed, masters = (kept["noise"] or {}).get("seed"), kept["masters"] is not None
        self._build(own.pop("optimizer"), window, *settings, masters, lenient=True, seed=seed)
        self.__dict__.update(own)
        pickling.restore(kept, window, self._accumulators, self._masters)


#: What unpickling makes anew. A scheduler's patch of step() belongs to the scheduler's own optimizer.
_REBUILT = (
    "_window",
    "_parameter_set",
    "_slots",
    "_accumulators",
    "_inner_update",
    "_masters",
    "_accumulation",
    "_capture",
    "_pipeline_steps",
    "_loop",
    "_middle",
    "_loss_scale",
    "_closed",
    "step",
)
