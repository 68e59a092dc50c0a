"""Loops as trainers are written: classes, wrappers, evaluations, closures, skipped steps, caught exceptions.

The name of a wrong loop begins with "bad_".
"""

import contextlib
import copy
import itertools
import threading

import torch
import torch.nn.functional as F
from plain_loops import K, adam, data, loop, mlp, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

CASES = {}


def case(function):
    """Add a loop to the cases."""
    CASES[function.__name__] = function
    return function


def backward(model, batch, divisor=K):
    x, y = batch
    (F.cross_entropy(model(x), y) / divisor).backward()


class Trainer:
    """Counts micro-batches, logs the loss, clips and updates."""

    def __init__(self, model):
        self.model, self.optimizer = model, adam(model)
        self.count, self.logged = 0, 0.0

    def run_micro_batch(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        self.logged += loss.item()
        (loss / K).backward()
        self.count += 1

    def update_if_full(self):
        if self.count % K == 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def fit(self):
        for x, y in data():
            self.run_micro_batch(x, y)
            self.update_if_full()


@case
def right_trainer_class():
    Trainer(mlp()).fit()


@case
def bad_zero_grad_in_the_wrong_branch():
    model = mlp()
    optimizer = adam(model)
    for i, batch in enumerate(data()):
        backward(model, batch)
        if (i + 1) % K == 0:
            optimizer.step()
        else:
            optimizer.zero_grad()


@case
def bad_zero_grad_in_every_second_update():
    model = mlp()
    optimizer = adam(model)
    for i, batch in enumerate(data(32)):
        backward(model, batch)
        if (i + 1) % K == 0:
            optimizer.step()
        if (i + 1) % (2 * K) == 0:
            optimizer.zero_grad()


class Accumulator:
    """Divides losses, and lets an optimizer step only at the end of a window, as Accelerate does."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0
        self.is_last = True

    @contextlib.contextmanager
    def accumulate(self):
        self.count += 1
        self.is_last = self.count % K == 0
        yield

    def backward(self, loss):
        (loss / K).backward()

    def step(self):
        if self.is_last:
            self.optimizer.step()
            self.optimizer.zero_grad()


@case
def right_wrapper():
    model = mlp()
    accumulator = Accumulator(adam(model))
    for x, y in data():
        with accumulator.accumulate():
            accumulator.backward(F.cross_entropy(model(x), y))
            accumulator.step()


@case
def bad_wrapper_without_its_context():
    model = mlp()
    accumulator = Accumulator(adam(model))
    for x, y in data():
        accumulator.backward(F.cross_entropy(model(x), y))
        accumulator.step()


@case
def bad_divided_by_the_length_of_the_loader():
    model = mlp()
    loop(model, adam(model), data(), divide=False, loss_function=lambda *batch: cross_entropy(*batch) / 24)


@case
def right_update_once_in_an_epoch():
    model, loader = mlp(), list(data(6))
    optimizer = adam(model)
    for _ in range(4):
        optimizer.zero_grad()
        for batch in loader:
            backward(model, batch, len(loader))
        optimizer.step()


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


@case
def bad_backward_of_a_running_sum():
    model = mlp()
    optimizer = adam(model)
    for _ in range(6):
        total = 0
        for x, y in data(K):
            total = total + F.cross_entropy(model(x), y) / K
            total.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


@case
def right_graph_through_chunks():
    """Chunks of a sequence share the hidden state's graph; each loss runs once."""
    recurrent, head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)
    optimizer = torch.optim.Adam([*recurrent.parameters(), *head.parameters()])
    for _ in range(5):
        x, y, state = torch.randn(4, 24, 8), torch.randint(0, 4, (4, 24)), None
        for first in range(0, 24, 6):
            out, state = recurrent(x[:, first : first + 6], state)
            loss = F.cross_entropy(head(out).flatten(0, 1), y[:, first : first + 6].flatten())
            (loss / 4).backward(retain_graph=first < 18)
        optimizer.step()
        optimizer.zero_grad()


