"""`model=` on a GPU: the same gradients as without it, also on side streams and in graphs."""

import contextlib
import copy

import pytest
import torch
from gpu import nothing_waits, side_stream
from torch import nn

import fusedacc

pytestmark = pytest.mark.cuda
F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Net(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(1000, 64, padding_idx=1)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, 1000, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.tanh(self.up(x))))


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 1000, (4, 33), generator=torch.Generator().manual_seed(seed)).cuda()


def loss_of(model, seed: int, autocast: bool = False):
    with torch.autocast("cuda", BF16, enabled=autocast):
        scores = model(tokens(seed))
    return nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens(seed + 50).flatten())


def pair(tied: bool, dtype=F32, backend: str = "auto", **options):
    """Return a model with `model=` and a copy without, each with its wrapper."""
    model = Net(tied).cuda().to(dtype)
    twin = copy.deepcopy(model)
    made = []
    for net, given in ((model, {"model": model}), (twin, {})):
        inner = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
        given |= {"backend": backend, "max_grad_norm": 1.0, **options}
        made.append((net, fusedacc.AccumulatingOptimizer(inner, 4, **given)))
    return made


@pytest.mark.parametrize("backend", ["auto", "cuda", "triton", "eager"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "autocast"])
@pytest.mark.parametrize("tied", [True, False])
def test_windows_equal_those_without_model(tied, kind, backend):
    dtype = {"bfloat16": BF16, "float16": FP16}.get(kind, F32)
    made = pair(tied, dtype, backend)
    (model, ours), (twin, theirs) = made
    tolerance = {"rtol": 1e-3, "atol": 1e-6} if kind == "float32" else {"rtol": 0.05, "atol": 5e-3}
    for seed in range(8):
        for net, optimizer in made:
            loss_of(net, seed, kind == "autocast").backward()
            optimizer.step()
        if ours.has_updated:
            for a, b in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, **tolerance)
            torch.testing.assert_close(ours.grad_norm, theirs.grad_norm, rtol=tolerance["rtol"], atol=0)
            model.load_state_dict(twin.state_dict())
        for _, optimizer in made:
            optimizer.zero_grad()


def test_nothing_waits_for_the_device():
    (model, optimizer), _ = pair(tied=False)
    batches = [tokens(seed) for seed in range(8)]
    for seed, batch in enumerate(batches):
        if seed == 4:
            torch.cuda.synchronize()
        with nothing_waits() if seed >= 4 else contextlib.nullcontext():
            model(batch).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()


def test_a_forward_on_a_side_stream():
    made = pair(tied=True)
    for net, optimizer in made:
        for seed in range(4):
            loss = loss_of(net, seed)
            with side_stream():
                other = loss_of(net, seed + 10)
            (loss + other).backward()
            optimizer.step()
    for a, b in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6)


def test_a_captured_window_equals_the_eager_one():
    """All bits are equal. Every replay looks up other rows."""
    torch.use_deterministic_algorithms(True)
    try:
        model, twin = Net(False).cuda(), Net(False).cuda()
        static = [tokens(seed).clone() for seed in range(2)]

        def window(net, optimizer, batches):
            for batch in batches:
                net(batch).float().square().mean().backward()
                optimizer.step()

        made = []
        for net in (model, twin):
            inner = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
            made.append(fusedacc.AccumulatingOptimizer(inner, 2, model=net))
        with side_stream() as stream:
            for _ in range(2):
                made[0].zero_grad()
                window(model, made[0], static)
        model.load_state_dict(twin.state_dict())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            made[0].zero_grad()
            window(model, made[0], static)
        for replay in range(3):
            batches = [tokens(100 + 2 * replay), tokens(101 + 2 * replay)]
            for memory, batch in zip(static, batches, strict=True):
                memory.copy_(batch)
            graph.replay()
            window(twin, made[1], batches)
            made[1].zero_grad()
            assert all(map(torch.equal, model.parameters(), twin.parameters()))
    finally:
        torch.use_deterministic_algorithms(False)
