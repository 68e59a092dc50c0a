"""What other people's code may rely on: signatures, live properties, hooks, and when p.grad shows what."""

import copy
import inspect

import pytest
import torch
from loops import assert_equal_weights, loss_of, network, scalar
from loops import cleared_micro_batch as micro_batch
from loops import wrap_momentum as wrap
from torch import nn
from torch.optim import optimizer as hooks

import fusedacc


class TestOptimizer:
    """The wrapper is an Optimizer and shows the inner optimizer's properties."""

    def test_the_signatures_are_those_of_an_optimizer(self):
        kind = fusedacc.AccumulatingOptimizer
        assert issubclass(kind, torch.optim.Optimizer)
        for name, expected in {
            "step": [("closure", None), ("arguments", inspect.Parameter.empty)],
            "zero_grad": [("set_to_none", True)],
            "accumulate": [("model", None), ("weight", None), ("defer", "all")],
            "state_dict": [("include_partial", True)],
            "load_state_dict": [("state_dict", inspect.Parameter.empty)],
            "flush": [("arguments", inspect.Parameter.empty)],
            "discard": [],
            "ignore": [],
            "close": [],
        }.items():
            parameters = list(inspect.signature(getattr(kind, name)).parameters.values())[1:]
            assert [(p.name, p.default) for p in parameters] == expected, name
        assert "__call__" not in kind.__dict__
        assert "__slots__" not in kind.__dict__
        first = list(inspect.signature(kind).parameters.items())[:2]
        assert [name for name, _ in first] == ["optimizer", "gradient_accumulation_steps"]

    def test_inner_properties_are_live_both_ways(self):
        model = network()
        optimizer = wrap(model)
        inner = optimizer.optimizer
        for name in ("param_groups", "state", "defaults"):
            assert getattr(optimizer, name) is getattr(inner, name)
            assigned = copy.copy(getattr(inner, name))
            setattr(optimizer, name, assigned)
            assert getattr(inner, name) is assigned

    def test_the_wrapper_adds_no_state_to_the_inner_optimizer(self):
        model = network()
        optimizer = wrap(model, 2)
        loss_of(model).backward()
        optimizer.step()
        assert not optimizer.state
        micro_batch(model, optimizer)
        assert {key for entry in optimizer.state.values() for key in entry} == {"momentum_buffer"}

    def test_methods_of_the_inner_optimizer_are_reachable(self):
        class Switched(torch.optim.SGD):
            mode = "none"

            def train(self) -> None:
                self.mode = "train"

        inner = Switched(network().parameters(), lr=0.1)
        fusedacc.AccumulatingOptimizer(inner).train()
        assert inner.mode == "train"

    @pytest.mark.parametrize("steps", [None, 3])
    def test_step_hooks_fire_once_per_update(self, steps):
        """The wrapper and the inner optimizer share their lists of hooks."""
        model = network()
        optimizer = wrap(model, steps)
        fired: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
        post = optimizer.register_step_post_hook(lambda *_: fired.append("post"))
        optimizer.optimizer.register_step_post_hook(lambda *_: fired.append("inner"))
        handles = [
            hooks.register_optimizer_step_pre_hook(lambda *_: fired.append("global pre")),
            hooks.register_optimizer_step_post_hook(lambda *_: fired.append("global post")),
        ]
        for _ in range(6):
            micro_batch(model, optimizer)
        for handle in handles:
            handle.remove()
        kinds = "pre", "post", "inner", "global pre", "global post"
        assert sorted(fired) == sorted(kinds * (2 if steps else 6))
        post.remove()
        fired.clear()
        micro_batch(model, optimizer)
        if steps:
            optimizer.flush()
        assert fired == ["pre", "inner"]

    def test_groups_keep_their_own_options(self):
        a, b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        inner = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 10.0}], lr=0.0)
        optimizer = fusedacc.AccumulatingOptimizer(inner, 2)
        c = nn.Parameter(torch.zeros(()))
        (a + b).backward()
        optimizer.step()
        optimizer.add_param_group({"params": [c], "lr": 100.0})
        (a + b + c).backward()
        optimizer.step()
        assert (a.item(), b.item(), c.item()) == (-1.0, -10.0, -50.0)


