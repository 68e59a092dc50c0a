"""`keep_casts=True`: a weight is cast once a window, whoever changes it, and nobody else notices."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import fusedacc

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
autocast = functools.partial(torch.autocast, "cpu", dtype=BF16)


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 12, bias=False))

    @staticmethod
    def batch(generator):
        return torch.randn(5, 12, generator=generator)


class Encoder(nn.Module):
    """Two blocks; `how`: by which checkpoint, if any."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.embedding = how, nn.Embedding(17, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.how:
                x = checkpoint.checkpoint(block, x, use_reentrant=self.how == "reentrant")
            else:
                x = block(x)
        return self.head(x)

    @staticmethod
    def batch(generator):
        return torch.randint(0, 17, (2, 6), generator=generator)


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=2, bias=False),
            nn.ConvTranspose2d(8, 4, 3, stride=2),
            nn.Flatten(2),
            nn.Conv1d(4, 6, 5, stride=3),
            nn.Flatten(),
            nn.LazyLinear(10),
        )
        self(torch.zeros(1, 3, 8, 8))

    @staticmethod
    def batch(generator):
        return torch.randn(4, 3, 8, 8, generator=generator)


MODELS = {
    "perceptron": Perceptron,
    "encoder": Encoder,
    "reentrant": functools.partial(Encoder, "reentrant"),
    "not reentrant": functools.partial(Encoder, "not reentrant"),
    "convolutions": Convolutions,
}


