"""Bytes of single operators, compared with counts by hand."""

import functools

import pytest
import torch
from backends import cpu_backends
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from fusedacc.functional import prepare, scale_accumulate_, scale_cast_, total_norm
from fusedacc.kernels.lists import accumulate_rows_
from fusedacc.traffic import TrafficMeter

F32, BF16 = torch.float32, torch.bfloat16
N = 1000  # elements of every vector here


def new(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def vectors(count: int, dtype: torch.dtype = F32) -> list[torch.Tensor]:
    return [new(N, dtype=dtype) for _ in range(count)]


def adamw(unscales: bool = False, amsgrad: bool = False):
    """The counter of steps is read only."""
    p, g, m, v, top = ([torch.rand(N)] for _ in range(5))
    scale = {"grad_scale": torch.ones(()), "found_inf": torch.zeros(())} if unscales else {}
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "maximize": False}
    steps = [torch.ones(())]
    return lambda: torch._fused_adamw_(
        p, g, m, v, top if amsgrad else [], steps, amsgrad=amsgrad, **settings, **scale
    )


def sgd(first: bool):
    p, g, buffers = vectors(1), vectors(1), vectors(1)
    settings = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
    return lambda: torch._fused_sgd_(
        p, g, buffers, nesterov=False, maximize=False, is_first_step=first, **settings
    )


def unscale():
    operands = vectors(2), torch.zeros(()), torch.ones(())
    return lambda: torch._amp_foreach_non_finite_check_and_unscale_(*operands)


X, Y, Z, HALF = *vectors(3), new(N, dtype=BF16)
FLAGS = torch.zeros(N, dtype=torch.bool)
LONG = new(20000)
A, B, C = new(10, 20), new(20, 30), new(10, 30)
TABLE, ROWS, MANY = new(50, 8), torch.tensor([3, 3, 7]), torch.zeros(500, dtype=torch.int64)
ATEN, of = torch.ops.aten, functools.partial
SCORES, TARGETS = new(6, 11), torch.zeros(6, dtype=torch.int64)
Q = new(2, 3, 5, 8)
IMAGE, KERNEL = new(1, 2, 6, 6), new(3, 2, 3, 3)
CONVOLVED = IMAGE, KERNEL, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]

