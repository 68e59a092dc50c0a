"""Random small networks whose gradients reach the parameters in different ways."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedacc

WIDTH, LENGTH, VOCABULARY, OUTPUTS = 6, 3, 7, 4


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Conv(nn.Module):
    """A convolution whose weight, input and weight gradient are channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0)).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = x.transpose(1, 2).unsqueeze(-1).contiguous(memory_format=torch.channels_last)
        return torch.tanh(self.conv(image)).squeeze(-1).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[kind](WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Transposed(nn.Module):
    """The gradient arrives transposed, so its strides are not the parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight.t()))


class SameGradient(nn.Module):
    """Autograd gives one gradient tensor to two parameters. Neither may keep it as its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.b = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + (self.a + self.b))


class Expanded(nn.Module):
    """A gradient of stride 0, a 0-dim parameter and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 2) * 0.1)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * (self.matrix.sum() + self.scalar) + self.empty.sum())


class Experts(nn.Module):
    """A row's index determines its expert, so rounding cannot change it. One expert gets no rows.

    If `grouped`, and torch has grouped products for the dtype, one product computes all experts.
    """

    OWNERS = (3, 0, 1)

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.grouped = grouped

    def forward(self, x: Tensor) -> Tensor:
        rows = F.pad(x.reshape(-1, WIDTH), (0, 8 - WIDTH))
        owners = torch.tensor(self.OWNERS).repeat(len(rows))[: len(rows)]
        order = owners.argsort(stable=True)
        counts = owners.bincount(minlength=4)
        if self.grouped and self.weight.dtype in (torch.float32, torch.bfloat16):
            offs = counts.cumsum(0).to(torch.int32)
            found = fusedacc.nn.functional.grouped_linear(rows[order], self.weight, offs)
        else:
            parts = rows[order].split(counts.tolist())
            found = torch.cat([F.linear(part, self.weight[e]) for e, part in enumerate(parts) if len(part)])
        return torch.tanh(found[order.argsort()][:, :WIDTH]).view(x.shape)


BLOCKS = {
    "dense": Dense,
    "conv": Conv,
    "rnn": lambda: Recurrent("rnn"),
    "lstm": lambda: Recurrent("lstm"),
    "gru": lambda: Recurrent("gru"),
    "norm": Norm,
    "transposed": Transposed,
    "same": SameGradient,
    "expanded": Expanded,
    "experts": lambda: Experts(False),
    "grouped": lambda: Experts(True),
}


@dataclass(frozen=True)
class ModelSpec:
    """A network. `order`: the block that runs at each depth. A block may run twice or never."""

    seed: int
    dtype: str
    front: str
    blocks: tuple[str, ...]
    order: tuple[int, ...]
    tied: bool
    frozen: tuple[int, ...]  # blocks frozen before the optimizer is wrapped
    spare: tuple[int, ...]  # blocks that the optimizer does not own at first
    critic: bool


class Network(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.front == "linear":
            self.front: nn.Module = nn.Linear(WIDTH, WIDTH)
        else:
            self.front = nn.Embedding(VOCABULARY, WIDTH, sparse=spec.front == "sparse")
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in spec.blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY if spec.tied else OUTPUTS)
        if spec.tied:
            self.head.weight = self.front.weight

    def inputs(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        size = (int(torch.randint(1, 4, (), generator=generator)), LENGTH)
        if self.spec.front == "linear":
            return torch.randn(*size, WIDTH, generator=generator).to(self.head.bias.dtype)
        return torch.randint(0, VOCABULARY, size, generator=generator)

    def forward(self, inputs: Tensor, depth: int, mode: str | None) -> Tensor:
        """Run the first `depth` blocks of the order. If a mode is given, checkpoint every second block."""
        x = self.front(inputs)
        for position, index in enumerate(self.spec.order[:depth]):
            block = self.blocks[index]
            if mode is not None and position % 2 == 0 and x.requires_grad:
                x = x + checkpoint(block, x, use_reentrant=mode == "reentrant")
            else:
                x = x + block(x)
        return self.head(x)


class Critic(nn.Module):
    """Scores a network's outputs, as a discriminator does."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(outputs, WIDTH)
        self.second = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def build(spec: ModelSpec) -> tuple[Network, Critic | None]:
    torch.manual_seed(spec.seed)
    network = Network(spec).to(getattr(torch, spec.dtype))
    for index in spec.frozen:
        network.blocks[index].requires_grad_(False)
    critic = Critic(network.head.out_features).to(network.head.bias.dtype) if spec.critic else None
    return network, critic


def loss_of(output: Tensor, seed: int, reduction: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    target = torch.randn(output.shape, generator=generator).to(output.dtype)
    return F.mse_loss(output, target, reduction=reduction)


def random_model(rng: random.Random) -> ModelSpec:
    front = rng.choices(["linear", "embedding", "sparse"], [5, 3, 1])[0]
    dtype = rng.choices(["float32", "float64", "bfloat16", "float16"], [12, 1, 4, 1])[0]
    kinds = sorted(BLOCKS)
    if dtype in ("bfloat16", "float16"):
        kinds.remove(
            "lstm"
        )  # its gradients are float32 there, and only stock rounds them to the parameter's dtype
    blocks = tuple(rng.choice(kinds) for _ in range(rng.randint(1, 4)))
    indices = range(len(blocks))
    order = tuple(rng.choice(indices) for _ in range(rng.randint(0, 4)))
    return ModelSpec(
        seed=rng.randrange(10**6),
        dtype="bfloat16" if front == "sparse" and dtype == "float16" else dtype,
        front=front,
        blocks=blocks,
        order=order,
        tied=front == "embedding" and rng.random() < 0.5,
        frozen=tuple(i for i in indices if rng.random() < 0.12),
        spare=tuple(i for i in indices if rng.random() < 0.15),
        critic=rng.random() < 0.15,
    )
