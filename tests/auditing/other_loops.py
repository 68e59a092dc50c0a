"""Loops of well-known programs and algorithms, and less usual faults. As in plain_loops.py."""

import copy

import torch
import torch.nn.functional as F
from plain_loops import K, adam, data, mlp, sgd, text, text_model
from torch import nn

CASES = {}


def case(function):
    """Add a loop to the cases."""
    CASES[function.__name__] = function
    return function


@case
def right_nanogpt():
    model = text_model()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batches = iter([(x, x.roll(-1, 1)) for x, _ in text(24)])
    X, Y = next(batches)
    for _it in range(5):
        for _micro in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(X)
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), Y.view(-1), ignore_index=-1) / 4
            X, Y = next(batches)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


@case
def right_sac():
    actor, q1, q2 = nn.Linear(20, 4), nn.Linear(24, 1), nn.Linear(24, 1)
    log_alpha = torch.zeros(1, requires_grad=True)
    t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
    oa, oq, oalpha = (
        adam(actor),
        torch.optim.Adam([*q1.parameters(), *q2.parameters()]),
        torch.optim.Adam([log_alpha]),
    )
    for step, (x, _) in enumerate(data(16)):
        a = torch.randn(16, 4)
        with torch.no_grad():
            target = torch.randn(16, 1) + torch.min(t1(torch.cat([x, a], 1)), t2(torch.cat([x, a], 1)))
        xa = torch.cat([x, a], 1)
        qf_loss = F.mse_loss(q1(xa), target) + F.mse_loss(q2(xa), target)
        oq.zero_grad()
        qf_loss.backward()
        oq.step()
        if step % 2 == 0:
            for _ in range(2):
                pi = actor(x).tanh()
                xp = torch.cat([x, pi], 1)
                actor_loss = (
                    log_alpha.exp().detach() * pi.square().sum(1, keepdim=True) - torch.min(q1(xp), q2(xp))
                ).mean()
                oa.zero_grad()
                actor_loss.backward()
                oa.step()
                alpha_loss = (-log_alpha.exp() * (pi.detach().square().sum(1) - 1)).mean()
                oalpha.zero_grad()
                alpha_loss.backward()
                oalpha.step()


@case
def right_cyclegan():
    ga, gb, da, db = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 1), nn.Linear(20, 1)
    og = torch.optim.Adam([*ga.parameters(), *gb.parameters()])
    oda, odb = adam(da), adam(db)
    mse = nn.MSELoss()
    one, zero = torch.ones(16, 1), torch.zeros(16, 1)
    for x, _ in data(10):
        y = torch.randn(16, 20)
        og.zero_grad()
        fy, fx = ga(x), gb(y)
        loss = (
            mse(db(fy), one)
            + mse(da(fx), one)
            + 10 * F.l1_loss(gb(fy), x)
            + 10 * F.l1_loss(ga(fx), y)
            + 5 * F.l1_loss(ga(y), y)
        )
        loss.backward()
        og.step()
        for d, optimizer, real, fake in ((da, oda, x, fx), (db, odb, y, fy)):
            optimizer.zero_grad()
            ((mse(d(real), one) + mse(d(fake.detach()), zero)) * 0.5).backward()
            optimizer.step()


@case
def right_wgan_clip():
    g, d = nn.Linear(8, 20), nn.Linear(20, 1)
    og, od = torch.optim.RMSprop(g.parameters()), torch.optim.RMSprop(d.parameters())
    one, mone = torch.tensor(1.0), torch.tensor(-1.0)
    for x, _ in data(10):
        for p in d.parameters():
            p.requires_grad_(True)
        for _ in range(3):
            with torch.no_grad():
                for p in d.parameters():
                    p.clamp_(-0.1, 0.1)
            d.zero_grad()
            d(x).mean(0).view(1).squeeze().backward(one)
            d(g(torch.randn(16, 8)).detach()).mean().backward(mone)
            od.step()
        for p in d.parameters():
            p.requires_grad_(False)
        g.zero_grad()
        d(g(torch.randn(16, 8))).mean().backward(one)
        og.step()


