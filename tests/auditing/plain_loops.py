"""Training loops, right and wrong, on small models. The name of a wrong loop begins with "bad_".

`CASES` has all of them: functions without arguments, by their names.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedacc
import fusedacc.amp

CASES = {}
#: Micro-batches in a window.
K = 4


def case(function):
    """Add a loop to the cases."""
    CASES[function.__name__] = function
    return function


def mlp(dtype=torch.float32, dropout=0.0):
    return nn.Sequential(
        nn.Linear(20, 48),
        nn.LayerNorm(48),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(48, 48),
        nn.Tanh(),
        nn.Linear(48, 10),
    ).to(dtype)


def data(n=24, size=16, dtype=torch.float32, seed=1):
    random = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randn(size, 20, generator=random)
        yield x.to(dtype), (x[:, :10] + x[:, 10:]).argmax(1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loop(
    model, optimizer, batches, k=K, divide=True, after_backward=None, before_step=None, loss_function=None
):
    """Train in windows of k micro-batches, with functions that are called at two moments."""
    for i, (x, y) in enumerate(batches):
        loss = loss_function(model, x, y) if loss_function else F.cross_entropy(model(x), y)
        (loss / k if divide else loss).backward()
        if after_backward:
            after_backward(i)
        if (i + 1) % k == 0:
            if before_step:
                before_step()
            optimizer.step()
            optimizer.zero_grad()


@case
def right():
    model = mlp()
    loop(model, adam(model), data())


@case
def right_no_accumulation():
    model = mlp()
    loop(model, adam(model), data(), k=1, divide=False)


@case
def right_weighted_division():
    """The loss is multiplied by 1/k."""
    model = mlp()
    loop(
        model,
        adam(model),
        data(),
        divide=False,
        loss_function=lambda model, x, y: F.cross_entropy(model(x), y) * (1 / K),
    )


@case
def right_divides_gradients():
    model = mlp()

    def divide():
        for p in model.parameters():
            p.grad /= K

    loop(model, sgd(model), data(), divide=False, before_step=divide)


@case
def right_partial_window():
    """The last window of an epoch divides by its own length."""
    model = mlp()
    optimizer = adam(model)
    for epoch in range(2):
        batches = list(data(10, seed=epoch))
        for start in range(0, len(batches), K):
            window = batches[start : start + K]
            for x, y in window:
                (F.cross_entropy(model(x), y) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


@case
def right_clip():
    model = mlp()
    loop(model, adam(model), data(), before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05))


@case
def right_own_clip():
    model = mlp()

    def clip():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.mul_(min(1.0, 0.05 / norm.item()))

    loop(model, adam(model), data(), before_step=clip)


@case
def right_clip_value():
    model = mlp()
    loop(model, adam(model), data(), before_step=lambda: nn.utils.clip_grad_value_(model.parameters(), 1e-3))


@case
def right_noise():
    model = mlp()

    def noise():
        for p in model.parameters():
            p.grad += 0.1 * p.grad.norm() / p.numel() ** 0.5 * torch.randn_like(p)

    loop(model, adam(model), data(), before_step=noise)


@case
def right_weight_decay_in_gradient():
    model = mlp()

    def decay():
        for p in model.parameters():
            p.grad += 0.01 * p.detach()

    loop(model, adam(model), data(), before_step=decay)


@case
def right_dropout():
    model = mlp(dropout=0.5)
    loop(model, adam(model), data())


@case
def right_bf16():
    model = mlp(torch.bfloat16)
    loop(model, sgd(model), data(dtype=torch.bfloat16))


@case
def right_bf16_64():
    model = mlp(torch.bfloat16)
    loop(model, sgd(model), data(192, dtype=torch.bfloat16), k=64)


@case
def right_float64():
    model = mlp(torch.float64)
    loop(model, sgd(model), data(dtype=torch.float64))


@case
def right_autocast():
    model = mlp()

    def loss(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    loop(model, adam(model), data(), loss_function=loss)


@case
def right_tokens():
    """Token-weighted: sums over tokens, divided by the window's tokens."""
    model, optimizer = text_model(), None
    optimizer = adam(model)
    batches = list(text())
    for start in range(0, len(batches), K):
        window = batches[start : start + K]
        total = sum(y.ne(-100).sum() for _, y in window)
        for x, y in window:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
            (loss / total).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_tokens_weighted_means():
    model = text_model()
    optimizer = adam(model)
    batches = list(text())
    for start in range(0, len(batches), K):
        window = batches[start : start + K]
        total = sum(y.ne(-100).sum() for _, y in window)
        for x, y in window:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss * y.ne(-100).sum() / total).backward()
        optimizer.step()
        optimizer.zero_grad()


