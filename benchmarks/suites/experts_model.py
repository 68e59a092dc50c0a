"""A whole micro-batch of a Transformers mixture of experts: stock, wrapped, and with `model=`.

experts.py measures a single layer. Here attention, norms, router, head and loss are included: the model is
Transformers' Qwen3MoeForCausalLM with its grouped_mm. It needs the packages of requirements-integrations.txt,
so `make bench-integrations` runs it, and `make bench` does not.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util

import torch

from .. import harness
from ..records import Case, Results
from .experts import DEFAULTS, DTYPES, ROUNDS, by_memory, trained
from .layers import EndlessWindow


@dataclasses.dataclass(frozen=True)
class Size:
    """A decoder of two blocks. Each token goes to `top` experts, which are MLPs of `width` and 2 `width`."""

    width: int
    experts: int
    top: int = 4
    words: int = 1024
    tokens: int = 64

    def __str__(self) -> str:
        return f"Qwen3Moe, width {self.width}, {self.experts} experts, top {self.top}, {self.tokens} tokens"


SMALL, LARGE = Size(256, 32), Size(512, 64)
SIZES = {"quick": (Size(32, 4, 2, 64, 8),), "short": (SMALL, LARGE), "full": (SMALL, LARGE)}
#: Goals on a CPU with the C library's defaults: the least speed relative to each way of stock.
GOALS = {
    (SMALL, "float32"): 1.08,
    (SMALL, "bfloat16 into float32"): 1.3,
    (LARGE, "float32"): 1.8,
    (LARGE, "bfloat16 into float32"): 2.5,
}


def work(size: Size, dtypes: str, way: str, device: torch.device) -> EndlessWindow:
    import transformers  # is not installed where the other suites run

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=size.words,
        hidden_size=size.width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.width // 4,
        intermediate_size=2 * size.width,
        moe_intermediate_size=2 * size.width,
        num_experts=size.experts,
        num_experts_per_tok=size.top,
        max_position_embeddings=size.tokens,
    )
    config._experts_implementation = "grouped_mm"
    model = transformers.Qwen3MoeForCausalLM(config).to(device, DTYPES[dtypes])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(size.words, (1, size.tokens), generator=generator).to(device)

    def forward(model: torch.nn.Module) -> list[torch.Tensor]:
        return [model(input_ids=tokens, labels=tokens).loss]

    return trained(model, way, forward, torch.ones((), device=device))


def transformers_version() -> str:
    """Return a note for the rows. Raises SystemExit without Transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit(
            "Transformers is not installed; `make bench-integrations` has an environment with it"
        )
    return f"transformers {importlib.metadata.version('transformers')}"


def figures(results: Results, effort: str) -> None:
    note = transformers_version()
    cells = []
    for size in SIZES[effort]:
        for dtypes in DTYPES:
            weights = 2 * size.experts * 3 * size.width * 2 * size.width
            words = f"2 blocks, {weights / 1e6:.1f} M weights of experts"
            case = Case("experts_model", str(size), "", words, dtypes)
            make = functools.partial(work, size, dtypes, device=results.device)
            cells.append((case, make, {DEFAULTS: GOALS.get((size, dtypes), 0.0)}))
    by_memory(results, cells, ROUNDS[effort], note)


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
