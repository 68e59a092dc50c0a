"""`model=` on random graphs of shared, frozen, checkpointed and hooked modules equals plain PyTorch.

Each case depends only on its number. FUSEDACC_FULL_TESTS=1 runs thousands.
"""

import copy
import os
import random

import pytest
import torch
from loops import assert_close_weights
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedacc

CASES = 3000 if os.environ.get("FUSEDACC_FULL_TESTS") else 100
WIDTH = 6


class Graph(nn.Module):
    """Random layers that use a few shared modules. Every value has `WIDTH` features."""

    def __init__(self, random_: random.Random) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(
            nn.Embedding(
                random_.choice([5, 9]),
                WIDTH,
                padding_idx=random_.choice([None, 0, -1]),
                scale_grad_by_freq=random_.random() < 0.3,
                max_norm=random_.choice([None, None, 1.5]),
            )
            for _ in range(2)
        )
        self.linears = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=random_.random() < 0.6) for _ in range(random_.randint(1, 3))
        )
        self.heads = nn.ModuleList(
            nn.Linear(WIDTH, embedding.num_embeddings, bias=random_.random() < 0.3)
            for embedding in self.embeddings
        )
        if random_.random() < 0.5:
            self.heads[0].weight = self.embeddings[0].weight
        if random_.random() < 0.3:
            self.linears[-1].weight = self.linears[0].weight
        for module in [*self.embeddings, *self.linears, *self.heads]:
            if random_.random() < 0.15:
                module.weight.requires_grad_(False)
        if not any(p.requires_grad for p in self.parameters()):
            self.linears[0].weight.requires_grad_(True)

    def draw(self, random_: random.Random) -> list[tuple]:
        """Draw the layers of one forward: each layer's module, and its kind of checkpoint, if any."""
        return [
            (random_.randrange(len(self.linears)), random_.choice(["", "", "reentrant", "other"]))
            for _ in range(random_.randint(1, 4))
        ]

    def forward(self, indices: torch.Tensor, which: int, layers: list[tuple]) -> torch.Tensor:
        x = self.embeddings[which](indices)
        for index, how in layers:
            layer = self.linears[index]
            if how and x.requires_grad:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=how == "reentrant"))
            else:
                x = torch.tanh(layer(x))
        return self.heads[which](x)


def hook_some(model: Graph, random_: random.Random) -> None:
    for param in model.parameters():
        if param.requires_grad:
            drawn = random_.random()
            if drawn < 0.08:
                param.register_hook(lambda gradient: gradient * 1.5)
            elif drawn < 0.13:
                param.register_post_accumulate_grad_hook(lambda p: None)


@pytest.mark.parametrize("case", range(CASES))
def test_random_graphs_train_like_plain_pytorch(case):
    random_ = random.Random(case)
    torch.manual_seed(case)
    steps = random_.choice([None, 1, 2, 3])
    clip = random_.choice([None, 0.3])
    model = Graph(random_)
    twin = copy.deepcopy(model)
    hooks = random_.getrandbits(32)
    hook_some(model, random.Random(hooks))
    hook_some(twin, random.Random(hooks))
    lr, make = 0.05, torch.optim.SGD
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = fusedacc.AccumulatingOptimizer(
        make(trained, lr=lr, fused=random_.random() < 0.5),
        steps,
        model=model,
        max_grad_norm=clip,
        backend=random_.choice(["auto", "auto", "eager"]),
    )
    theirs = [p for p in twin.parameters() if p.requires_grad]
    reference = make(theirs, lr=lr)
    count = steps or 2
    for micro in range(3 * count):
        which, layers = random_.randrange(2), model.draw(random_)
        rows = model.embeddings[which].num_embeddings
        indices = torch.randint(0, rows, (random_.randint(0, 3), random_.randint(1, 4)))
        event = random_.random()
        if event < 0.1 and not any(how == "reentrant" for _, how in layers):
            for net, params in ((model, trained), (twin, theirs)):
                out = net(indices, which, layers)
                if out.requires_grad:
                    torch.autograd.grad(out.sum(), params, allow_unused=True)
        chosen = random_.sample(range(len(trained)), k=random_.randint(1, len(trained)))
        used = [model.embeddings[which], model.heads[which], *(model.linears[index] for index, _ in layers)]
        reached = {id(param) for module in used for param in module.parameters()}
        only = (
            event > 0.9
            and not any(how == "reentrant" for _, how in layers)
            and any(id(trained[index]) in reached for index in chosen)  # else only PyTorch counts it
        )
        for net, params, scale in ((model, trained, 1.0), (twin, theirs, 1.0 / (steps or 1))):
            loss = net(indices, which, layers).square().sum() * scale
            if loss.requires_grad:
                loss.backward(inputs=[params[index] for index in chosen] if only else None)
            elif net is model and steps:
                (sum(p.sum() for p in params) * 0).backward()  # a micro-batch that adds nothing
        if steps:
            optimizer.step(), optimizer.zero_grad()
        if (micro + 1) % count == 0:
            if not steps:
                optimizer.step()
                optimizer.zero_grad(set_to_none=case % 2 == 0)
            if clip is not None:
                nn.utils.clip_grad_norm_(theirs, clip)
            reference.step(), reference.zero_grad()
            assert_close_weights(model, twin, 2e-4, 2e-5)
    optimizer.close()
