"""Keras on torch: `compile`, `fit`, schedules, averages, loss scales and checkpoints, once per window."""

import importlib
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import case_keras as case
import keras
import numpy as np
import pages
import pytest
import torch
from example_scripts import assert_learns_digits

import fusedacc
from fusedacc.integrations.keras import AccumulatingOptimizer, AccumulationCallback

EPS = torch.finfo(torch.float32).eps
#: What float32 may lose: each update sums as many terms as a batch has samples (or words), in any order.
BY_SAMPLES = case.UPDATES * case.MICRO * case.STEPS * EPS
BY_WORDS = BY_SAMPLES * case.LONGEST


def wrapped(steps: Any = case.STEPS, inner: Any = None, **settings: Any) -> AccumulatingOptimizer:
    return AccumulatingOptimizer(case.momentum() if inner is None else inner, steps, **settings)


def compiled(optimizer: Any, **settings: Any) -> keras.Model:
    model = case.regression()
    model.compile(optimizer=optimizer, loss="mse", **settings)
    return model


def train(model: keras.Model, x: np.ndarray, y: np.ndarray, *callbacks: Any, **settings: Any) -> Any:
    settings = {"batch_size": case.MICRO, "shuffle": False, "verbose": 0} | settings
    return model.fit(x, y, callbacks=[AccumulationCallback(), *callbacks], **settings)


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def values(variables: list[Any]) -> list[torch.Tensor]:
    return [variable.value.detach().clone() for variable in variables]


def test_is_the_whole_batch_and_keras_is_not() -> None:
    for row in case.compare():
        assert row.ours < (BY_WORDS if "token" in row.case else BY_SAMPLES), row
        assert row.updates == row.our_updates >= 20
        assert (row.theirs < BY_SAMPLES) if row.case == "full windows" else (row.theirs > 0.1), row
        if row.case == "partly filled last window":
            assert (row.our_updates, row.their_updates) == (case.UPDATES, case.THEIR_UPDATES)


KERAS_OPTIMIZERS = [
    *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor"),
    *("Nadam", "Ftrl", "Lion", "Lamb", "Muon", "ScheduleFreeAdamW"),
]


def test_the_list_of_optimizers_is_complete() -> None:
    found = {
        name
        for name, kind in vars(keras.optimizers).items()
        if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)
    }
    assert found - {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"} == set(KERAS_OPTIMIZERS)


@pytest.mark.parametrize("name", KERAS_OPTIMIZERS)
def test_every_optimizer_of_keras_gets_the_same_gradients(name: str) -> None:
    """What reaches the inner optimizer is, bit for bit, the mean of what autograd gives."""
    check_gradients(lambda: getattr(keras.optimizers, name)(0.01))


def multi() -> keras.optimizers.Optimizer:
    sgd, adam = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd, {".*/kernel": adam}))


def test_multi_optimizer_inside() -> None:
    check_gradients(multi)
    parts = {"a": keras.optimizers.SGD(gradient_accumulation_steps=2)}
    inner = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(), parts))
    with pytest.raises(ValueError, match="its own gradient_accumulation_steps=2"):
        wrapped(inner=inner)
    late = wrapped(inner=keras.optimizers.MultiOptimizer(lambda _: parts["a"]))
    with pytest.raises(ValueError, match="its own gradient_accumulation_steps=2"):
        late.build(case.regression().trainable_weights)
    with pytest.raises(ValueError, match="or a MultiOptimizer"):
        keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(wrapped()))


def check_gradients(kind: Callable[[], keras.optimizers.Optimizer]) -> None:
    x, y = case.full_windows()
    x, y = x.astype("float32"), y.astype("float32")
    ours = compiled(wrapped(inner=kind(), reduction="mean"))
    train(ours, x, y)
    stock = compiled(kind())
    stock.optimizer.build(stock.trainable_weights)
    for window in range(2):
        for step in range(case.STEPS):
            rows = slice(case.MICRO * (window * case.STEPS + step), None)
            loss = stock.compute_loss(y=y[rows][: case.MICRO], y_pred=stock(x[rows][: case.MICRO]))
            (loss / case.STEPS).backward()
        with torch.no_grad():
            stock.optimizer.apply([v.value.grad for v in stock.trainable_weights], stock.trainable_weights)
        stock.zero_grad()
    assert equal(case.snapshot(ours), case.snapshot(stock))


