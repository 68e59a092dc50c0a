"""Random trainings, with and without a random fault. The audit must find the fault and nothing else."""

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn

#: The faults, and the kinds of problems as which each may be told.
FAULTS = {
    "not divided": {"scale"},
    "divided twice": {"scale"},
    "partial window divided by k": {"scale"},
    "partial window carried over": {"scale"},
    "first update too early": {"scale"},
    "step after each": {"scale"},
    "one lost": {"lost"},
    "all but the last lost": {"lost"},
    "never cleared": {"stale"},
    "one twice": {"double"},
    "sum doubled after each": {"uneven", "double"},
    "clipped after each": {"uneven", "lost"},
    "mean of means": {"uneven"},
    "one weight of 1.3": {"uneven"},
    "a parameter counts twice": {"parameters"},
    "a parameter lost in one": {"parameters"},
    "an expert divided twice": {"parameters"},
}
#: Faults that only the loss's graph shows.
NEED_GRAPH = {
    "not divided",
    "divided twice",
    "partial window divided by k",
    "partial window carried over",
    "step after each",
    "mean of means",
    "first update too early",
    "one weight of 1.3",
}
PARTIAL = {"partial window divided by k", "partial window carried over"}


class Text(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, 0.1, batch_first=True)
        self.head = nn.Linear(24, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.layer(self.embed(x)))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(12, 16)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 6)) for _ in range(3)
        )

    def forward(self, x):
        hidden = self.router(x).relu()
        return sum(expert(hidden) for expert in self.experts)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 8, 2), nn.BatchNorm2d(8)
        self.head = nn.Linear(48, 6)

    def forward(self, x):
        return self.head(self.norm(self.convolution(x.view(-1, 1, 3, 4))).relu().flatten(1))


