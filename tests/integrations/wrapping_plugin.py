"""A plugin for another project's pytest: every optimizer that its tests make is put into a wrapper.

`pytest -p wrapping_plugin` with FUSEDACC_SUITE_STEPS in the environment: "1" for the counted loop with
windows of one micro-batch, "manual" for the manual loop. In either, a test's every `step()` is an update, and
what it asserts keeps its meaning. What a test makes by `torch.optim.NAME` is left bare: what theirs is held
to. At the end the plugin prints how many optimizers were wrapped.
"""

from __future__ import annotations

import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, MutableMapping
from types import FunctionType
from typing import Any

import pytest
import torch

import fusedacc

STEPS = {"1": 1, "manual": None}[os.environ["FUSEDACC_SUITE_STEPS"]]
#: Functions of packages under test: what they return is wrapped, or makes what is.
FACTORIES = ("load_optimizer", "create_optimizer")


#: Of every optimizer that was wrapped, what its class is called.
WRAPPED: list[str] = []


class Wrapping(ABCMeta):
    """Of a class that looks like an optimizer's, whose instances are wrapped ones."""

    def __call__(cls, *arguments: Any, **settings: Any) -> Any:
        kind = cls.__dict__.get("kind")
        arguments = tuple(map(plain, arguments))
        settings = {name: plain(value) for name, value in settings.items()}
        # A test's own subclass has no `kind`.
        return wrapped(kind(*arguments, **settings) if kind else super().__call__(*arguments, **settings))

    def __instancecheck__(cls, instance: Any) -> bool:
        kind = cls.__dict__.get("kind")
        return super().__instancecheck__(instance) if kind is None else isinstance(plain_of(instance), kind)


def wrapped(inner: Any) -> Any:
    """In a wrapper, if it is an optimizer whose `step()` is its own."""
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, fusedacc.AccumulatingOptimizer):
        return inner
    WRAPPED.append(type(inner).__name__)
    return fusedacc.AccumulatingOptimizer(inner, STEPS)


def plain_of(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, fusedacc.AccumulatingOptimizer) else optimizer


def plain(value: Any) -> Any:
    """An argument as it would be without us: another optimizer goes around the bare one."""
    if isinstance(value, fusedacc.AccumulatingOptimizer):
        value.close()
        return value.optimizer
    return value.__dict__["kind"] if isinstance(value, Wrapping) and "kind" in value.__dict__ else value


PROXIES: dict[type, Wrapping] = {}


def proxy(value: Any) -> Any:
    """What stands for an optimizer's class, or for a factory, in a test; any other value is itself."""
    if isinstance(value, Wrapping):
        return value
    if (
        isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    ):
        if value not in PROXIES:
            PROXIES[value] = Wrapping(
                value.__name__, (value,), {"kind": value, "__module__": value.__module__}
            )
        return PROXIES[value]
    if isinstance(value, FunctionType) and value.__name__ in FACTORIES and not hasattr(value, "__wrapped__"):
        return factory(value)
    return value


def factory(function: Callable) -> Callable:
    def make(*arguments: Any, **settings: Any) -> Any:
        made = function(*arguments, **settings)
        return proxy(made) if isinstance(made, type) else wrapped(made)

    make.__wrapped__ = function
    return make


def replace(names: MutableMapping[str, Any], chosen: Iterable[str]) -> None:
    for name in chosen:
        value = names[name]
        new = proxy(value)
        if new is not value:
            names[name] = new


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    root = str(config.rootpath)
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        if path.startswith(root) and ("test" in path[len(root) :] or "tests" in module.__name__):
            replace(vars(module), list(vars(module)))
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        replace(parameters, list(parameters))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that compare random numbers up to their last digits are to find the same ones in every run."""
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():  # schedulefree's tests put every tensor on a GPU
        torch.Tensor.cuda = lambda self: self


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"wrapped: {len(WRAPPED)} optimizers of {len(set(WRAPPED))} classes")
