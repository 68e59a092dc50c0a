"""Keras 3 on its torch backend: a Keras optimizer that updates from accumulated gradients, once per window.

`model.compile(optimizer=AccumulatingOptimizer("adam", 8))`, `model.fit(callbacks=[AccumulationCallback()])`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy
import torch
from torch import Tensor

from .. import optimizer
from ..accumulators.reduction import reduction_of
from ..kernels import registry
from ..optimizer.window import Window

__all__ = ["AccumulatingOptimizer", "AccumulationCallback"]

if keras.config.backend() != "torch":
    raise ImportError(
        "fusedacc.integrations.keras needs Keras on its torch backend, here it runs on "
        f"{keras.config.backend()!r}: set KERAS_BACKEND=torch before keras is first imported"
    )

#: Key of a partly filled window among the saved variables, which have numbers as keys.
_WINDOW = "fusedacc_window"


class _Update(torch.optim.Optimizer):
    """The update of a Keras optimizer as a torch optimizer's `step`."""

    def __init__(self, inner: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
        self.inner = inner
        self.variables = variables
        super().__init__([(variable.path, variable.value) for variable in variables], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.apply([variable.value.grad for variable in self.variables], self.variables)


@keras.saving.register_keras_serializable(package="fusedacc")
class AccumulatingOptimizer(keras.optimizers.Optimizer):
    """A Keras optimizer whose `apply` ends a micro-batch, and updates at the end of a window.

    Gradients go from autograd straight into the sums of `accumulator`. At the end of a window,
    `inner_optimizer.apply` gets the final gradient, so its learning rate schedule, `iterations`, clipping,
    weight decay, moving average and loss scale act once per update.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or an argument of `keras.optimizers.get`. For dynamic
            loss scaling use a `LossScaleOptimizer`, and compile with `auto_scale_loss=False`.
        gradient_accumulation_steps: micro-batches per update: an int >= 1, or a callable from the number of
            updates so far to one.
        reduction: as in `fusedacc.AccumulatingOptimizer`. With "weighted" a micro-batch counts by `weight`,
            which `AccumulationCallback` sets to its samples; the default is 1.
        accumulate_dtype: dtype of the sums, by Keras's or torch's name; None: float32 for bfloat16 and
            float16 variables, else the variable's dtype.
        backend: as in `fusedacc.AccumulatingOptimizer`.
        name: as in every Keras optimizer.

    Raises:
        TypeError: `inner_optimizer` is an AccumulatingOptimizer, or an argument has a wrong type.
        ValueError: `inner_optimizer`, or an optimizer in it, has its own `gradient_accumulation_steps`, or an
            argument has a wrong value.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        gradient_accumulation_steps: int | Callable[[int], int],
        *,
        reduction: str = "weighted",
        accumulate_dtype: Any = None,
        backend: str = "auto",
        name: str | None = None,
    ) -> None:
        inner = keras.optimizers.get(inner_optimizer)
        _check_inner(inner)
        if not Window(gradient_accumulation_steps, reduction).counted:
            raise TypeError("gradient_accumulation_steps must be an int or a callable, got None")
        registry.requested(backend)
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner
        #: The `fusedacc.AccumulatingOptimizer`, for `explain()`, `micro_step` and `discard()`; None until
        #: built.
        self.accumulator: optimizer.AccumulatingOptimizer | None = None
        self._steps = gradient_accumulation_steps
        self._reduction = reduction
        self._backend = backend
        self._weight: float | Tensor | None = None
        self._dtype = None if accumulate_dtype is None else keras.backend.standardize_dtype(accumulate_dtype)

    def build(self, variables: Sequence[Any]) -> None:
        """Create the inner optimizer's variables and the accumulator.

        Raises:
            ValueError: a variable is overwritten with its gradient (float8), which has no mean.
        """
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(
                    f"variable {variable.path!r} is overwritten with its gradient (float8 scales), which has "
                    "no mean over micro-batches; allowed: models without float8 quantization"
                )
        super().build(variables)
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        _check_inner(self.inner_optimizer)  # a MultiOptimizer may have made its parts just now
        steps = self._steps
        self.accumulator = optimizer.AccumulatingOptimizer(
            _Update(self.inner_optimizer, list(variables)),
            # Keras restores its count of updates from every checkpoint, and does not count skipped updates.
            (lambda _: steps(int(self.iterations))) if callable(steps) else steps,
            reduction=self._reduction,
            accumulate_dtype=self._dtype and getattr(torch, self._dtype),
            backend=self._backend,
        )
        self.weight = self._weight

    @property
    def weight(self) -> float | Tensor | None:
        """Weight of the next micro-batch, a number or a 0-dim tensor; None if it is not set.

        Set it before the micro-batch's backward ("normalized": before `apply`); raises as
        `MicroBatch.weight`. "mean" and "sum" do not use it.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float | Tensor | None) -> None:
        self._weight = weight
        reduction = reduction_of(self._reduction)
        if self.accumulator is not None and reduction.weighs:
            if weight is None and reduction.scales_by_weight:
                weight = 1.0
            with self.accumulator.accumulate(weight=weight):
                pass

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss as scaled by the inner optimizer."""
        return self.inner_optimizer.scale_loss(loss)

    def apply(self, grads: Iterable[Tensor | None], trainable_variables: Iterable[Any] | None = None) -> None:
        """End a micro-batch; update if it was the window's last.

        Args:
            grads: each variable's `value.grad`, which is None between updates; or other gradients, which are
                added as those of this micro-batch.
            trainable_variables: the variables of the gradients; None: all that this was built with.

        Raises:
            ValueError: a variable is unknown, or the numbers of gradients and variables differ.
        """
        if self.accumulator is None:
            if trainable_variables is None:
                raise ValueError("trainable_variables=None needs an optimizer that is built: call build()")
            trainable_variables = list(trainable_variables)
            self.build(trainable_variables)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        self._check_variables_are_known(variables)
        for gradient, variable in zip(grads, variables, strict=True):
            if gradient is not variable.value.grad:
                variable.value.grad = gradient
        self.accumulator.optimizer.variables = variables  # type: ignore[union-attr]
        self._end(self.accumulator.step)  # type: ignore[union-attr]

    def flush(self) -> None:
        """Update from a partly filled window; do nothing if it is empty."""
        if self.accumulator is not None:
            self._end(self.accumulator.flush)

    def _end(self, end: Callable[[], Any]) -> None:
        end()
        self.accumulator.zero_grad()  # type: ignore[union-attr]
        self.weight = None

    def stateless_apply(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: the sums are state."""
        raise NotImplementedError("stateless_apply() cannot store a window's sums; use apply()")

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """At the end of `fit`: flush, then as the inner optimizer."""
        self.flush()
        self.inner_optimizer.finalize_variable_values(var_list)

    @property
    def loss_scale_factor(self) -> None:
        """None: the inner optimizer's applies."""
        return None

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float | None) -> None:
        # Set by Keras's constructor, and by a LossScaleOptimizer or MultiOptimizer around this optimizer.
        if hasattr(self, "inner_optimizer"):
            raise ValueError(
                f"loss_scale_factor={factor!r} of an AccumulatingOptimizer cannot be set, and it cannot be "
                "inside a LossScaleOptimizer, which would change its scale in mid-window, or a "
                "MultiOptimizer: use AccumulatingOptimizer(LossScaleOptimizer(inner), k), compile with "
                "auto_scale_loss=False"
            )

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """Updates so far, as the inner optimizer counts them."""
        return self.inner_optimizer.iterations

    @property
    def variables(self) -> list[Any]:
        """The inner optimizer's."""
        return self.inner_optimizer.variables

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set the inner optimizer's variables."""
        self.inner_optimizer.set_weights(weights)

    def __dir__(self) -> list[str]:
        # Keras also saves what dir() shows; the inner optimizer's variables are saved already.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def save_own_variables(self, store: Any) -> None:
        """Save the inner optimizer's variables, and a partly filled window if there is one."""
        self.inner_optimizer.save_own_variables(store)
        if self.accumulator is not None and self.accumulator.micro_step:
            file = io.BytesIO()
            torch.save(self.accumulator.state_dict(), file)
            store[_WINDOW] = numpy.frombuffer(file.getvalue(), numpy.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` has saved, or the inner optimizer alone.

        As every Keras optimizer, it warns and loads nothing if the number of variables differs.

        Raises:
            ValueError, TypeError: the window is damaged or does not fit; nothing has changed.
        """
        inner = {name: store[name] for name in store.keys() if name != _WINDOW}  # noqa: SIM118
        if self.accumulator is not None and len(inner) == len(self.variables):
            saved = {"state": {}, "param_groups": self.accumulator.optimizer.state_dict()["param_groups"]}
            if len(inner) < len(store.keys()):
                window = numpy.asarray(store[_WINDOW]).tobytes()
                try:
                    saved = torch.load(io.BytesIO(window))
                except Exception as error:
                    damaged = f"the saved window {_WINDOW!r} of {len(window)} bytes is damaged: {error}"
                    raise ValueError(damaged) from error
            self.accumulator.load_state_dict(saved)
            self.weight = None
        self.inner_optimizer.load_own_variables(inner)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of `from_config`."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "gradient_accumulation_steps": keras.saving.serialize_keras_object(self._steps),
            "reduction": self._reduction,
            "accumulate_dtype": self._dtype,
            "backend": self._backend,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> AccumulatingOptimizer:
        """Return the optimizer of a `get_config()`."""
        made = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
            for name in ("inner_optimizer", "gradient_accumulation_steps")
        }
        return cls(**(config | made))


class AccumulationCallback(keras.callbacks.Callback):
    """For `fit` with an `AccumulatingOptimizer`: samples count equally, and windows end with the epoch.

    Each micro-batch has its number of samples as weight (reduction "weighted"); a custom `train_step` may set
    `optimizer.weight` to its tokens instead. A partly filled window is flushed before an epoch's validation.
    Put this callback before those that save the model.

    Raises:
        TypeError: when training begins, `model.optimizer` is no AccumulatingOptimizer.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        self._optimizer = self.model.optimizer
        if not isinstance(self._optimizer, AccumulatingOptimizer):
            raise TypeError(
                f"model.optimizer is a {type(self._optimizer).__name__}; AccumulationCallback needs "
                "fusedacc.integrations.keras.AccumulatingOptimizer there"
            )
        train_step = self.model.train_step

        def weighed(data: Any) -> Any:
            inputs = keras.tree.flatten(keras.utils.unpack_x_y_sample_weight(data)[0])
            self._optimizer.weight = next(int(x.shape[0]) for x in inputs if x is not None)
            return train_step(data)

        # Callbacks do not see the data.
        self.model.train_step = weighed

    def on_test_begin(self, logs: Any = None) -> None:
        if "train_step" in vars(self.model):
            self._optimizer.flush()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._optimizer.flush()

    def on_train_end(self, logs: Any = None) -> None:
        del self.model.train_step


def _check_inner(inner: Any) -> None:
    """Raise if something in `inner` accumulates."""
    if isinstance(inner, AccumulatingOptimizer):
        raise TypeError("inner_optimizer is already an AccumulatingOptimizer; wrap its inner one")
    steps = inner.gradient_accumulation_steps
    if steps:
        raise ValueError(
            f"inner_optimizer has its own gradient_accumulation_steps={steps}, which would multiply with "
            "this one; allowed there: None"
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        _check_inner(inner.inner_optimizer)
    for part in getattr(inner, "optimizers", ()):  # a MultiOptimizer's
        _check_inner(part)