def network(dropout, with_norm):
    norm = nn.LayerNorm(32) if with_norm else nn.Identity()
    hidden = [nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(nn.Linear(12, 32), norm, *hidden, nn.Linear(32, 6))


class Opaque(torch.autograd.Function):
    """The identity, as a loss that does not show by what it is divided."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class RandomTraining:
    """One training: everything about it is drawn with the seed. `fault` is None for a right one."""

    def __init__(self, seed):
        draw = self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.kind = draw.choice(["text", "text", "network", "network", "experts", "convolution"])
        self.dtype = draw.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16])
        if self.kind == "convolution":
            self.dtype = torch.float32
        self.model = self.make_model().to(self.dtype)
        self.params = list(self.model.parameters())
        self.victim = draw.randrange(len(self.params))
        self.k = draw.choice([1, 2, 3, 4, 8, 16])
        self.windows, self.epochs = draw.randint(3, 6), draw.choice([1, 2])
        self.rest = draw.choice([0, 0, draw.randint(1, self.k)]) % self.k
        self.optimizers = self.make_optimizers()
        self.clip = draw.choice([0, 0, 0.05, 1.0])
        uses_scaler = draw.random() < 0.25 and len(self.optimizers) == 1
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** draw.randint(1, 12), enabled=uses_scaler)
        self.is_ragged = self.kind == "text" and draw.random() < 0.6
        self.similarity = draw.choice([0, 0, 0.9])
        self.autocast = self.dtype == torch.float32 and draw.random() < 0.2
        self.multiplies = draw.random() < 0.3
        self.is_halved = draw.random() < 0.15
        self.is_opaque = draw.random() < 0.15
        self.set_to_none = draw.random() < 0.7
        self.common = torch.randn(8, 12)
        self.fault = draw.choice([None] * 12 + list(FAULTS))
        if self.fault and not self.can_have(self.fault):
            self.fault = None
        self.settle()

    def make_model(self):
        if self.kind == "text":
            return Text(self.draw.random() < 0.5)
        if self.kind == "network":
            return network(self.draw.choice([0, 0.3]), self.draw.random() < 0.5)
        return Experts() if self.kind == "experts" else Convolution()

    def make_optimizers(self):
        make = self.draw.choice(
            [
                lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
                lambda params: torch.optim.AdamW(params, 1e-3),
                lambda params: torch.optim.AdamW(params, 1e-3, fused=True),
                lambda params: torch.optim.RMSprop(params, 1e-3),
            ]
        )
        if self.draw.random() < 0.8:
            return [make(self.params)]
        return [make(self.params[::2]), make(self.params[1::2])]

    def can_have(self, fault):
        """Return whether the training can have this fault, and the fault can be told."""
        if self.is_opaque and fault in NEED_GRAPH:
            return False
        if fault in ("never cleared", "a parameter counts twice"):
            return True
        if self.k == 1:
            return False
        return {
            "not divided": not self.is_halved,
            "divided twice": self.k > 2 and not self.is_halved and not self.scaler.is_enabled(),
            "step after each": not self.multiplies and not self.is_halved,
            "mean of means": self.is_ragged,
            "an expert divided twice": self.kind == "experts",
        }.get(fault, True)

    def settle(self):
        """Make the other settings fit the fault."""
        if self.fault in PARTIAL:
            self.rest, self.epochs, self.is_ragged = self.rest or 1, 2, False
        if self.fault == "clipped after each":
            self.clip = 0.05
        if self.fault == "never cleared":
            self.clip = 0  # clipping would shrink the old gradient until it hardly counts
        if self.counts_tokens and self.k == 2:
            self.is_halved = False  # it could also be a second division by k

    @property
    def counts_tokens(self):
        """Whether losses are sums over tokens, divided by the window's tokens."""
        return self.is_ragged and self.fault != "mean of means"

    def batch(self):
        if self.kind == "text":
            x = torch.randint(0, 50, (4, 12), generator=self.generator)
            y = (x * 7 + 3) % 50
            if self.is_ragged:
                length = int(torch.randint(3, 13, (1,), generator=self.generator))
                y = y.masked_fill(torch.arange(12) >= length, -100)
            return x, y
        noise = torch.randn(8, 12, generator=self.generator)
        x = self.similarity**0.5 * self.common + (1 - self.similarity) ** 0.5 * noise
        return x.to(self.dtype), (x[:, :6] + x[:, 6:]).argmax(1)

    def loss(self, window, i):
        x, y = window[i]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            out = self.model(x)
        reduction = "sum" if self.counts_tokens else "mean"
        loss = F.cross_entropy(out.float().flatten(0, -2), y.flatten(), reduction=reduction)
        if self.is_halved:
            loss = loss * 0.5
        if self.is_opaque:
            loss = Opaque.apply(loss)
        divisor = self.divisor(window, i)
        return loss * (1 / divisor) if self.multiplies else loss / divisor

    def divisor(self, window, i):
        count = self.k if self.fault in PARTIAL else len(window)
        divisor = sum(int(y.ne(-100).sum()) for _, y in window) if self.counts_tokens else count
        if self.fault == "not divided":
            return divisor / self.k if self.counts_tokens else 1
        return divisor / 1.3 if self.fault == "one weight of 1.3" and i == 1 else divisor

    def run(self):
        """Train."""
        sizes = ([self.k] * self.windows + [self.rest] * (self.rest > 0)) * self.epochs
        is_first = True
        for size in sizes:
            window = [self.batch() for _ in range(size)]
            for i in range(size):
                self.micro_batch(window, i)
                if self.fault == "step after each":
                    self.step()
                if self.fault == "first update too early" and is_first:
                    self.step()
                is_first = False
            if self.fault == "partial window carried over" and size < self.k:
                continue
            if self.fault != "step after each" and any(p.grad is not None for p in self.params):
                self.step()

    def micro_batch(self, window, i):
        fault, params = self.fault, self.params
        before = [copy.deepcopy(p.grad) for p in params]
        if fault == "all but the last lost":
            self.clear()
        loss = self.scaler.scale(self.loss(window, i))
        is_repeated = fault == "one twice" and i == 0
        loss.backward(retain_graph=is_repeated)
        if is_repeated:
            loss.backward()
        if (
            fault in ("one lost", "a parameter lost in one")
            and len(window) > 1
            and i == min(1, len(window) - 1)
        ):
            for p, gradient in zip(params, before, strict=True):
                if fault == "one lost" or p is params[self.victim]:
                    p.grad = gradient
        if fault == "clipped after each":
            nn.utils.clip_grad_norm_(params, self.clip)
        if fault == "sum doubled after each":
            for p in params:
                p.grad += p.grad

    def step(self):
        if self.fault == "divided twice":
            for p in self.params:
                p.grad /= self.k
        if self.fault == "a parameter counts twice":
            self.params[self.victim].grad *= 2
        if self.fault == "an expert divided twice":
            for p in self.model.experts[1].parameters():
                p.grad /= self.k
        if self.clip:
            if self.scaler.is_enabled():
                self.scaler.unscale_(self.optimizers[0])
            nn.utils.clip_grad_norm_(self.params, self.clip)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizers[0])
            self.scaler.update()
        else:
            for optimizer in self.optimizers:
                optimizer.step()
        if self.fault != "never cleared":
            self.clear()

    def clear(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.set_to_none)