@case
def right_maml():
    model = mlp()
    optimizer = adam(model)
    names = [n for n, _ in model.named_parameters()]
    tasks = list(data(24))
    for it in range(4):
        for t in range(3):
            (x, y), (x2, y2) = tasks[6 * it + 2 * t], tasks[6 * it + 2 * t + 1]
            fast = list(model.parameters())
            for _ in range(2):
                out = torch.func.functional_call(model, dict(zip(names, fast, strict=True)), x)
                loss = F.cross_entropy(out, y)
                grads = torch.autograd.grad(loss, fast, create_graph=True)
                fast = [p - 0.1 * g for p, g in zip(fast, grads, strict=True)]
            out = torch.func.functional_call(model, dict(zip(names, fast, strict=True)), x2)
            (F.cross_entropy(out, y2) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_distillation():
    model, teacher = mlp(), mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        out = model(x)
        soft = teacher(x).detach()
        loss = 0.5 * F.cross_entropy(out, y) + 0.5 * 4 * F.kl_div(
            F.log_softmax(out / 2, 1), F.softmax(soft / 2, 1), reduction="batchmean"
        )
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_mixup():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        lam = 0.3 + 0.1 * (i % 5)
        p = torch.randperm(16)
        out = model(lam * x + (1 - lam) * x[p])
        ((lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[p])) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_yolo():
    """The mean times the batch size, summed until 64 samples."""
    model = mlp()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) * 16).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_losses_added_then_backward():
    model = mlp()
    optimizer = adam(model)
    total = 0
    for i, (x, y) in enumerate(data()):
        total = total + F.cross_entropy(model(x), y) / K
        if (i + 1) % K == 0:
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = 0


@case
def right_optimizer_in_backward():
    model = mlp()
    optimizers = {p: torch.optim.AdamW([p]) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    for x, y in data(12):
        F.cross_entropy(model(x), y).backward()


@case
def right_warm_up_backward():
    model = mlp()
    optimizer = adam(model)
    model(torch.randn(16, 20)).sum().backward()
    optimizer.zero_grad()
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_sam():
    model = mlp()
    optimizer = sgd(model)
    for x, y in data(12):
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            old = [p.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(p.grad * 0.05 / norm)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, q in zip(model.parameters(), old, strict=True):
                p.copy_(q)
        optimizer.step()
        optimizer.zero_grad()


@case
def right_truncated_bptt():
    rnn, head = nn.LSTM(8, 16), nn.Linear(16, 4)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()])
    h = None
    for step in range(16):
        out, h = rnn(torch.randn(5, 3, 8), h)
        h = tuple(x.detach() for x in h)
        (head(out).square().mean() / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_schedule_of_k():
    model = mlp()
    optimizer = adam(model)
    source = iter(data(40))
    for k in (1, 2, 2, 4, 4, 8, 8):
        for _ in range(k):
            x, y = next(source)
            (F.cross_entropy(model(x), y) / k).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_muon_and_adam():
    model = mlp()
    big = [p for p in model.parameters() if p.ndim == 2]
    small = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(big), torch.optim.AdamW(small)]
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()


@case
def right_closure_sgd():
    model = mlp()
    optimizer = sgd(model)
    source = iter(data())

    def closure():
        optimizer.zero_grad()
        total = 0
        for _ in range(K):
            x, y = next(source)
            loss = F.cross_entropy(model(x), y) / K
            loss.backward()
            total += loss.item()
        return total

    for _ in range(6):
        optimizer.step(closure)


@case
def right_layerwise():
    layers = [nn.Linear(20, 20) for _ in range(3)]
    optimizers = [adam(layer) for layer in layers]
    for i, (x, _) in enumerate(data()):
        for layer in layers:
            x = layer(x.detach()).relu()
            (x.square().mean() / K).backward()
        if (i + 1) % K == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@case
