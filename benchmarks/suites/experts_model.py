"""A whole micro-batch of a Transformers mixture of experts: stock, wrapped, and with `model=`.

experts.py measures a layer by itself; here attention, norms, router, head and the loss are around it, in
Qwen3MoeForCausalLM as Transformers has it, with its own grouped_mm. A micro-batch of a window that goes on,
each figure with the C library's defaults and with memory that it keeps, as there.

Goals on a CPU, each against every way of stock, with the C library's defaults: width 256 with 32 experts,
1.08 times as fast in float32 and 1.3 in bfloat16; width 512 with 64 experts, 1.8 and 2.5.

It needs the packages of requirements-integrations.txt, so `make bench-integrations` runs it, and `make bench`
does not.

    python -m benchmarks.suites.experts_model [--quick | --full] [--device cuda]
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util

import torch

from fusedacc.commands.measuring.records import Case, Results

from .. import harness
from .experts import DEFAULTS, DTYPES, ROUNDS, Cell, by_memory, trained
from .layers import EndlessWindow


@dataclasses.dataclass(frozen=True)
class Size:
    """A decoder of two blocks; each token is sent to `top` of the experts, MLPs of `width` and 2 `width`."""

    width: int
    experts: int
    top: int = 4
    words: int = 1024
    tokens: int = 64

    def __str__(self) -> str:
        return f"Qwen3Moe, width {self.width}, {self.experts} experts, top {self.top}, {self.tokens} tokens"

    @property
    def weights(self) -> int:
        """Of the experts, most of the model."""
        return 2 * self.experts * 3 * self.width * 2 * self.width


SMALL, LARGE = Size(256, 32), Size(512, 64)
SIZES = {"quick": (Size(32, 4, 2, 64, 8),), "short": (SMALL, LARGE), "full": (SMALL, LARGE)}
GOALS = {
    (SMALL, "float32"): 1.08,
    (SMALL, "bfloat16 into float32"): 1.3,
    (LARGE, "float32"): 1.8,
    (LARGE, "bfloat16 into float32"): 2.5,
}


def work(size: Size, dtypes: str, way: str, device: torch.device) -> EndlessWindow:
    import transformers  # is not where the other suites run

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


def figures(results: Results, effort: str) -> None:
    """SystemExit, and no row, where there is no Transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit(
            "Transformers is not installed; `make bench-integrations` has an environment with it"
        )
    cells = []
    for size in SIZES[effort]:
        for dtypes in DTYPES:
            words = f"2 blocks, {size.weights / 1e6:.1f} M weights of experts"
            case = Case("experts_model", str(size), "", words, dtypes)
            make = functools.partial(work, size, dtypes, device=results.device)
            cells.append(Cell(case, make, {DEFAULTS: GOALS.get((size, dtypes), 0.0)}))
    version = importlib.metadata.version("transformers")
    by_memory(results, cells, ROUNDS[effort], f"transformers {version}")


if __name__ == "__main__":
    harness.run(figures, harness.arguments(__doc__).parse_args())
