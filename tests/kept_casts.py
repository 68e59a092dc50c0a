"""Models that train under autocast with `keep_casts=True`, and counters of their casts."""

import functools

import torch
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


class Conv1D(nn.Module):
    """Like transformers' Conv1D: a Linear with a transposed weight. The wrapper knows its name and module."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class Encoder(nn.Module):
    """Two blocks. `how` selects the kind of checkpoint, if any."""

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
    """Return the casts that the wrapper keeps."""
    casts = optimizer._parameter_set.casts
    return [] if casts is None else [kept.cast for kept in casts._kept.values()]


class CountCasts(TorchDispatchMode):
    """Counts the casts from float32 to 16 bits, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[torch.Size, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (args[0].dtype, result.dtype) == (F32, BF16):
            self.found[result.shape] = self.found.get(result.shape, 0) + 1
        return result


def train(kind: str, keep: bool, loop: str, micro_batches: int = 8):
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
                scaler.step(optimizer), scaler.update()
            optimizer.zero_grad()
    return model, optimizer