def text(n=16, seed=0):
    random = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randint(0, 64, (4, 16), generator=random)
        y = (x * 3 + 1) % 64
        length = int(torch.randint(2, 17, (1,), generator=random))
        y[:, length:] = -100
        yield x, y


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.body = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.head = nn.Linear(32, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


def text_model(tied=True):
    return Tied(tied)


def text_loop(model, optimizer, divide=K, **options):
    for i, (x, y) in enumerate(text(**options)):
        (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / divide).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_mean_of_means():
    model = text_model()
    text_loop(model, adam(model))


@case
def bad_masked_means():
    """A hand-written masked mean over each micro-batch, as in many RL trainers."""
    model = text_model()
    optimizer = adam(model)
    for i, (x, y) in enumerate(text()):
        mask = y.ne(-100)
        each = F.cross_entropy(model(x).flatten(0, 1), y.flatten().clamp(min=0), reduction="none")
        loss = (each * mask.flatten()).sum() / mask.sum()
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_tied():
    model = text_model()
    optimizer = adam(model)
    for i, (x, _) in enumerate(text()):
        (F.cross_entropy(model(x).flatten(0, 1), x.flatten()) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_tied_added_twice():
    model = text_model()
    optimizer = adam(model)
    for i, (x, _) in enumerate(text()):
        (F.cross_entropy(model(x).flatten(0, 1), x.flatten()) / K).backward()
        if (i + 1) % K == 0:
            model.head.weight.grad += model.embed.weight.grad
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_not_divided():
    model = mlp()
    loop(model, adam(model), data(), divide=False)


@case
def bad_divided_twice():
    model = mlp()

    def divide():
        for p in model.parameters():
            p.grad /= K

    loop(model, adam(model), data(), before_step=divide)


@case
def bad_last_window():
    """10 micro-batches an epoch: the last two are left in p.grad for the next epoch's first update."""
    model = mlp()
    optimizer = adam(model)
    for epoch in range(2):
        loop(model, optimizer, data(10, seed=epoch))


@case
def bad_last_window_divided_by_k():
    model = mlp()
    optimizer = adam(model)
    for epoch in range(2):
        batches = list(data(10, seed=epoch))
        for i, (x, y) in enumerate(batches):
            (F.cross_entropy(model(x), y) / K).backward()
            if (i + 1) % K == 0 or i + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()


@case
def bad_no_zero_grad():
    model = mlp()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()


@case
def bad_zero_grad_each():
    """Only the last micro-batch counts."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()


@case
def bad_one_of_32():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data(96)):
        if i % 32 == 31:
            optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / 32).backward()
        if (i + 1) % 32 == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_first_lost():
    """zero_grad() after the first backward of a window."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if i % K == 0:
            optimizer.zero_grad()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_step_each():
    model = mlp()
    optimizer = adam(model)
    for x, y in data(12):
        (F.cross_entropy(model(x), y) / K).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def bad_one_in_no_grad():
    """One of four micro-batches makes no gradient, and the rest is still divided by four."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        with torch.no_grad() if i % K == 2 else contextlib.nullcontext():
            loss = F.cross_entropy(model(x), y) / K
        if loss.requires_grad:
            loss.backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_backward_twice():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        loss = F.cross_entropy(model(x), y) / K
        loss.backward(retain_graph=i % K == 1)
        if i % K == 1:
            loss.backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_clip_each():
    model = mlp()
    loop(
        model,
        adam(model),
        data(),
        after_backward=lambda i: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    )


@case
def bad_doubling():
    """p.grad is added to itself after each backward: 2^N amplification."""
    model = mlp()

    def double(i):
        for p in model.parameters():
            p.grad += p.grad

    loop(model, adam(model), data(), after_backward=double)


@case
def bad_own_zero_misses_a_parameter():
    model = mlp()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            for p in list(model.parameters())[:-1]:
                p.grad = None


@case
def right_groups():
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": [p for x in list(model)[1:] for p in x.parameters()]},
    ]
    loop(model, torch.optim.SGD(groups, lr=0.01), data())


@case
def right_two_optimizers():
    """Two optimizers for two halves of a model, which step together."""
    model = mlp()
    a, b = adam(model[0]), sgd(model[4:])
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            for optimizer in (a, b):
                optimizer.step()
                optimizer.zero_grad()


@case
def right_gan():
    """The tutorial's DCGAN loop: two backward passes per update of D, and the pass of G also reaches D."""
    g, d = (
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 20)),
        nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1)),
    )
    og, od = adam(g), adam(d)
    bce = nn.BCEWithLogitsLoss()
    for x, _ in data(10):
        d.zero_grad()
        real = d(x).view(-1)
        bce(real, torch.ones_like(real)).backward()
        fake = g(torch.randn(16, 8))
        bce(d(fake.detach()).view(-1), torch.zeros(16)).backward()
        od.step()
        g.zero_grad()
        bce(d(fake).view(-1), torch.ones(16)).backward()
        og.step()