def make(kind, keep: bool = True, steps=4, inner=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = MODELS[kind]() if isinstance(kind, str) else kind()
    optimizer = inner(model.parameters(), lr=1e-2)
    return model, fusedacc.AccumulatingOptimizer(optimizer, steps, model=model, keep_casts=keep, **options)


def loss_of(model, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    x = model.batch(torch.Generator().manual_seed(seed))
    with autocast(dtype=dtype):
        return model(x).float().square().mean()


def casts_of(optimizer) -> list[torch.Tensor]:
    """Those that are kept."""
    casts = optimizer._parameter_set.casts
    return [] if casts is None else [kept.cast for kept in casts._kept.values()]


class CountCasts(TorchDispatchMode):
    """Counts, by shape, what is cast from float32 to 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[torch.Size, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, result.dtype) == (F32, BF16):
            self.found[result.shape] = self.found.get(result.shape, 0) + 1
        return result


def train(kind: str, keep: bool, loop: str, micro_batches: int = 12):
    steps = None if loop.startswith("manual") else 4
    model, optimizer = make(kind, keep, steps)
    scaler = None
    if loop.endswith("scaled"):
        make_scaler = fusedacc.amp.GradScaler if steps else torch.amp.GradScaler
        scaler = make_scaler("cpu", init_scale=2.0**9)
    for seed in range(micro_batches):
        loss = loss_of(model, seed) / (1 if steps else 4)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if steps or seed % 4 == 3:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("loop", ["counted", "counted scaled", "manual", "manual scaled"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("hooks", ["0", "1"])
def test_parameters_have_the_same_bits(kind, loop, hooks, monkeypatch):
    monkeypatch.setenv("FUSEDACC_NATIVE_HOOKS", hooks)
    ours, optimizer = train(kind, True, loop)
    theirs, _ = train(kind, False, loop)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert optimizer.num_updates == 3
    assert not casts_of(optimizer)


@pytest.mark.parametrize("kind", ["perceptron", "encoder", "not reentrant", "convolutions"])
def test_each_weight_is_cast_once_a_window(kind):
    model, optimizer = make(kind)
    layers = nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d
    shapes = {
        module.weight.shape
        for name, module in model.named_modules()
        if isinstance(module, layers) and "self_attn" not in name  # which calls no Linear
    }
    kept: list[torch.Tensor] = []
    with CountCasts() as counted:
        for seed in range(4):
            assert len(casts_of(optimizer)) == len(kept)
            loss_of(model, seed).backward()
            kept = casts_of(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    of_shape = {cast.shape: sum(other.shape == cast.shape for other in kept) for cast in kept}
    assert of_shape.keys() == shapes
    assert {shape: counted.found[shape] for shape in shapes} == of_shape


def test_a_reentrant_checkpoint_casts_without_a_graph_and_once():
    """Its first forward is without gradients, and so as autocast has it."""
    model, optimizer = make("reentrant")
    with CountCasts() as counted:
        for seed in range(4):
            loss_of(model, seed).backward()
            optimizer.step()
    assert counted.found[model.blocks[0].linear1.weight.shape] == 2 * (4 + 1)


def test_without_autocasts_cache_nothing_is_kept():
    model, optimizer = make("convolutions")
    for seed in range(2):
        with torch.autocast("cpu", BF16, cache_enabled=False):
            model(model.batch(torch.Generator().manual_seed(seed))).float().sum().backward()
        assert not casts_of(optimizer)
        optimizer.step()


class TestChanges:
    """A weight that changes in mid-window is cast anew."""

    @pytest.mark.parametrize("layer", ["linear", "convolution"])
    @pytest.mark.parametrize(
        "change",
        [
            "add",
            "load",
            "assign",
            "data",
            "transposed data",
            "fp16",
            "bf16",
            "frozen",
            "swapped",
            "other dtype",
            "shrunk",
        ],
    )
    def test_in_mid_window(self, change, layer):
        def build():
            if layer == "linear":
                return nn.Sequential(nn.Linear(6, 6, bias=False))
            return nn.Sequential(nn.Conv1d(6, 6, 1, bias=False))

        model, optimizer = make(build)
        module = model[0]
        x = torch.randn(3, 6, requires_grad=True) if layer == "linear" else torch.randn(3, 6, 4)
        with autocast():
            model(x).float().sum().backward()
        optimizer.step()
        (before,) = casts_of(optimizer)
        dtype = BF16
        if change == "add":
            with torch.no_grad():
                module.weight.add_(1.0)
        elif change in ("load", "assign"):
            state = {"weight": torch.randn_like(module.weight)}
            module.load_state_dict(state, assign=change == "assign")
        elif change == "data":
            module.weight.data = torch.randn_like(module.weight)
        elif change == "transposed data":
            module.weight.data = module.weight.data.transpose(0, 1)
        elif change in ("fp16", "bf16"):
            model.to(FP16 if change == "fp16" else BF16)
            x = x.detach().to(module.weight.dtype)
        elif change == "frozen":
            module.weight.requires_grad_(False)
            x = x.detach().requires_grad_()
        elif change == "swapped":
            module.weight = nn.Parameter(torch.randn_like(module.weight))
        elif change == "other dtype":
            dtype = FP16
        elif change == "shrunk":
            module.weight.data = module.weight.data[:3]
        twin = copy.deepcopy(model)  # which is stock
        results = []
        for net in (model, twin):
            with autocast(dtype=dtype):
                results.append(net(x))
        assert results[0].dtype == dtype
        assert torch.equal(*results)
        if change not in ("bf16", "frozen", "swapped", "assign"):  # which stock runs
            (after,) = casts_of(optimizer)
            assert after is not before

    def test_evaluation_and_ignored_backwards_meet_the_right_weight(self):
        model, optimizer = make("encoder")
        loss_of(model).backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        twin = copy.deepcopy(model)
        for context in (torch.no_grad, torch.inference_mode, optimizer.ignore):
            with context():
                assert torch.equal(loss_of(model, 7), loss_of(twin, 7)), context
        with optimizer.ignore():
            loss_of(model, 8).backward()
        loss_of(twin, 8).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.02, atol=0.01)

    def test_averages_that_are_swapped_in_past_the_version_to_evaluate(self):
        model, optimizer = make("perceptron")
        loss_of(model).backward()
        optimizer.step()
        kept = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.copy_(p.data * 2)
        with torch.no_grad():
            assert torch.equal(loss_of(model, 3), loss_of(copy.deepcopy(model), 3))
        for p, former in zip(model.parameters(), kept, strict=True):
            p.data.copy_(former)
        loss_of(model, 1).backward()
        optimizer.step()

    def test_a_write_past_the_version_raises(self):
        for kind, name in (("perceptron", "3.weight"), ("convolutions", "0.weight")):
            model, optimizer = make(kind)
            loss_of(model).backward()
            optimizer.step()
            weight = model.get_parameter(name)
            weight.data.copy_(weight.data + 1e-3)
            with pytest.raises(RuntimeError, match=rf"'{name}' was written.*discard\(\)"):
                loss_of(model, 1)
            optimizer.discard()
            loss_of(model, 1).backward()
            optimizer.step()

    def test_an_update_in_mid_window_that_bumps_no_version_raises(self):
        model, optimizer = make("perceptron", inner=functools.partial(torch.optim.AdamW, fused=True))
        loss_of(model).backward()
        optimizer.step()
        version = model[0].weight._version
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.optimizer.step()
        if model[0].weight._version == version:
            with pytest.raises(RuntimeError, match=r"0.weight"):
                loss_of(model, 1)

    def test_nan_is_no_change(self):
        model, optimizer = make("perceptron")
        with torch.no_grad():
            model[0].weight.fill_(float("nan"))
        for seed in range(2):
            loss_of(model, seed).backward()
            optimizer.step()

    def test_weights_of_few_elements(self):
        def build():
            return nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1), nn.Linear(1, 1), nn.Conv1d(1, 1, 1))

        model, optimizer = make(build)
        for _ in range(2):
            with autocast():
                y = model[2](model[1](model[0](torch.ones(3, 1)))).sum()
                (y + model[3](torch.ones(1, 1, 1)).sum()).float().backward()
            optimizer.step()
        model[0].weight.data.add_(1.0)
        with autocast(), pytest.raises(RuntimeError, match=r"'0.weight' was written"):
            model[0](torch.ones(3, 1))


class TestFreed:
    """No cast lives in or after what changes weights."""

    @pytest.mark.parametrize("loop", ["counted", "flush", "manual", "closure"])
    def test_before_the_inner_step(self, loop):
        model, optimizer = make("encoder", steps=4 if loop in ("counted", "flush") else None)
        alive = []
        casts = []
        optimizer.optimizer.register_step_pre_hook(
            lambda *_: alive.append([ref() for ref in casts if ref() is not None])
        )

        def closure():
            loss = loss_of(model)
            loss.backward()
            casts.extend(map(weakref.ref, casts_of(optimizer)))
            return loss

        for _ in range(4 if loop == "counted" else 3):
            closure()
            if loop in ("counted", "flush"):
                optimizer.step()
        if loop == "flush":
            optimizer.flush()
        elif loop == "manual":
            optimizer.step()
        elif loop == "closure":
            optimizer.step(closure)
        assert casts
        assert alive == [[]]
        assert not casts_of(optimizer)

    @pytest.mark.parametrize("how", ["discard", "zero_grad", "close", "load", "gone"])
    def test_by_what_ends_a_window(self, how):
        model, optimizer = make("convolutions", steps=None if how == "zero_grad" else 4)
        state = copy.deepcopy(optimizer.state_dict())
        loss_of(model).backward()
        casts = [weakref.ref(cast) for cast in casts_of(optimizer)]
        assert len(casts) == 5
        if how == "load":
            optimizer.load_state_dict(state)
        elif how == "gone":
            del optimizer
            gc.collect()
        else:
            getattr(optimizer, how)()
        assert all(ref() is None for ref in casts)

    def test_zero_grad_in_mid_window_keeps_them(self):
        model, optimizer = make("perceptron")
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(casts_of(optimizer)) == 2

    @pytest.mark.parametrize("steps", [1, None])
    def test_a_step_that_fails_after_a_forward_of_its_own(self, steps):
        class Fails(torch.optim.SGD):
            def step(self, closure=None):
                loss_of(model, 1)
                assert casts_of(optimizer)
                super().step()
                raise ValueError("broken")

        model, optimizer = make("perceptron", steps=steps, inner=Fails)
        loss_of(model).backward()
        with pytest.raises(ValueError, match="broken"):
            optimizer.step()
        assert not casts_of(optimizer)

    def test_between_the_evaluations_of_a_closure(self):
        def after(keep):
            model, optimizer = make("perceptron", keep, None, torch.optim.LBFGS)

            def closure():
                optimizer.zero_grad()
                loss = loss_of(model)
                loss.backward()
                return loss

            for _ in range(2):
                optimizer.step(closure)
            return list(model.parameters())

        for ours, theirs in zip(after(True), after(False), strict=True):
            assert torch.equal(ours, theirs)

    def test_parameters_that_are_taken_out(self):
        model, optimizer = make("perceptron")
        loss_of(model).backward()
        optimizer.step()
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if p is not model[0].weight]
        loss_of(model).backward()
        optimizer.step()
        assert len(casts_of(optimizer)) == 1
        assert "casts: those of 1 weights" in optimizer.explain()


def test_the_conv1d_of_transformers():
    class Conv1D(nn.Module):
        __module__ = "transformers.pytorch_utils"

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.zeros(6))

        def forward(self, x):
            return torch.addmm(self.bias, x, self.weight)

    def after(keep):
        model, optimizer = make(lambda: nn.Sequential(Conv1D(), nn.Tanh(), Conv1D()), keep)
        for seed in range(8):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
            with autocast():
                out = model(x)
            out.float().square().sum().backward()
            assert len(casts_of(optimizer)) == (2 if keep else 0)
            optimizer.step()
        return list(model.parameters())

    for ours, theirs in zip(after(True), after(False), strict=True):
        assert torch.equal(ours, theirs)


def test_a_reduction_over_ranks(tmp_path):
    """What one rank has of it: a window's last backward reduces, and others' weights may be taken over."""
    if not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    place = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    try:

        def after(keep):
            model, optimizer = make("perceptron", keep, data_parallel=dist.group.WORLD)
            for seed in range(10):
                loss_of(model, seed).backward()
                optimizer.step()
            optimizer.flush()
            assert optimizer.num_updates == 3
            assert not casts_of(optimizer)
            loss_of(model)
            optimizer.attach(nn.parallel.DistributedDataParallel(model))
            assert not casts_of(optimizer)
            optimizer.close()
            return list(model.parameters())

        for ours, theirs in zip(after(True), after(False), strict=True):
            assert torch.equal(ours, theirs)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("saved", [torch.ops.aten._to_copy.default, torch.ops.aten.mm.default])
def test_a_selective_checkpoint_counts_the_operators_of_both_forwards(saved):
    def after(keep):
        model, optimizer = make("perceptron", keep, 2)
        context = functools.partial(checkpoint.create_selective_checkpoint_contexts, [saved])
        for seed in range(4):
            x = model.batch(torch.Generator().manual_seed(seed)).requires_grad_()
            with autocast():
                out = checkpoint.checkpoint(model, x, use_reentrant=False, context_fn=context)
            out.float().square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    for ours, theirs in zip(after(True), after(False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["perceptron", "convolutions"])
def test_a_compiled_model_is_as_without(kind):
    def after(keep):
        torch.compiler.reset()
        model, optimizer = make(kind, keep, 2)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for seed in range(4):
            x = model.batch(torch.Generator().manual_seed(seed))
            with autocast():
                out = compiled(x)
            out.float().square().mean().backward()
            assert not casts_of(optimizer)
            optimizer.step()
        return list(model.parameters())

    for ours, theirs in zip(after(True), after(False), strict=True):
        assert torch.equal(ours, theirs)
    torch.compiler.reset()


def test_arguments():
    with pytest.raises(ValueError, match=r"(?s)keep_casts=True needs model=.*allowed: keep_casts=False"):
        fusedacc.AccumulatingOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()), keep_casts=True)
    fusedacc.AccumulatingOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()), keep_casts=False)