@pytest.mark.parametrize(
    "settings",
    [
        {"clipnorm": 0.01},
        {"global_clipnorm": 0.01},
        {"clipvalue": 0.001},
        {"weight_decay": 0.1},
        {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2},
        {"loss_scale_factor": 64.0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_acts_once_per_update(settings: dict[str, Any]) -> None:
    data = case.samples()
    initial = case.regression().get_weights()
    results = []
    for dtype, optimizer, size in (
        ("float64", case.momentum(**settings), case.MICRO * case.STEPS),
        ("float32", wrapped(inner=case.momentum(**settings)), case.MICRO),
    ):
        model = case.regression(dtype)
        model.set_weights(initial)
        results.append(case.fit(model, optimizer, data, size, "mse"))
    start = [torch.from_numpy(value) for value in initial]
    assert case.difference(results[1], results[0], start) < BY_SAMPLES


def test_loss_scale_optimizer_inside() -> None:
    """A window that holds an inf is skipped whole, the scale halves, and neither happens in mid-window."""
    scaler = keras.optimizers.LossScaleOptimizer(
        case.momentum(), initial_scale=2.0**10, dynamic_growth_steps=2
    )
    model = compiled(wrapped(inner=scaler), auto_scale_loss=False)
    x, y = case.full_windows()
    bad = x.copy()
    bad[20] = np.inf
    scales = []

    class Scale(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            scales.append(float(scaler.dynamic_scale.numpy()))

    before = case.snapshot(model)
    train(model, bad[: 4 * case.MICRO], y[: 4 * case.MICRO], Scale())
    assert scales == [1024.0] * 3 + [512.0]
    assert equal(before, case.snapshot(model))
    assert int(model.optimizer.iterations) == 0
    train(model, x, y, Scale())
    assert scales[4:] == [512.0] * 7 + [1024.0]
    assert int(model.optimizer.iterations) == 2

    stock = compiled(case.momentum())
    stock.fit(x, y, batch_size=case.MICRO * case.STEPS, shuffle=False, verbose=0)
    assert case.difference(case.snapshot(model), case.snapshot(stock), before) < 2 * BY_SAMPLES


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(dtype: str) -> None:
    """With float16 a scaler is inside."""
    model, inner = case.regression(dtype), case.momentum()
    if dtype == "mixed_float16":
        inner = keras.optimizers.LossScaleOptimizer(inner, initial_scale=256.0)
    model.compile(optimizer=wrapped(inner=inner), loss="mse", auto_scale_loss=False)
    history = train(model, *case.samples(), epochs=5).history["loss"]
    assert history[-1] < history[0]
    assert int(model.optimizer.iterations) == 15
    assert "multi_tensor" in model.optimizer.accumulator.explain()


def test_mixed_float16_refuses_a_scaler_around() -> None:
    with pytest.raises(ValueError, match=r"AccumulatingOptimizer\(LossScaleOptimizer\(inner\), k\)"):
        case.Tagger("mixed_float16").compile(optimizer=wrapped(), loss="mse")


def one_weight(optimizer: Any) -> float:
    """300 gradients of exactly 1 on one bfloat16 weight, with a learning rate of 1: minus their mean."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, "linear", False, "zeros", dtype="bfloat16")]
    )
    model.compile(optimizer=optimizer, loss=lambda _, predicted: predicted)
    ones = np.ones((300, 1))
    callbacks = [AccumulationCallback()] if isinstance(optimizer, AccumulatingOptimizer) else []
    model.fit(ones, ones, batch_size=1, verbose=0, callbacks=callbacks)
    return float(model.weights[0].numpy()[0, 0])


def test_bfloat16_variables_have_float32_sums() -> None:
    """In bfloat16, 256 + 1 is 256: Keras's own sum stops there."""
    assert one_weight(AccumulatingOptimizer(keras.optimizers.SGD(1.0), 300)) == -1.0
    assert one_weight(keras.optimizers.SGD(1.0, gradient_accumulation_steps=300)) > -0.87
    narrow = AccumulatingOptimizer(keras.optimizers.SGD(1.0), 300, accumulate_dtype="bfloat16")
    assert one_weight(narrow) > -0.87


class Counts(keras.callbacks.Callback):
    """Updates made when validation begins, and after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_test_begin(self, logs: Any = None) -> None:
        self.seen.append(int(self.model.optimizer.iterations))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(int(self.model.optimizer.iterations))


def test_epoch_ends_with_an_update_before_its_validation() -> None:
    model, counts = compiled(wrapped()), Counts()
    train(model, *case.samples(), counts, epochs=2, validation_split=0.2)  # 120 samples: 2 windows
    assert counts.seen == [2, 2, 4, 4]
    assert "train_step" not in vars(model)


def test_without_the_callback_the_last_window_ends_with_fit() -> None:
    model = compiled(wrapped())
    x, y = case.samples()
    model.fit(x, y, batch_size=case.MICRO, epochs=3, verbose=0)
    assert int(model.optimizer.iterations) == 8
    assert model.optimizer.accumulator.micro_step == 0


# Loops that users write


def test_own_loop_with_lazy_build_and_gradients_from_elsewhere() -> None:
    x, y = (torch.tensor(part, dtype=torch.float32) for part in case.full_windows())
    ends = []
    for elsewhere in (False, True):
        model, optimizer = case.regression(), wrapped()
        variables = model.trainable_weights
        for i in range(0, len(x), case.MICRO):
            loss = torch.nn.functional.mse_loss(model(x[i : i + case.MICRO]), y[i : i + case.MICRO])
            if elsewhere:
                gradients = torch.autograd.grad(loss, [v.value for v in variables])
            else:
                loss.backward()
                gradients = [v.value.grad for v in variables]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        assert int(optimizer.iterations) == 2
        ends.append(case.snapshot(model))
    whole = case.regression()
    case.fit(whole, case.momentum(), case.full_windows(), case.MICRO * case.STEPS, "mse", epochs=1)
    start = case.snapshot(case.regression())
    for end in ends:
        assert case.difference(end, case.snapshot(whole), start) < BY_SAMPLES


def test_weights_in_a_loop_without_scale_loss_and_before_build() -> None:
    """Two micro-batches of 3 and 1 samples weigh 3 and 1: the mean over 4."""
    x, y = (torch.tensor(part[:4], dtype=torch.float32) for part in case.samples())
    model, optimizer = case.regression(), wrapped(2, keras.optimizers.SGD(1.0))
    start = case.snapshot(model)
    for rows in (slice(0, 3), slice(3, 4)):
        optimizer.weight = rows.stop - rows.start
        torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.apply([v.value.grad for v in model.trainable_weights], model.trainable_weights)
    stock = case.regression()
    torch.nn.functional.mse_loss(stock(x), y).backward()
    for begin, end, variable in zip(start, case.snapshot(model), stock.trainable_weights, strict=True):
        torch.testing.assert_close(end, begin - variable.value.grad, rtol=16 * EPS, atol=16 * EPS)


def test_normalized_divides_sums_of_losses_by_samples() -> None:
    data = case.samples()
    ends = []
    total = keras.losses.MeanSquaredError(reduction="sum")
    for loss, optimizer in (("mse", wrapped()), (total, wrapped(reduction="normalized"))):
        model = case.regression()
        ends.append(case.fit(model, optimizer, data, case.MICRO, loss))
    assert case.difference(ends[1], ends[0], case.snapshot(case.regression())) < BY_SAMPLES


# Checkpoints


def interrupted(path: Path, save: str) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """A model trained through `fit`, which has saved it after its 6th micro-batch, in mid-window."""
    model = compiled(wrapped(inner=keras.optimizers.Adam(0.01)))
    x, y = case.samples()

    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5:
                getattr(self.model, save)(path)

    train(model, x, y, Save())
    return model, x[6 * case.MICRO :], y[6 * case.MICRO :]


def same(one: keras.Model, other: keras.Model) -> bool:
    return equal(case.snapshot(one), case.snapshot(other)) and equal(
        values(one.optimizer.variables), values(other.optimizer.variables)
    )


@pytest.mark.parametrize("save", ["save", "save_weights"])
def test_resume_in_mid_window(tmp_path: Path, save: str) -> None:
    path = tmp_path / ("model.keras" if save == "save" else "model.weights.h5")
    straight, x, y = interrupted(path, save)
    if save == "save":
        resumed = keras.models.load_model(path)
        assert resumed.optimizer.get_config() == straight.optimizer.get_config()
    else:
        resumed = compiled(wrapped(inner=keras.optimizers.Adam(0.01)))
        resumed.optimizer.build(resumed.trainable_weights)
        resumed.load_weights(path)
    assert resumed.optimizer.accumulator.micro_step == 2
    assert int(resumed.optimizer.iterations) == 1
    with fusedacc.audit(output=io.StringIO()) as report:  # it does not see the sums that were loaded
        train(resumed, x, y)
    assert same(resumed, straight)
    assert (report.status, report.as_json()["checked"]) == (0, 1), report.text


def test_files_go_between_the_wrapper_and_the_bare_optimizer(tmp_path: Path) -> None:
    x, y = case.full_windows()
    path = tmp_path / "model.weights.h5"
    ours, bare = compiled(wrapped()), compiled(case.momentum())
    train(ours, x, y)
    bare.optimizer.build(bare.trainable_weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # Keras says so when it loads nothing
        ours.save_weights(path)
        bare.load_weights(path)
        assert same(ours, bare)
        bare.train_on_batch(x, y)
        bare.save_weights(path, overwrite=True)
        ours.train_on_batch(x[:16], y[:16])
        ours.load_weights(path)
    assert same(ours, bare)
    assert ours.optimizer.accumulator.micro_step == 0


def test_a_window_that_does_not_fit_is_refused_whole(tmp_path: Path) -> None:
    interrupted(tmp_path / "model.weights.h5", "save_weights")
    other = compiled(wrapped(inner=keras.optimizers.Adam(0.01), reduction="sum"))
    x, y = case.samples()
    other.train_on_batch(x, y)
    before = values(other.optimizer.variables)
    with pytest.raises(ValueError, match="partly filled window of a counted loop with reduction='weighted'"):
        other.load_weights(tmp_path / "model.weights.h5")
    assert equal(before, values(other.optimizer.variables))
    assert other.optimizer.accumulator.micro_step == 1


def test_a_damaged_window_and_another_optimizers_variables_change_nothing() -> None:
    model = compiled(wrapped())
    x, y = case.samples()
    model.train_on_batch(x, y)
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    before = values(model.optimizer.variables)
    window = store["fusedacc_window"]
    for damaged in (window[: len(window) // 2], window[:0]):
        with pytest.raises(ValueError, match=rf"window' of {len(damaged)} bytes is damaged"):
            model.optimizer.load_own_variables(store | {"fusedacc_window": damaged})
    del store["0"]
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        model.optimizer.load_own_variables(store)
    assert equal(before, values(model.optimizer.variables))
    assert model.optimizer.accumulator.micro_step == 1


# Errors


def accumulating_by_itself() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("inner", "steps", "settings", "kind", "says"),
    [
        (accumulating_by_itself(), 4, {}, ValueError, "inner_optimizer has its own gradient_"),
        (
            keras.optimizers.LossScaleOptimizer(accumulating_by_itself()),
            4,
            {},
            ValueError,
            "its own gradient_accumulation_steps=2",
        ),
        (AccumulatingOptimizer("sgd", 2), 4, {}, TypeError, "wrap its inner one"),
        ("nonsense", 4, {}, ValueError, "nonsense"),
        ("sgd", None, {}, TypeError, "an int or a callable, got None"),
        ("sgd", 0, {}, ValueError, "at least 1, got 0"),
        ("sgd", 4, {"reduction": "median"}, ValueError, "reduction must be one of"),
        ("sgd", 4, {"backend": "tpu"}, ValueError, "backend"),
        ("sgd", 4, {"accumulate_dtype": "float12"}, ValueError, "float12"),
    ],
)
def test_refuses(inner: Any, steps: Any, settings: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        AccumulatingOptimizer(inner, steps, **settings)


def test_callback_refuses_another_optimizer() -> None:
    model = compiled(accumulating_by_itself())
    with pytest.raises(TypeError, match=r"model.optimizer is a SGD; .*AccumulatingOptimizer there"):
        train(model, *case.samples())


def test_refuses_variables_that_gradients_overwrite_and_unknown_ones() -> None:
    model = case.regression()
    model.trainable_weights[0].overwrite_with_gradient = True
    with pytest.raises(ValueError, match="overwritten with its gradient"):
        wrapped().build(model.trainable_weights)
    optimizer = wrapped()
    optimizer.build(case.regression().trainable_weights)
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([None] * 4, model.trainable_weights)
    with pytest.raises(ValueError, match=r"call build\(\)"):
        wrapped().apply([None])
    with pytest.raises(NotImplementedError, match="stateless_apply"):
        optimizer.stateless_apply([], [], [])


def test_refuses_another_backend_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    monkeypatch.delitem(sys.modules, "fusedacc.integrations.keras")
    with pytest.raises(ImportError, match="here it runs on 'jax': set KERAS_BACKEND=torch"):
        importlib.import_module("fusedacc.integrations.keras")


def test_the_page_runs():
    x, y = case.samples()
    found = pages.run("keras", model=case.regression(), x=x, y=y)
    assert int(found["optimizer"].iterations) == 1  # 150 samples are one partly filled window of three


def test_the_example_learns_digits():
    assert_learns_digits("keras_digits.py", 10)