@case
def right_gan_averaged():
    g, d = (
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 20)),
        nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1)),
    )
    og, od = adam(g), adam(d)
    bce = nn.BCEWithLogitsLoss()
    for x, _ in data(10):
        od.zero_grad()
        fake = g(torch.randn(16, 8))
        loss = (bce(d(x).view(-1), torch.ones(16)) + bce(d(fake.detach()).view(-1), torch.zeros(16))) / 2
        loss.backward()
        od.step()
        og.zero_grad()
        bce(d(fake).view(-1), torch.ones(16)).backward()
        og.step()


@case
def right_gradient_penalty():
    """torch.autograd.grad inside, and a loss of several parts."""
    d = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = adam(d)
    for i, (x, _) in enumerate(data()):
        x.requires_grad_()
        out = d(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() - d(torch.randn(16, 20)).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_logging_with_grad():
    """torch.autograd.grad by the parameters only to log a norm."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        loss = F.cross_entropy(model(x), y) / K
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_gradients_by_grad():
    """p.grad filled by hand from torch.autograd.grad."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y) / K, list(model.parameters()))
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = g if p.grad is None else p.grad + g
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_two_losses():
    """Two backward passes per micro-batch, over different numbers of elements."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        out = model(x)
        (F.cross_entropy(out, y) / K).backward(retain_graph=True)
        (0.01 * out.square().mean() / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_half_mse():
    model = mlp()
    loop(
        model,
        adam(model),
        data(),
        loss_function=lambda model, x, y: 0.5 * F.mse_loss(model(x), F.one_hot(y, 10).float()),
    )


@case
def right_half_mse_no_accumulation():
    model = mlp()
    loop(
        model,
        adam(model),
        data(),
        k=1,
        divide=False,
        loss_function=lambda model, x, y: 0.5 * F.mse_loss(model(x), F.one_hot(y, 10).float()),
    )


@case
def right_sum_loss():
    model = mlp()
    loop(
        model,
        sgd(model),
        data(),
        divide=False,
        loss_function=lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum"),
    )


@case
def right_label_smoothing():
    model = mlp()
    loop(
        model,
        adam(model),
        data(),
        loss_function=lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.1),
    )


@case
def right_aux_loss():
    model = mlp()
    loop(
        model,
        adam(model),
        data(),
        loss_function=lambda model, x, y: (
            F.cross_entropy(model(x), y) + 0.01 * model[0].weight.square().sum()
        ),
    )


@case
def right_ragged_last_batch():
    """The last micro-batch of the data is smaller, as with drop_last=False."""
    model = mlp()
    batches = [*data(11), *data(1, size=12)]
    loop(model, adam(model), batches)


@case
def right_checkpoint():
    model = mlp()
    loop(
        model,
        adam(model),
        data(),
        loss_function=lambda model, x, y: F.cross_entropy(
            model[4:](checkpoint(model[:4], x, use_reentrant=False)), y
        ),
    )


@case
def right_checkpoint_reentrant():
    model = mlp()

    def loss(model, x, y):
        x = x.requires_grad_()
        x = checkpoint(model[:3], x, use_reentrant=True)
        return F.cross_entropy(checkpoint(model[3:], x, use_reentrant=True), y)

    loop(model, adam(model), data(), loss_function=loss)


@case
def right_compiled_model():
    model = mlp()
    compiled = torch.compile(model)
    loop(model, adam(model), data(), loss_function=lambda model, x, y: F.cross_entropy(compiled(x), y))


@case
def right_compiled_loss():
    model = mlp()
    compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y))
    loop(model, adam(model), data(), loss_function=lambda model, x, y: compiled(x, y))


@case
def bad_compiled_zero_grad_each():
    model = mlp()
    compiled = torch.compile(model)
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        optimizer.zero_grad()
        (F.cross_entropy(compiled(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()


@case
def right_sparse_embedding():
    model = nn.Sequential(nn.Embedding(500, 16, sparse=True), nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(24):
        x = torch.randint(0, 500, (8, 4))
        (F.cross_entropy(model(x), x[:, 0] % 10) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_sparse_embedding():
    model = nn.Sequential(nn.Embedding(500, 16, sparse=True), nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(24):
        x = torch.randint(0, 500, (8, 4))
        (F.cross_entropy(model(x), x[:, 0] % 10) / K).backward()
        if i % K == 1:
            model[0].weight.grad = None
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_experts():
    """Each micro-batch uses one of several experts."""
    experts, router = nn.ModuleList(mlp() for _ in range(6)), nn.Linear(20, 20)
    model = nn.ModuleList([experts, router])
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(experts[i * i % 6](router(x)), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_expert_divided_again():
    experts, router = nn.ModuleList(mlp() for _ in range(3)), nn.Linear(20, 20)
    model = nn.ModuleList([experts, router])
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(sum(e(router(x)) for e in experts), y) / K).backward()
        if (i + 1) % K == 0:
            for p in experts[1].parameters():
                p.grad /= K
            optimizer.step()
            optimizer.zero_grad()


@case
def right_frozen_part():
    model = mlp()
    for p in model[0].parameters():
        p.requires_grad_(False)
    loop(model, adam(model), data())


@case
def bad_part_frozen_for_a_micro_batch():
    """A layer's gradient is dropped in one micro-batch of four, and the rest counts."""
    model = mlp()

    def drop(i):
        if i % K == 1:
            model[4].weight.grad = None

    loop(model, adam(model), data(), after_backward=drop)


@case
def right_hook_scales_a_parameter():
    """A tensor hook of the user's, registered after the optimizer was made."""
    model = mlp()
    optimizer = adam(model)
    model[4].weight.register_hook(lambda g: g * 3)
    loop(model, optimizer, data())


@case
def right_lbfgs():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    batches = list(data(4))

    def closure():
        optimizer.zero_grad()
        total = 0.0
        for x, y in batches:
            loss = F.cross_entropy(model(x), y) / K
            loss.backward()
            total += loss.item()
        return total

    for _ in range(3):
        optimizer.step(closure)


@case
def right_scaler():
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, (x, y) in enumerate(data()):
        scaler.scale(F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@case
def right_scaler_skips():
    """One window has an infinite gradient, and the scaler skips its update."""
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, (x, y) in enumerate(data()):
        loss = F.cross_entropy(model(x), y) / K
        scaler.scale(loss * (float("inf") if i == 6 else 1.0)).backward()
        if (i + 1) % K == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@case
def right_skips_nan_by_hand():
    model = mlp()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(data()):
        loss = F.cross_entropy(model(x), y) / K
        (loss * (float("nan") if i == 6 else 1.0)).backward()
        if (i + 1) % K == 0:
            if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
                optimizer.step()
            optimizer.zero_grad()


@case
def right_fused_scaler():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, (x, y) in enumerate(data()):
        scaler.scale(F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@case
def bad_scaler_updates_each():
    """update() in every micro-batch changes the scale inside a window."""
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for i, (x, y) in enumerate(data()):
        scaler.scale(F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        else:
            scaler._scale.mul_(2)


@case
def bad_not_unscaled():
    model = mlp()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # as k: it may look like "not divided"
    for i, (x, y) in enumerate(data()):
        scaler.scale(F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_not_unscaled_65536():
    model = mlp()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu")
    for i, (x, y) in enumerate(data()):
        scaler.scale(F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@case
def right_same_batch():
    """The same batch in every micro-batch, as in benchmarks: the gradients are equal."""
    model = mlp()
    batch = next(data(1))
    loop(model, adam(model), [batch] * 24)


@case
def bad_same_batch_zero_grad_each():
    model = mlp()
    optimizer = adam(model)
    x, y = next(data(1))
    for i in range(24):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()


@case
def right_tiny_model():
    """11 numbers, and 16 micro-batches: fewer numbers than unknowns."""
    model = nn.Linear(10, 1)
    loop(
        model,
        sgd(model),
        data(64),
        k=16,
        loss_function=lambda model, x, y: F.mse_loss(model(x[:, :10]).squeeze(1), y.float()),
    )


@case
def bad_tiny_model():
    model = nn.Linear(10, 1)
    optimizer = sgd(model)
    for i, (x, y) in enumerate(data(32)):
        (F.mse_loss(model(x[:, :10]).squeeze(1), y.float()) / 16).backward()
        if i % 16 == 7:
            optimizer.zero_grad()
        if (i + 1) % 16 == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_300():
    model = mlp()
    loop(model, adam(model), data(900, size=4), k=300)


@case
def bad_one_lost_of_300():
    model = mlp()
    optimizer = adam(model)
    kept = None
    for i, (x, y) in enumerate(data(900, size=4)):
        kept = [p.grad.clone() for p in model.parameters()] if i % 300 == 150 else kept
        (F.cross_entropy(model(x), y) / 300).backward()
        if i % 300 == 150:
            for p, g in zip(model.parameters(), kept, strict=True):
                p.grad.copy_(g)
        if (i + 1) % 300 == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_one_lost_of_64_bf16():
    model = mlp(torch.bfloat16)
    optimizer = sgd(model)
    for i, (x, y) in enumerate(data(192, dtype=torch.bfloat16)):
        kept = [p.grad.clone() for p in model.parameters()] if i % 64 == 30 else None
        (F.cross_entropy(model(x), y) / 64).backward()
        if kept:
            for p, g in zip(model.parameters(), kept, strict=True):
                p.grad.copy_(g)
        if (i + 1) % 64 == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_master_copies():
    """The optimizer holds float32 copies, and gradients are copied to them."""
    model = mlp(torch.bfloat16)
    copies = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(copies)
    for i, (x, y) in enumerate(data(dtype=torch.bfloat16)):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            for c, p in zip(copies, model.parameters(), strict=True):
                c.grad, p.grad = p.grad.float(), None
            optimizer.step()


@case
def right_rl_minibatches():
    """PPO: several epochs over the same samples, a policy loss, a value loss and an entropy."""
    model = mlp()
    optimizer = adam(model)
    batches = list(data(8))
    for _ in range(3):
        for start in range(0, 8, K):
            for x, y in batches[start : start + K]:
                logp = model(x).log_softmax(1)
                ratio = (
                    logp.gather(1, y[:, None]).squeeze(1) - logp.gather(1, y[:, None]).squeeze(1).detach()
                ).exp()
                loss = (
                    -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean() + 0.01 * (logp.exp() * logp).sum(1).mean()
                )
                (loss / K).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


@case
def right_fusedacc():
    model = mlp()
    optimizer = fusedacc.AccumulatingOptimizer(adam(model), K)
    for x, y in data(22):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()


@case
def right_fusedacc_model():
    model = mlp()
    optimizer = fusedacc.AccumulatingOptimizer(
        torch.optim.AdamW(model.parameters(), fused=True), K, model=model, max_grad_norm=0.05
    )
    for x, y in data(22):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()


@case
def right_fusedacc_manual():
    model = mlp()
    loop(model, fusedacc.AccumulatingOptimizer(adam(model)), data())


@case
def right_fusedacc_manual_model():
    model = mlp()
    loop(model, fusedacc.AccumulatingOptimizer(adam(model), model=model), data())


@case
def right_fusedacc_weighted():
    model = text_model()
    optimizer = fusedacc.AccumulatingOptimizer(adam(model), K, reduction="weighted")
    for x, y in text():
        with optimizer.accumulate(weight=y.ne(-100).sum()):
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_fusedacc_normalized():
    model = text_model()
    optimizer = fusedacc.AccumulatingOptimizer(adam(model), K, reduction="normalized", model=model)
    for x, y in text():
        with optimizer.accumulate(weight=y.ne(-100).sum()):
            F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def bad_fusedacc_divided_too():
    """A counted loop takes the mean, and the loop still divides."""

    model = mlp()
    optimizer = fusedacc.AccumulatingOptimizer(adam(model), K)
    for x, y in data():
        (F.cross_entropy(model(x), y) / K).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def bad_fusedacc_means():

    model = text_model()
    optimizer = fusedacc.AccumulatingOptimizer(adam(model), K)
    for x, y in text():
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_fusedacc_bf16():
    model = mlp(torch.bfloat16)
    optimizer = fusedacc.AccumulatingOptimizer(sgd(model), 64)
    for x, y in data(128, dtype=torch.bfloat16):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_fusedacc_bf16_master():
    model = mlp(torch.bfloat16)
    optimizer = fusedacc.AccumulatingOptimizer(adam(model), 8, master_weights=True, model=model)
    for x, y in data(dtype=torch.bfloat16):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_fusedacc_compiled():
    model = mlp()
    optimizer = fusedacc.AccumulatingOptimizer(adam(model), K, model=model)
    compiled = torch.compile(model)
    for x, y in data():
        F.cross_entropy(compiled(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_fusedacc_scaler():
    model = mlp()
    optimizer = fusedacc.AccumulatingOptimizer(
        torch.optim.AdamW(model.parameters(), fused=True), K, max_grad_norm=0.05
    )
    scaler = fusedacc.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in data():
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