@case
def right_checkpoints_of_two_kinds():
    model = mlp()
    optimizer = adam(model)
    for i, (x, y) in enumerate(data()):
        if i % 2:
            hidden = checkpoint(model[:4], x.requires_grad_(), use_reentrant=False)
            out = checkpoint(model[4:], hidden, use_reentrant=True)
        else:
            out = checkpoint(model, x, use_reentrant=False)
        (F.cross_entropy(out, y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


def contrastive_loss(model, x, y):
    """The mean of the losses of both directions."""
    first = F.normalize(model(x), dim=1)
    second = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
    similarities, labels = first @ second.T / 0.1, torch.arange(len(x))
    return (F.cross_entropy(similarities, labels) + F.cross_entropy(similarities.T, labels)) / 2


@case
def right_contrastive():
    model = mlp()
    loop(model, adam(model), data(), loss_function=contrastive_loss)


@case
def bad_contrastive_not_divided():
    model = mlp()
    loop(model, adam(model), data(), divide=False, loss_function=contrastive_loss)


def smoothed_loss(model, x, y):
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


@case
def right_label_smoothing():
    model = mlp()
    loop(model, adam(model), data(), loss_function=smoothed_loss)


@case
def bad_label_smoothing_not_divided():
    model = mlp()
    loop(model, adam(model), data(), divide=False, loss_function=smoothed_loss)


@case
def bad_half_mse_not_divided():
    model = mlp()

    def loss(model, x, y):
        return 0.5 * F.mse_loss(model(x), x[:, :10])

    loop(model, adam(model), data(), divide=False, loss_function=loss)


@case
def right_tasks_with_a_factor_each():
    """One backward() for each task of a micro-batch, with retain_graph, and a factor in all of them."""
    body, heads = nn.Linear(20, 16), nn.ModuleList(nn.Linear(16, 5) for _ in range(3))
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()])
    for x, y in data(12):
        hidden = body(x).tanh()
        for i, head in enumerate(heads):
            (0.7 * F.cross_entropy(head(hidden), y % 5)).backward(retain_graph=i < 2)
        optimizer.step()
        optimizer.zero_grad()