class TestVisibility:
    """When p.grad shows what."""

    def test_a_counted_loop_shows_p_grad_after_the_last_backward(self):
        weight, optimizer = scalar(3)
        for value in (1.0, 2.0):
            (weight * value).backward()
            assert weight.grad is None
            optimizer.step()
            assert weight.grad is None
            optimizer.zero_grad()
        (weight * 6.0).backward()
        assert weight.grad.item() == 3.0
        optimizer.step()
        assert weight.grad.item() == 3.0
        assert weight.item() == -3.0
        optimizer.zero_grad()
        assert weight.grad is None

    def test_a_manual_loop_shows_p_grad_after_each_backward(self):
        weight, optimizer = scalar()
        (weight * 1.0).backward()
        first = weight.grad
        assert first.item() == 1.0
        (weight * 2.0).backward()
        assert weight.grad is first
        assert first.item() == 3.0
        weight.grad.mul_(2.0)
        weight.grad = weight.grad + 1.0
        (weight * 1.0).backward()
        assert weight.grad.item() == 8.0
        optimizer.step()
        assert weight.item() == -8.0
        optimizer.zero_grad(set_to_none=False)
        assert weight.grad.item() == 0.0
        weight.grad = None
        (weight * 5.0).backward()
        assert weight.grad.item() == 5.0

    def test_counters_after_each_step(self):
        weight, optimizer = scalar(2)
        seen = []
        for _ in range(4):
            state = (optimizer.micro_step, optimizer.num_updates, optimizer.will_update)
            (weight * 1.0).backward()
            optimizer.step()
            seen.append((*state, optimizer.has_updated))
        assert seen == [(0, 0, False, False), (1, 0, True, True), (0, 1, False, False), (1, 1, True, True)]

    @pytest.mark.parametrize("steps", [None, 2])
    def test_a_window_is_partial_from_its_first_backward_to_its_update(self, steps):
        weight, optimizer = scalar(steps)
        assert not optimizer.has_partial_window
        (weight * 1.0).backward()
        assert optimizer.has_partial_window
        optimizer.step()
        assert optimizer.has_partial_window == (steps == 2)
        for end in (optimizer.flush, optimizer.discard):
            (weight * 1.0).backward()
            end()
            assert not optimizer.has_partial_window

    def test_arguments_can_be_read(self):
        for steps, reduction in ((None, "sum"), (3, "mean"), (lambda updates: 2 + updates, "mean")):
            optimizer = scalar(steps)[1]
            assert (optimizer.gradient_accumulation_steps, optimizer.reduction) == (steps, reduction)
        assert scalar(2, reduction="weighted")[1].reduction == "weighted"

    def test_a_step_without_backward_does_not_count(self):
        weight, optimizer = scalar(2)
        (weight * 2.0).backward()
        optimizer.step()
        optimizer.step()
        assert (optimizer.micro_step, optimizer.has_updated) == (1, False)
        (weight * 4.0).backward()
        optimizer.step()
        assert weight.item() == -3.0
        optimizer.step()
        assert (optimizer.num_updates, optimizer.has_updated, weight.item()) == (1, False, -3.0)

    def test_an_assigned_gradient_counts(self):
        """A counted step adds what it finds in p.grad."""
        weight, optimizer = scalar(2)
        weight.grad = torch.tensor(2.0)
        optimizer.step()
        assert (optimizer.micro_step, weight.grad) == (1, None)
        (weight * 4.0).backward()
        optimizer.step()
        assert weight.item() == -3.0

    def test_values_written_into_a_used_gradient_do_not_count(self):
        """They would in stock. A tensor that replaces p.grad counts."""
        weight, optimizer = scalar(2)
        for window in (1, 2):
            for _ in range(2):
                weight.backward()
                optimizer.step()
            assert (weight.item(), weight.grad.item(), optimizer.num_updates) == (-window, 1.0, window)
            weight.grad.fill_(5.0)
        for _ in range(3):
            weight.grad.fill_(5.0)
            optimizer.step()
        optimizer.flush()
        assert (weight.item(), weight.grad.item(), optimizer.num_updates) == (-2.0, 5.0, 2)
        weight.grad = torch.tensor(4.0)
        optimizer.step()
        assert (optimizer.micro_step, weight.item()) == (1, -2.0)
        weight.backward()
        optimizer.step()
        assert weight.item() == -2.0 - (4.0 + 1.0) / 2

    def test_model_zero_grad_keeps_a_counted_window(self):
        model, reference = network(), network()
        optimizer, other = wrap(model, 2), wrap(reference, 2)
        for seed in range(4):
            loss_of(model, seed).backward()
            optimizer.step(), model.zero_grad()
            micro_batch(reference, other, seed)
        assert_equal_weights(model, reference)

    @pytest.mark.parametrize("steps", [None, 1, 2])
    def test_create_graph_leaves_a_differentiable_p_grad(self, steps):
        """A penalty on the gradient needs it."""
        results = []
        for wrapped in (False, True):
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if wrapped:
                optimizer = fusedacc.AccumulatingOptimizer(optimizer, steps, reduction="sum")
            for seed in range(2):
                loss_of(model, seed).backward(create_graph=True)
                if seed == 0 or steps == 1:  # in a window's later micro-batch stock's p.grad holds both
                    sum(p.grad.pow(2).sum() for p in model.parameters()).backward()
                if (wrapped and steps) or steps == 1 or seed == 1:
                    optimizer.step(), optimizer.zero_grad()
            results.append([p.detach() for p in model.parameters()])
        for p, q in zip(*results, strict=True):
            torch.testing.assert_close(p, q, rtol=8 * 2**-23, atol=2**-24)

    def test_gradients_that_the_user_keeps_are_not_changed(self):
        weight, _optimizer = scalar()
        kept = []
        weight.register_hook(kept.append)
        for value in (1.0, 2.0, 4.0):
            (weight * value).backward()
        assert [g.item() for g in kept] == [1.0, 2.0, 4.0]
        assert weight.grad.item() == 7.0