CASES = {  # name: (call, bytes read, bytes written)
    "add": (of(torch.add, X, Y), 8 * N, 4 * N),
    "x + x reads x once": (of(torch.add, X, X), 4 * N, 4 * N),
    "add_": (lambda: X.add_(Y, alpha=2), 8 * N, 4 * N),
    "mixed add_": (lambda: X.add_(HALF), 6 * N, 4 * N),
    "add to out=": (lambda: torch.add(X, Y, out=Z), 8 * N, 4 * N),
    "add to an out= that is read": (lambda: torch.add(X, Y, out=X), 8 * N, 4 * N),
    "mul_ by a number": (lambda: X.mul_(0.5), 4 * N, 4 * N),
    "expanded": (lambda: torch.add(X, torch.ones(1).expand(N)), 4 * N + 4, 4 * N + 4),
    "every second": (lambda: X[::2].mul_(2), 2 * N, 2 * N),
    "overlapping windows": (lambda: X.as_strided((N - 2, 3), (1, 1)).sum(), 4 * N, 4),
    "comparison": (lambda: X > Y, 8 * N, N),
    "where": (lambda: torch.where(FLAGS, X, Y), 9 * N, 4 * N),
    "cast": (lambda: HALF.float(), 2 * N, 4 * N),
    "no cast": (lambda: X.float(), 0, 0),
    "copy_": (lambda: X.copy_(HALF), 2 * N, 4 * N),
    "clone": (lambda: X.clone(), 4 * N, 4 * N),
    "contiguous of a transpose": (lambda: A.t().contiguous(), 800, 800),
    "zero_": (lambda: X.zero_(), 0, 4 * N),
    "fill_": (lambda: X.fill_(1.0), 0, 4 * N),
    "normal_": (lambda: X.normal_(), 0, 4 * N),
    "zeros_like": (lambda: torch.zeros_like(X), 0, 4 * N),
    "empty": (lambda: torch.empty(N), 0, 0),
    "views": (lambda: A.t().reshape(200)[3:].view(1, -1).expand(4, -1).detach(), 800, 800),
    "only views": (lambda: A.view(-1)[3:].unsqueeze(0).expand(4, -1).detach().split(9, 1), 0, 0),
    "cat": (lambda: torch.cat([X, Y]), 8 * N, 8 * N),
    "masked_fill_": (lambda: X.masked_fill_(FLAGS, 0.0), 5 * N, 4 * N),
    "bernoulli with a number": (lambda: torch.bernoulli(X, 0.5), 0, 4 * N),
    "sum": (lambda: X.sum(), 4 * N, 4),
    "mean by row": (lambda: A.mean(1), 800, 40),
    "norm": (lambda: torch.linalg.vector_norm(X), 4 * N, 4),
    "max with indices": (lambda: A.max(1), 800, 40 + 80),
    "item": (lambda: X[0].item(), 4, 0),
    "softmax": (lambda: torch.softmax(A, 1), 800, 800),
    "mm": (lambda: A @ B, 800 + 2400, 1200),
    "addmm": (lambda: torch.addmm(C, A, B), 1200 + 800 + 2400, 1200),
    "addmm without self": (lambda: torch.addmm(C, A, B, beta=0), 800 + 2400, 1200),
    "addmm onto itself": (lambda: torch.addmm(C, A, B, out=C), 1200 + 800 + 2400, 1200),
    "addmm_": (lambda: C.addmm_(A, B), 1200 + 800 + 2400, 1200),
    "bmm": (lambda: torch.bmm(A[None], B[None]), 3200, 1200),
    "linear": (lambda: F.linear(A, B.t(), C[0]), 800 + 2400 + 120, 1200),
    "embedding": (lambda: F.embedding(ROWS, TABLE), 24 + 3 * 32, 96),
    "embedding of more tokens than rows": (of(F.embedding, MANY, TABLE), 500 * 8 + 50 * 32, 500 * 32),
    "embedding, backward": (of(ATEN.embedding_dense_backward, TABLE[:3], ROWS, 50, -1, False), 120, 1600),
    "index": (lambda: TABLE[ROWS], 24 + 96, 96),
    "index by a mask": (lambda: X[FLAGS], N, 0),
    "gather": (lambda: torch.gather(SCORES, 1, TARGETS[:, None]), 48 + 24, 24),
    "index_add_": (lambda: TABLE.index_add_(0, ROWS, TABLE[:3].clone()), 24 + 96 + 96 + 96, 96 + 96),
    "scatter_add_": (lambda: SCORES.scatter_add_(1, TARGETS[:, None], C[:6]), 48 + 24 + 24, 24),
    "index_put_": (lambda: TABLE.index_put_((ROWS,), torch.zeros(())), 24 + 4, 96 + 4),
    "index_put_ that adds": (lambda: TABLE.index_put_((ROWS,), C[:3, :8], True), 24 + 96 + 96, 96),
    "nll_loss": (lambda: F.nll_loss(SCORES, TARGETS), 48 + 24, 4 + 4),
    "nll_loss, backward": (
        of(ATEN.nll_loss_backward, X[0], SCORES, TARGETS, None, 1, -100, torch.tensor(6.0)),
        4 + 48 + 4,
        6 * 11 * 4,
    ),
    "layer_norm": (lambda: F.layer_norm(A, (20,), C[0, :20], C[1, :20]), 800 + 160, 800 + 80),
    "dropout": (lambda: torch.native_dropout(X, 0.5, True), 4 * N, 5 * N),
    "batch norm, evaluated": (of(F.batch_norm, IMAGE, X[:2], Y[:2].abs()), 288 + 8 + 8, 288),
    "attention": (
        lambda: ATEN._scaled_dot_product_flash_attention_for_cpu(Q, Q.clone(), Q.clone()),
        5 * 960,
        3 * 960 + 2 * 3 * 5 * 4,
    ),
    "convolution": (of(F.conv2d, IMAGE, KERNEL), 288 + 216, 192),
    "convolution, backward to the weight only": (
        of(ATEN.convolution_backward, IMAGE[:, :1, :4, :4].expand(1, 3, 4, 4), *CONVOLVED),
        64 + 288,
        216,
    ),
    "batch norm in training": (
        of(F.batch_norm, IMAGE, X[:2], Y[:2], None, None, True),
        288 + 8 + 8,
        288 + 8 + 8 + 16,  # the batch's statistics too
    ),
    "foreach add_": (lambda: torch._foreach_add_([X, Y], [Z, Z.clone()]), 20 * N, 12 * N),
    "foreach add_ of a mixed list": (lambda: torch._foreach_add_([X], [HALF]), 6 * N, 4 * N),
    "foreach copy_": (lambda: torch._foreach_copy_([X, Y], [HALF, Z]), 6 * N, 8 * N),
    "foreach zero_": (lambda: torch._foreach_zero_([X, Y]), 0, 8 * N),
    "foreach norm": (lambda: torch._foreach_norm([X, Y]), 8 * N, 8),
    "foreach mul by a tensor": (lambda: torch._foreach_mul_([X, Y], Z[0]), 8 * N + 4, 8 * N),
    "unscale": (unscale(), 8 * N + 4 + 4, 8 * N + 4),
    "fused sgd, first": (sgd(True), 8 * N, 8 * N),
    "fused sgd": (sgd(False), 12 * N, 8 * N),
    "fused adamw": (adamw(), 16 * N + 4, 12 * N),
    "fused adamw that unscales": (adamw(unscales=True), 16 * N + 4 + 8, 16 * N),
    "fused adamw, amsgrad": (adamw(amsgrad=True), 20 * N + 4, 16 * N),
    "assertion": (of(torch._assert_async, torch.ones((), dtype=torch.bool), "why"), 1, 0),
    "nothing": (lambda: new(0).add_(new(0)), 0, 0),
    "fusedacc": (lambda: scale_accumulate_([X, Y], [Z, HALF], 0.5, backend="cpu"), 14 * N, 8 * N),
    "fusedacc, first touch": (
        lambda: scale_accumulate_([X, Y], [Z, HALF], overwrite=[True, False], backend="cpu"),
        10 * N,
        8 * N,
    ),
    "fusedacc, all first": (lambda: scale_accumulate_([X], [HALF], overwrite=True), 2 * N, 4 * N),
    "fusedacc, in place": (lambda: scale_accumulate_([X], [X], 0.5, overwrite=True), 4 * N, 4 * N),
    "fusedacc, a plan in place": (lambda: prepare([X], backend="cpu")([X], 0.5), 4 * N, 4 * N),
    "fusedacc, norm": (lambda: total_norm([X, HALF], backend="cpu"), 6 * N + 2 * 8, 2 * 8 + 4 + 4),
    "fusedacc, norm of the same twice": (lambda: total_norm([X, X], float("inf")), 4 * N + 2 * 8, 2 * 8 + 8),
    "fusedacc, norm of an expanded": (lambda: total_norm([X[:1].expand(N)]), 4 + 8, 8 + 8),
    "fusedacc, norm of many chunks": (lambda: total_norm([LONG]), 80000 + 3 * 8, 3 * 8 + 8),
    "fusedacc, scale and cast": (lambda: scale_cast_([HALF], [X], Z[0], backend="cpu"), 4 * N + 4, 2 * N),
    "fusedacc, scale on the device": (lambda: scale_accumulate_([X], [HALF], Z[0]), 6 * N + 4, 4 * N),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_equal_hand_counts(name):
    call, read, written = CASES[name]
    with TrafficMeter() as meter:
        call()
    found = meter.as_dict()
    assert (found["read_bytes"], found["written_bytes"]) == (read, written), found["by_op"]
    assert meter.total_bytes == read + written
    assert not meter.uncounted


@pytest.mark.parametrize("overwrite", [False, True, [True, False, False]])
@pytest.mark.parametrize("gradient_dtype", [F32, BF16, torch.float16])
def test_a_plan_counts_the_bytes_of_a_fresh_list(gradient_dtype, overwrite, cpu_backend):
    sums = [new(7, 3), new(0), new(33).to(torch.float16 if gradient_dtype == torch.float16 else F32)]
    gradients = [torch.randn(total.shape).to(gradient_dtype) for total in sums]
    plan = prepare(sums, backend=cpu_backend)
    with TrafficMeter() as prepared:
        plan(gradients, 0.5, overwrite=overwrite)
    with TrafficMeter() as fresh:
        scale_accumulate_(sums, gradients, 0.5, overwrite=overwrite, backend="cpu")
    wanted = fresh.as_dict()
    flags = [overwrite] * 3 if isinstance(overwrite, bool) else overwrite
    read = sum(each.nbytes for each in gradients)
    read += sum(each.nbytes for each, first in zip(sums, flags, strict=True) if not first)
    counted = [wanted]
    if cpu_backend != "eager":
        found = prepared.as_dict()
        counted.append(found if cpu_backend == "cpu" else found["by_op"]["triton::scale_accumulate"])
    for each in counted:
        assert (each["read_bytes"], each["written_bytes"]) == (read, sum(total.nbytes for total in sums))
    assert not prepared.uncounted


@pytest.mark.skipif("triton" not in cpu_backends(), reason="the triton backend cannot run here")
def test_tritons_norm_is_counted():
    with TrafficMeter() as meter:
        total_norm([X, HALF, Y], backend="triton")
    counted = meter.as_dict()["by_op"]["triton::norm_partials"]
    assert (counted["calls"], counted["read_bytes"], counted["written_bytes"]) == (2, 10 * N, 3 * 8)
    counted = meter.as_dict()["by_op"]["triton::finish_norm"]
    assert (counted["read_bytes"], counted["written_bytes"]) == (3 * 8, 8)
    assert not meter.uncounted


def test_operators_without_a_rule_are_named():
    with TrafficMeter() as meter:
        torch.linalg.qr(A)
        torch.linalg.qr(A)
        X.add_(1)
        X.to_sparse()
    assert meter.uncounted["aten.linalg_qr.default"] == 2
    assert any("sparse" in name for name in meter.uncounted)
    assert meter.as_dict()["by_op"]["aten::add_"]["total_bytes"] == 8 * N
    assert "aten.linalg_qr.default (2 calls)" in meter.table()


def test_writes_by_a_mask_are_uncounted():
    with TrafficMeter() as meter:
        X[FLAGS] = torch.zeros(())
    assert list(meter.uncounted) == ["aten.index_put_.default"]


def test_fake_tensors_count_like_real_ones():
    def program():
        layer = torch.nn.Linear(64, 32)
        layer(torch.randn(4, 64)).sum().backward()

    with TrafficMeter() as real:
        program()
    with FakeTensorMode(), TrafficMeter() as fake:
        program()
    assert fake.as_dict() == real.as_dict()
    with FakeTensorMode(), TrafficMeter() as meter:
        indices, gradients = torch.zeros(3, dtype=torch.int64), torch.ones(3, 7)
        torch.ops.fusedacc.accumulate_rows_(torch.zeros(50, 7), indices, gradients)
    assert meter.uncounted == {"fusedacc.accumulate_rows_.default": 1}


def test_in_inference_mode_casts_and_copies_are_counted_and_composites_decomposed():
    with torch.inference_mode(), TrafficMeter() as meter:
        F.linear(A, B.t(), C[0])
    assert list(meter.as_dict()["by_op"]) == ["aten::addmm"]
    with torch.inference_mode(), TrafficMeter() as meter:
        HALF.float()
        A.t().contiguous()
        A.t().reshape(200)
        A.reshape(200)
        X.float()
    assert meter.total_bytes == 6 * N + 2 * 1600


NAMED = torch.tensor([[3, 1, 3], [0, 1, 3]])  # three rows; six indices, five without those of row 0


@pytest.mark.parametrize("backend", [name for name in cpu_backends() if name != "eager"])
def test_rows_of_a_table_are_counted_once_and_padding_is_not(backend):
    table, gradients, scale = torch.zeros(50, 7), torch.ones(2, 3, 7).bfloat16(), torch.tensor(0.5)
    for padding, named, rows_touched in ((None, 6, 3), (0, 5, 2)):
        with TrafficMeter() as meter:
            accumulate_rows_(table, NAMED, gradients, scale, padding_idx=padding, backend=backend)
        own = {"cpu": "fusedacc::accumulate_rows_", "triton": "triton::add_rows"}[backend]
        counted = meter.as_dict()["by_op"][own]
        touched = rows_touched * 7 * 4
        assert counted["read_bytes"] == touched + 6 * 8 + named * 7 * 2 + 4
        assert counted["written_bytes"] == touched
        assert not meter.uncounted


def test_rows_that_are_filled_are_counted():
    with TrafficMeter() as meter:
        torch.zeros(50, 7).index_fill_(0, NAMED.flatten(), 0.0)
        torch.zeros(50, 7).index_fill(0, NAMED[0], 1.0)
    counted = meter.as_dict()["by_op"]
    assert counted["aten::index_fill_"]["written_bytes"] == 6 * 7 * 4
    assert counted["aten::index_fill"]["read_bytes"] == 50 * 7 * 4 + 3 * 8
    assert not meter.uncounted
