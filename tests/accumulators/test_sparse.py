"""Sparse gradients are concatenated, and written at most as often as autograd writes them."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedacc
from fusedacc import amp

F64 = torch.float64
ROWS, WIDTH, LENGTH = 50, 8, 20


class Coalesced(torch.autograd.Function):
    """A lookup whose gradient is sparse and coalesced."""

    @staticmethod
    def forward(ctx, table: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return table[tokens]

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (tokens,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(tokens[None], gradient, (ROWS, WIDTH)).coalesce(), None


LOOKUPS = {
    "uncoalesced": lambda table, tokens: nn.functional.embedding(tokens, table, sparse=True),
    "coalesced": Coalesced.apply,
    "mixed": lambda table, tokens: (Coalesced.apply if tokens[0] % 2 else LOOKUPS["uncoalesced"])(
        table, tokens
    ),
}


def table_of(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    given = {"generator": generator}
    return [
        (torch.randint(0, ROWS, (LENGTH,), **given), torch.randn(LENGTH, WIDTH, **given))
        for _ in range(count)
    ]


def gradient(lookup, count: int) -> Tensor:
    """Return the dense gradient of the mean in float64."""
    table = table_of(F64)
    for tokens, weights in batches(count):
        ((lookup(table, tokens) * weights).sum() / count).backward()
    return table.grad.to_dense()


def window(optimizer, table: nn.Parameter, lookup, count: int, loss_scale: float = 1.0) -> None:
    """Run the micro-batches. Each overwrites the tokens and the output's gradient of the previous one."""
    tokens, output = torch.empty(LENGTH, dtype=torch.long), torch.empty(LENGTH, WIDTH)
    for index, (of_batch, weights) in enumerate(batches(count)):
        tokens.copy_(of_batch)
        output.copy_(weights * loss_scale)
        lookup(table, tokens).backward(output)
        if index < count - 1:
            optimizer.step(), optimizer.zero_grad()


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", LOOKUPS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_accumulated_gradient_is_right(kind, count, hooked):
    table, held = table_of(), []
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([table], lr=0.0), count)
    if hooked:
        table.register_hook(held.append)
    window(optimizer, table, LOOKUPS[kind], count)
    seen = [each.to_dense() for each in held]
    found = table.grad
    assert kind == "mixed" or found.is_coalesced() == (kind == "coalesced")
    torch.testing.assert_close(
        found.to_dense().double(), gradient(LOOKUPS[kind], count), rtol=1e-6, atol=1e-6
    )
    found._values().zero_()
    assert all(map(torch.equal, seen, (each.to_dense() for each in held)))


@pytest.mark.parametrize("count", [1, 3])
def test_clipping_and_a_loss_scale(count):
    start, table = table_of(), table_of()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([table], lr=1.0), count, max_grad_norm=0.5)
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    for tokens, weights in batches(count):
        held = weights * scaler.scale(torch.tensor(1.0))
        kept = held.clone()
        LOOKUPS["uncoalesced"](table, tokens).backward(held)
        scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
        assert torch.equal(held, kept), "the accumulator uses memory that the user holds"
    wanted = gradient(LOOKUPS["uncoalesced"], count)
    wanted *= 0.5 / wanted.norm()
    torch.testing.assert_close((start - table).detach().double(), wanted, rtol=1e-4, atol=1e-5)


class Written(TorchDispatchMode):
    """Counts the float32 elements that operators write, but not inside additions of sparse tensors."""

    elements = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        strided = isinstance(found, Tensor) and found.layout is torch.strided and found.dtype == torch.float32
        if strided and not any(name in operator.name() for name in ("empty", "resize_")):
            given = [arg for arg in args if isinstance(arg, Tensor) and arg.layout is torch.strided]
            is_view = any(torch._C._is_alias_of(found, arg) for arg in given)
            if operator._schema.is_mutable or not (is_view or "_values" in operator.name()):
                self.elements += found.numel()
        return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_are_written_as_often_as_autograd_writes_them(count):
    """Neither the mean's factor, when something is added, nor the first gradient costs a pass."""
    elements = []
    for wrap in (lambda inner: inner, lambda inner: fusedacc.AccumulatingOptimizer(inner, count)):
        table = table_of()
        optimizer = wrap(torch.optim.SGD([table], lr=0.0))
        with Written() as written:
            for index, (tokens, weights) in enumerate(batches(count)):
                (LOOKUPS["uncoalesced"](table, tokens) * weights).sum().backward()
                if index < count - 1 and isinstance(optimizer, fusedacc.AccumulatingOptimizer):
                    optimizer.step()
        elements.append(written.elements)
    assert elements[1] - elements[0] == sum(range(2, count + 1)) * LENGTH * WIDTH


@pytest.mark.parametrize("steps", [None, 4])
def test_later_windows_append_rows_unless_p_grad_shows_the_accumulator(steps):
    table = table_of()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([table], lr=0.0), steps)
    rows, held = [], []
    for index, (tokens, weights) in enumerate(2 * batches(4)):
        output = LOOKUPS["uncoalesced"](table, tokens)
        with Written() as written:
            output.backward(weights)
        rows.append(written.elements // (WIDTH * LENGTH))
        if steps is None:
            held.append((table.grad, table.grad.to_dense()))
        if steps or index % 4 == 3:
            optimizer.step(), optimizer.zero_grad()
    assert rows == ([1, 2, 3, 4] * 2 if steps is None else [1, 2, 3, 4, 1, 2, 1, 1])
    for total, before in held:
        assert torch.equal(total.to_dense(), before)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_dense_sum_after_a_sparse_one_is_counted_in_full(steps):
    table = table_of()
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([table], lr=0.0), steps)
    for is_sparse in (True, False):
        for index, (tokens, weights) in enumerate(batches(steps)):
            nn.functional.embedding(tokens, table, sparse=is_sparse).backward(weights)
            if index < steps - 1:
                optimizer.step(), optimizer.zero_grad()
        assert table.grad.is_sparse == is_sparse
        rows = steps * LENGTH * (WIDTH * 4 + 8)
        assert optimizer.accumulator_bytes == (rows if is_sparse else table.nbytes)
        optimizer.step(), optimizer.zero_grad()