class TestWrapping:
    """What frameworks do to the optimizer that they are given."""

    def test_a_copy_by_lightning_shares_the_counters(self):
        """Lightning makes an object of a dynamic subclass with a copy of `__dict__`."""
        model = network()
        optimizer = wrap(model, 2)
        kind = type("Taken" + type(optimizer).__name__, (type(optimizer),), {})
        taken = object.__new__(kind)
        taken.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in ("step", "__del__")})
        assert isinstance(taken, torch.optim.Optimizer)
        for stepped in (taken, optimizer, optimizer, taken):
            loss_of(model).backward()
            stepped.step(), stepped.zero_grad()
            for name in ("micro_step", "num_updates", "has_updated", "will_update", "has_partial_window"):
                assert getattr(taken, name) == getattr(optimizer, name)
        assert (taken.num_updates, optimizer.has_updated) == (2, True)
        assert taken.param_groups is optimizer.param_groups is optimizer.optimizer.param_groups

    @pytest.mark.parametrize("steps", [None, 3])
    def test_the_closure_always_runs(self, steps):
        """It runs inside a window, where nothing is updated, and after a scheduler has patched `step` too."""
        weight, optimizer = scalar(steps)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert optimizer.step() is None
        calls = []

        def closure() -> torch.Tensor:
            calls.append(torch.is_grad_enabled())
            loss = weight * 1.0 + 1.0
            loss.backward()
            return loss

        with torch.no_grad():
            assert optimizer.step(closure).item() == 1.0
            assert optimizer.has_updated == (steps is None)
            for _ in range(3):
                assert isinstance(optimizer.step(closure), torch.Tensor)
        assert calls == [True] * 4
        assert optimizer.num_updates == (1 if steps else 5)

    def test_a_patched_step_is_patched_once(self):
        _, optimizer = scalar(2)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
        patched = optimizer.step
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        assert optimizer.step is patched
        assert optimizer.step.__name__ == "step"

    @pytest.mark.parametrize("steps", [None, 2])
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_profilers_see_step_and_zero_grad_once_per_update(self, steps, set_to_none):
        """They see the inner optimizer's names, as in stock."""
        model = network()
        optimizer = wrap(model, steps)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for seed in range(4):
                loss_of(model, seed).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none)
        seen = [event.name for event in profile.events() if event.name.startswith("Optimizer.")]
        expected = ["Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"]
        assert sorted(seen) == sorted(expected * (2 if steps else 4))

    def test_hooks_get_the_inner_optimizer_and_may_change_gradients(self):
        weight, optimizer = scalar(2)
        got = []

        def halve(inner, arguments, keywords) -> None:
            got.append(inner)
            weight.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        for _ in range(2):
            (weight * 4.0).backward()
            optimizer.step()
        assert got == [optimizer.optimizer]
        assert weight.item() == -2.0

    def test_state_dict_hooks_fire_once_and_may_replace_the_state(self):
        model = network()
        optimizer = wrap(model, 2)
        for seed in range(3):
            micro_batch(model, optimizer, seed)
        seen: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda *_: seen.append("save"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": "mine"})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state.pop("note")))
        optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert seen == ["save", "mine", "loaded"]
        assert (optimizer.micro_step, optimizer.num_updates) == (1, 1)
        assert saved["note"] == "mine", "a hook must get a copy"