def right_two_heads_k2():
    model, a, b = nn.Linear(20, 16), nn.Linear(16, 10), nn.Linear(16, 10)
    optimizer = torch.optim.Adam([p for layer in (model, a, b) for p in layer.parameters()])
    for i, (x, y) in enumerate(data()):
        h = model(x)
        ((F.cross_entropy(a(h), y) + F.cross_entropy(b(h), y)) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_two_roots():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        out = model(x)
        torch.autograd.backward([F.cross_entropy(out, y) / K, out.square().mean() / K])
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_backward_for_each_task():
    """Three tasks share a trunk, and each has its own backward() in a loop. Their losses are added."""
    trunk, heads = nn.Linear(20, 16), nn.ModuleList(nn.Linear(16, 10) for _ in range(3))
    optimizer = adam(nn.ModuleList([trunk, heads]))
    for i, (x, y) in enumerate(data()):
        hidden = trunk(x).relu()
        for task, head in enumerate(heads):
            (F.cross_entropy(head(hidden), y) / K).backward(retain_graph=task < 2)
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_two_clipped_groups():
    """Two parts of a model, each clipped by its own norm."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            nn.utils.clip_grad_norm_(model[:2].parameters(), 0.02)
            nn.utils.clip_grad_norm_(model[2:].parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()


@case
def right_divided_by_tokens_at_the_end():
    """Sums are accumulated, and p.grad is divided by the window's tokens."""
    model = text_model()
    optimizer = adam(model)
    tokens = 0
    for i, (x, y) in enumerate(text()):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").backward()
        tokens += int(y.ne(-100).sum())
        if (i + 1) % K == 0:
            for p in model.parameters():
                p.grad /= tokens
            optimizer.step()
            optimizer.zero_grad()
            tokens = 0


@case
def right_hooks_divide():
    """Hooks on all parameters divide by k."""
    model = mlp()
    optimizer = adam(model)
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient / K)
    for i, (x, y) in enumerate(data()):
        F.cross_entropy(model(x), y).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_not_divided_with_hooks_that_look():
    """Hooks that only look at gradients, as loggers register them, hide no fault."""
    model = mlp()
    optimizer = adam(model)
    norms = []
    for p in model.parameters():
        p.register_hook(lambda gradient: norms.append(gradient.norm()))
    for i, (x, y) in enumerate(data()):
        F.cross_entropy(model(x), y).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_class_weights():
    """Each micro-batch is a weighted mean, over the same number of samples."""
    model = mlp()
    optimizer = adam(model)
    weight = torch.rand(10) + 0.5
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y, weight=weight) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_class_weights_of_the_window():
    """Weighted sums, divided by the weights of the window's samples."""
    model = mlp()
    optimizer = adam(model)
    weight = torch.rand(10) + 0.5
    batches = list(data())
    for start in range(0, len(batches), K):
        window = batches[start : start + K]
        total = sum(weight[y].sum() for _, y in window)
        for x, y in window:
            (F.cross_entropy(model(x), y, weight=weight, reduction="sum") / total).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_soft_labels():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        soft = 0.9 * F.one_hot(y, 10).float() + 0.01
        (F.cross_entropy(model(x), soft) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_cached_representations():
    """Gradients of representations are cached, and micro-batches are run again with them (GradCache)."""
    model = mlp()
    optimizer = sgd(model)
    for x, y in data(6, size=64):
        parts = x.split(16)
        with torch.no_grad():
            outputs = torch.cat([model(part) for part in parts])
        outputs.requires_grad_()
        F.cross_entropy(outputs, y).backward()
        for part, gradient in zip(parts, outputs.grad.split(16), strict=True):
            (model(part) * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_gradient_of_the_window_is_given():
    """The factor 1/k is given to backward()."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        F.cross_entropy(model(x), y).backward(torch.tensor(1 / K))
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_tasks_not_divided():
    """Three tasks have their own backward(), and nothing divides by the number of micro-batches."""
    trunk, heads = nn.Linear(20, 16), nn.ModuleList(nn.Linear(16, 10) for _ in range(3))
    optimizer = adam(nn.ModuleList([trunk, heads]))
    for i, (x, y) in enumerate(data()):
        hidden = trunk(x).relu()
        for task, head in enumerate(heads):
            F.cross_entropy(head(hidden), y).backward(retain_graph=task < 2)
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_vector_backward():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        F.cross_entropy(model(x), y, reduction="none").backward(torch.full((16,), 1 / 16 / K))
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_unfreezing():
    model = mlp()
    optimizer = adam(model)
    for p in model[0].parameters():
        p.requires_grad_(False)
    for i, (x, y) in enumerate(data(32)):
        if i == 16:
            for p in model[0].parameters():
                p.requires_grad_(True)
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_group_added_later():
    model = mlp()
    optimizer = torch.optim.SGD(model[4:].parameters(), lr=0.1)
    for i, (x, y) in enumerate(data(32)):
        if i == 16:
            optimizer.add_param_group({"params": model[0].parameters()})
            model.zero_grad()
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            model.zero_grad()


@case
def right_switch_of_optimizer():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data(32)):
        if i == 16:
            optimizer = sgd(model)
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_convnet():
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    optimizer = sgd(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x[:, :16].reshape(16, 1, 4, 4)), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_segmentation():
    model = nn.Conv2d(1, 3, 1)
    optimizer = sgd(model)
    for i, (x, _) in enumerate(data()):
        (
            F.cross_entropy(
                model(x[:, :16].reshape(16, 1, 4, 4)), torch.randint(0, 3, (16, 4, 4)), ignore_index=255
            )
            / K
        ).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_custom_function():
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square().mean()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 2 * x / x.numel()

    model = mlp()
    optimizer = adam(model)
    for i, (x, _) in enumerate(data()):
        (Loss.apply(model(x)) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_grpo():
    """Per-token losses, masked, a mean per sequence, then over sequences; two updates per rollout."""
    model = text_model()
    optimizer = adam(model)
    for i, (x, y) in enumerate(text(16)):
        mask = y.ne(-100).float()
        logp = -F.cross_entropy(model(x).transpose(1, 2), x, reduction="none")
        adv = torch.randn(4, 1)
        per_token = -(torch.exp(logp - logp.detach()) * adv)
        loss = ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        (loss / K).backward()
        if (i + 1) % K == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@case
def right_dapo():
    """Token-level: sums over tokens, divided by the tokens of the window."""
    model = text_model()
    optimizer = adam(model)
    source = list(text(16))
    for at in range(0, 16, K):
        items = sum(y.ne(-100).sum() for _, y in source[at : at + K])
        for x, y in source[at : at + K]:
            mask = y.ne(-100).float()
            logp = -F.cross_entropy(model(x).transpose(1, 2), x, reduction="none")
            adv = torch.randn(4, 1)
            loss = (-(torch.exp(logp - logp.detach()) * adv) * mask).sum() / items
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def right_ppo_epochs_k1():
    model = mlp()
    optimizer = adam(model)
    batches = list(data(6))
    for _ in range(3):
        for x, y in batches:
            logits = model(x)
            logp = logits.log_softmax(1)
            v = logits.mean(1)
            loss = (
                -logp.gather(1, y[:, None]).mean()
                + 0.5 * (0.5 * (v - 1).square()).mean()
                - 0.01 * -(logp.exp() * logp).sum(1).mean()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


@case
def right_bf16_512():
    model = mlp(torch.bfloat16)
    optimizer = sgd(model)
    for i, (x, y) in enumerate(data(1024, 4, torch.bfloat16)):
        (F.cross_entropy(model(x), y) / 512).backward()
        if (i + 1) % 512 == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_fp16_scaled():
    model = mlp(torch.float16)
    optimizer = sgd(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x.half()).float(), y) * 128 / K).backward()
        if (i + 1) % K == 0:
            for p in model.parameters():
                p.grad /= 128
            optimizer.step()
            optimizer.zero_grad()


@case
def right_pretrained_almost_converged():
    """Gradients near zero, and equal data in a window but for the order."""
    model = nn.Linear(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(64, 20)
    w = torch.randn(20, 10)
    y = x @ w
    for i in range(600):
        j = torch.arange(16) + 16 * (i % 4)
        (F.mse_loss(model(x[j]), y[j]) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_embedding_bag_frozen_rows():
    model = nn.Sequential(nn.Embedding(300, 16, padding_idx=0), nn.Flatten(), nn.Linear(64, 10))
    optimizer = adam(model)
    for i in range(24):
        x = torch.randint(0, 300, (8, 4))
        (F.cross_entropy(model(x), x[:, 0] % 10) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_off_by_one():
    """`i % k == 0` instead of `(i + 1) % k == 0`: the first update has one micro-batch."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if i % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_zero_grad_before_step():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.zero_grad()
            optimizer.step()


@case
def bad_zero_grad_to_zero_before_step():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()


@case
def bad_multiplied_by_k():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) * K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_gradient_assigned_not_added():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        for p, g in zip(
            model.parameters(),
            torch.autograd.grad(F.cross_entropy(model(x), y) / K, list(model.parameters())),
            strict=True,
        ):
            p.grad = g
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_own_buffer_keeps_growing():
    """Sums in the trainer's own buffers, which it forgets to zero."""
    model = mlp()
    optimizer = sgd(model)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        for s, p in zip(sums, model.parameters(), strict=True):
            s += p.grad
            p.grad = None
        if (i + 1) % K == 0:
            for s, p in zip(sums, model.parameters(), strict=True):
                p.grad = s.clone()
            optimizer.step()
            optimizer.zero_grad()


@case
def right_own_buffer():
    model = mlp()
    optimizer = sgd(model)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        for s, p in zip(sums, model.parameters(), strict=True):
            s += p.grad
            p.grad = None
        if (i + 1) % K == 0:
            for s, p in zip(sums, model.parameters(), strict=True):
                p.grad = s.clone()
                s.zero_()
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_own_buffer_misses_the_last():
    model = mlp()
    optimizer = sgd(model)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            for s, p in zip(sums, model.parameters(), strict=True):
                p.grad = s.clone()
                s.zero_()
            optimizer.step()
        else:
            for s, p in zip(sums, model.parameters(), strict=True):
                s += p.grad
        optimizer.zero_grad()


@case
def bad_late_by_one_window():
    """An asynchronous buffer: the last micro-batch of a window arrives in the next update."""
    model = mlp()
    optimizer = sgd(model)
    late = None
    for i, (x, y) in enumerate(data()):
        kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        (F.cross_entropy(model(x), y) / K).backward()
        if (i + 1) % K == 0:
            new = [p.grad - k for p, k in zip(model.parameters(), kept, strict=True)]
            for p, last, arriving in zip(model.parameters(), new, late or new, strict=True):
                p.grad = p.grad - last + (arriving if late else 0)
            late = new
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_one_expert_lost():
    experts = nn.ModuleList(mlp() for _ in range(4))
    router = nn.Linear(20, 20)
    optimizer = adam(nn.ModuleList([experts, router]))
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(sum(e(router(x)) for e in experts), y) / K).backward()
        if (i + 1) % K == 0:
            for p in experts[2].parameters():
                p.grad = None
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_value_loss_not_divided():
    """Two backward passes per micro-batch: the policy's loss is divided by k, the value's is not."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        out = model(x)
        (F.cross_entropy(out, y) / K).backward(retain_graph=True)
        F.mse_loss(out.mean(1), torch.ones(16)).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_scaler_scale_forgotten_once():
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for i, (x, y) in enumerate(data()):
        loss = F.cross_entropy(model(x), y) / K
        (loss if i % K == 0 else scaler.scale(loss)).backward()
        if (i + 1) % K == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@case
def bad_tokens_divided_by_micro_batch_and_window():
    model = text_model()
    optimizer = adam(model)
    for i, (x, y) in enumerate(text()):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / y.ne(-100).sum()
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_masked_mean_not_divided():
    model = text_model()
    optimizer = adam(model)
    for i, (x, _) in enumerate(text()):
        mask = torch.ones(4, 16)
        each = F.cross_entropy(model(x).transpose(1, 2), x, reduction="none")
        ((each * mask).sum() / mask.sum()).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_constant_normaliser():
    """Divided by a constant, as in Dr. GRPO. Labels counted with padding look the same here."""
    model = text_model()
    optimizer = adam(model)
    source = list(text(16))
    for at in range(0, 16, K):
        items = sum(y.numel() for _, y in source[at : at + K])
        for x, y in source[at : at + K]:
            (F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / items).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def bad_labels_counted_with_padding():
    """Divided by the window's positions with the padding, not by its labels."""
    model = text_model()
    optimizer = adam(model)
    source = [(x[:, : 8 + i % 9], y[:, : 8 + i % 9]) for i, (x, y) in enumerate(text(16))]
    for at in range(0, 16, K):
        items = sum(y.numel() for _, y in source[at : at + K])
        for x, y in source[at : at + K]:
            (F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / items).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def bad_running_sum_halved():
    """One layer's running sum is halved after every second micro-batch."""
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        (F.cross_entropy(model(x), y) / K).backward()
        if i % 2 == 0:
            model[0].weight.grad.mul_(0.5)
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