def train_with_closure(clears):
    """Train with LBFGS, whose closure accumulates over a window."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3)
    for _ in range(4):
        window = list(data(K))

        def closure(window=window):
            if clears:
                optimizer.zero_grad()
            total = 0.0
            for x, y in window:
                loss = F.cross_entropy(model(x), y) / K
                loss.backward()
                total += loss.item()
            return total

        optimizer.step(closure)


@case
def right_closure_of_a_window():
    train_with_closure(True)


@case
def bad_closure_without_zero_grad():
    train_with_closure(False)


@case
def right_balanced_tasks():
    """Weights of tasks are trained with gradients of gradient norms, as in GradNorm."""
    model, heads = mlp(), nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)])
    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([*model.parameters(), *heads.parameters()])
    optimizer_of_weights = torch.optim.SGD([weights], 0.01)
    for x, y in data(8):
        hidden = model(x)
        losses = torch.stack([F.cross_entropy(head(hidden), y) for head in heads])
        optimizer.zero_grad()
        norms = torch.stack(
            [
                torch.autograd.grad(weight * loss, model[6].weight, retain_graph=True, create_graph=True)[
                    0
                ].norm()
                for weight, loss in zip(weights, losses, strict=True)
            ]
        )
        (weights.detach() * losses).sum().backward(retain_graph=True)
        (weights.grad,) = torch.autograd.grad((norms - norms.mean().detach()).abs().sum(), weights)
        optimizer.step()
        optimizer_of_weights.step()


def train_with_saliency(clears):
    """Train, and look at the gradients of inputs after each update."""
    model = mlp()
    optimizer = adam(model)
    for i, batch in enumerate(data()):
        backward(model, batch)
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            image = torch.randn(4, 20, requires_grad=True)
            model(image).max(1).values.sum().backward()
            model.train()
            if clears:
                optimizer.zero_grad()


@case
def right_saliency():
    train_with_saliency(True)


@case
def bad_saliency_leaks():
    train_with_saliency(False)


@case
def right_adversarial():
    model = mlp()
    optimizer = adam(model)
    for x, y in data(8):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        optimizer.zero_grad()
        backward(model, ((x + 0.1 * gradient.sign()).detach(), y), 1)
        optimizer.step()


@case
def right_layers_of_two_dtypes():
    first, middle, last = nn.Linear(20, 32), nn.Linear(32, 32, dtype=torch.bfloat16), nn.Linear(32, 10)
    model = nn.ModuleList([first, middle, last])
    optimizer = sgd(model)
    for i, (x, y) in enumerate(data()):
        hidden = middle(first(x).relu().bfloat16()).float()
        (F.cross_entropy(last(hidden.tanh()), y) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def bad_complex_not_divided():
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for i in range(16):
        (torch.randn(3, 6, dtype=torch.complex64) @ weight).abs().square().mean().backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_gradients_zeroed_by_hand():
    train_and_zero(lambda param: True)


@case
def bad_only_matrices_zeroed_by_hand():
    """Half of the parameters keep their gradients."""
    train_and_zero(lambda param: param.ndim > 1)


def train_and_zero(is_zeroed):
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = adam(model)
    for i, batch in enumerate(data()):
        backward(model, batch)
        if (i + 1) % K == 0:
            optimizer.step()
            for param in filter(is_zeroed, model.parameters()):
                param.grad.zero_()


@case
def bad_gradients_set_to_none_by_hand_each():
    model = mlp()
    optimizer = adam(model)
    for i, batch in enumerate(data()):
        for param in model.parameters():
            param.grad = None
        backward(model, batch)
        if (i + 1) % K == 0:
            optimizer.step()


@case
def right_window_with_nan_is_dropped():
    model = mlp()
    optimizer = adam(model)
    for window in range(6):
        is_finite = True
        for i, (x, y) in enumerate(data(K)):
            loss = F.cross_entropy(model(x), y) / K
            if (window, i) == (2, 1):
                loss = loss * float("nan")
            is_finite &= bool(loss.isfinite())
            loss.backward()
        if is_finite:
            optimizer.step()
        optimizer.zero_grad()


@case
def bad_micro_batch_with_nan_shortens_the_window():
    model = mlp()
    optimizer = adam(model)
    for window in range(8):
        for i, batch in enumerate(data(K)):
            if (window, i) != (2, 1):
                backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()


@case
def bad_skipped_update_is_not_cleared():
    model = mlp()
    optimizer = adam(model)
    for window in range(8):
        for batch in data(K):
            backward(model, batch)
        if window != 3:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_functional_call():
    model = mlp()

    def loss(model, x, y):
        return F.cross_entropy(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)

    loop(model, adam(model), data(), loss_function=loss)


def train_and_fail(is_retried):
    """Run out of memory once."""
    model, done = mlp(), 0
    optimizer = adam(model)
    for i, batch in enumerate(data(25 if is_retried else 24)):
        try:
            if i == 5:
                raise RuntimeError("out of memory")
            backward(model, batch)
        except RuntimeError:
            if is_retried:
                continue
        done += 1
        if done % K == 0:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_failed_micro_batch_does_not_count():
    train_and_fail(True)


@case
def bad_failed_micro_batch_counts():
    train_and_fail(False)


@case
def right_training_in_a_thread():
    model = mlp()
    thread = threading.Thread(target=lambda: loop(model, adam(model), data()))
    thread.start()
    thread.join()


@case
def bad_copy_is_cleared():
    model = mlp()
    optimizer, averaged = adam(model), copy.deepcopy(model)
    for i, batch in enumerate(data()):
        backward(model, batch)
        if (i + 1) % K == 0:
            optimizer.step()
            averaged.zero_grad()


@case
def bad_only_the_body_is_cleared():
    model = mlp()
    optimizer = adam(model)
    for i, batch in enumerate(data()):
        backward(model, batch)
        if (i + 1) % K == 0:
            optimizer.step()
            model[:6].zero_grad()


@case
def bad_cleared_at_the_begin_of_an_epoch():
    model, count = mlp(), 0
    optimizer = adam(model)
    for _ in range(4):
        optimizer.zero_grad()
        for batch in data(6):
            backward(model, batch)
            count += 1
            if count % K == 0:
                optimizer.step()
                optimizer.zero_grad()


@case
def bad_sums_decay():
    """Gradient momentum over micro-batches."""
    model = mlp()

    def decay(i):
        if (i + 1) % K:
            for param in model.parameters():
                param.grad *= 0.9

    loop(model, adam(model), data(), after_backward=decay)


@case
def right_share_of_the_samples():
    """Each mean is multiplied by its share of the window's samples."""
    model = mlp()
    optimizer = adam(model)
    for _ in range(6):
        window = [next(data(1, size)) for size in (4, 16, 9, 12)]
        total = sum(len(y) for _, y in window)
        for x, y in window:
            (F.cross_entropy(model(x), y) * (len(y) / total)).backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def bad_means_of_samples():
    model = mlp()
    batches = itertools.chain(*([next(data(1, size)) for size in (4, 16, 9, 12)] for _ in range(6)))
    loop(model, adam(model), batches)


@case
def right_models_in_turn():
    models = [mlp(), mlp()]
    optimizers = [adam(model) for model in models]
    for _ in range(4):
        for model, count in zip(models, (4, 2), strict=True):
            for batch in data(count):
                backward(model, batch, count)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@case
def right_gradient_penalty():
    """A critic with a gradient penalty, trained three times for each update of its generator."""
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizers = adam(generator), adam(critic)
    for i in range(16):
        is_generator = i % 4 == 3
        optimizer = optimizers[0 if is_generator else 1]
        optimizer.zero_grad()
        fake = generator(torch.randn(16, 8))
        if is_generator:
            (-critic(fake).mean()).backward()
        else:
            real, fake = torch.randn(16, 16), fake.detach()
            mixed = torch.lerp(real, fake, torch.rand(16, 1)).requires_grad_()
            (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            penalty = (gradient.norm(dim=1) - 1).square().mean()
            (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        optimizer.step()
