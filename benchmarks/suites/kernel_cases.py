"""What `kernels.py` measures: sizes, dtype pairs and goals as data, and the tensors of one cell."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from fusedacc.commands.bench.work import filled
from fusedacc.kernels.dtypes import PAIRS

from ..harness.measure import PEAK, Goal
from ..harness.results import Case, count

MOST_SETS, MOST_TENSORS, SETS_BYTES = 512, 20_000, 64 * 2**20

DTYPES = {f"{str(g)[6:]}:{str(a)[6:]}": (g, a) for g, a in sorted(PAIRS, key=str)}
MAIN_DTYPES = ("bfloat16:float32", "float32:float32")
PRODUCT_DTYPES = (*MAIN_DTYPES, "float16:float32")

Shapes = tuple[tuple[int, ...], ...]

_SINGLE = ("1Ki", "16Ki", "64Ki", "256Ki", "1Mi", "4Mi", "16Mi", "64Mi", "256Mi", "1Gi")
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_MIXED: Shapes = ((1,), (3,), (64,), (1000,), (768,), (64, 3, 7, 7), (512, 512), (512, 1000))
LISTS: dict[str, Shapes] = {
    **{name: ((int(name[:-2]) * _UNITS[name[-2:]],),) for name in _SINGLE},
    "1000x1000": ((1000,),) * 1000,
    "300x4": ((4,),) * 300,
    "300x(16x16)": ((16, 16),) * 300,
    "16x1Mi": ((2**20,),) * 16,
    "mixed": _MIXED * 8,
}
#: One set, the same tensors on every call: torch's records of them stay in the caches.
_SAME = ("1000x1000 same", "300x4 same")
LISTS |= {name: LISTS[name.removesuffix(" same")] for name in _SAME}
#: tokens, outputs and inputs of the layer.
PRODUCTS = {
    "product 16:32x32": (16, 32, 32),
    "product 512:1024x1024": (512, 1024, 1024),
    "product 512:4096x1024": (512, 4096, 1024),
    "product 2048:4096x4096": (2048, 4096, 4096),
}
SIZES = (*LISTS, *PRODUCTS)
SWEEPS = {
    "quick": ("1Ki", "300x4", "product 16:32x32"),
    "short": ("1Ki", "64Ki", "1Mi", "64Mi", *list(LISTS)[len(_SINGLE) :], "product 512:1024x1024"),
    "full": (*LISTS, *list(PRODUCTS)[1:]),
}
#: What a full sweep on CUDA leaves the dtypes that are not the main ones, to end in minutes.
OTHER_DTYPES_ON_CUDA = ("1Ki", "1Mi", "64Mi", "1000x1000", "mixed")

_FOREACH = "torch._foreach_add_"
#: Of a prepared plan. New lists may never be slower than foreach.
_PLAN_GOALS = {
    ("1000x1000 same", "bfloat16:float32"): 4.0,
    ("1000x1000 same", "float32:float32"): 1.5,
    ("300x4 same", "bfloat16:float32"): 1.0,
    ("300x4 same", "float32:float32"): 1.0,
    **{(size, dtypes): 0.0 for size in ("1000x1000", "300x4") for dtypes in MAIN_DTYPES},
}
#: By size, dtypes and provider.
GOALS: dict[tuple[str, str, str], tuple[Goal, ...]] = {
    ("64Mi", "float32:float32", "fusedacc cpu"): (Goal("add_"),),
    ("64Mi", "bfloat16:float32", "fusedacc cpu"): (
        Goal("add_ same dtype", 0.9, by_bandwidth=True),
        Goal("add_", 5.0),
    ),
    **{(*case, "fusedacc cpu"): (Goal(_FOREACH, goal),) for case, goal in _PLAN_GOALS.items()},
    **{(*case, "fusedacc cpu fresh lists"): (Goal(_FOREACH, 1.0),) for case in _PLAN_GOALS},
    **{
        ("1Gi", dtypes, f"fusedacc {backend}"): (Goal(PEAK[0], 0.92, by_bandwidth=True),)
        for dtypes in MAIN_DTYPES
        for backend in ("cuda", "triton")
    },
}


@dataclasses.dataclass(frozen=True)
class Work:
    """One cell of the sweep: a size, a dtype pair, and whether gradients are products (of `tokens` rows)."""

    size: str
    dtypes: str
    device: torch.device
    effort: str

    @property
    def gradient(self) -> torch.dtype:
        return DTYPES[self.dtypes][0]

    @property
    def accumulator(self) -> torch.dtype:
        return DTYPES[self.dtypes][1]

    @property
    def is_product(self) -> bool:
        return self.size in PRODUCTS

    @property
    def is_same(self) -> bool:
        """Whether every call takes the same tensors, whatever memory there is."""
        return self.size in _SAME

    @property
    def shapes(self) -> Shapes:
        return (PRODUCTS[self.size][1:],) if self.is_product else LISTS[self.size]

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def gradient_elements(self) -> int:
        if not self.is_product:
            return self.elements
        tokens, outputs, inputs = PRODUCTS[self.size]
        return tokens * (outputs + inputs)

    @property
    def set_bytes(self) -> int:
        """What one call reads and writes of its set, each byte once."""
        return self.elements * self.accumulator.itemsize + self.gradient_elements * self.gradient.itemsize

    @property
    def held_bytes(self) -> int:
        """A set with what the providers share: two lists like the accumulators, and three flat tensors."""
        shared = 5 if len(self.shapes) > 1 else 2
        return self.set_bytes + shared * self.elements * self.accumulator.itemsize

    def sets(self, available: int) -> int:
        """How many sets to rotate; 0 if memory has no room for one."""
        if self.is_same:
            return min(1, available // self.held_bytes)
        target = SETS_BYTES
        if self.device.type == "cuda":
            target = max(target, 4 * torch.cuda.get_device_properties(self.device).L2_cache_size)
        most = 4 if self.effort == "quick" else min(MOST_SETS, MOST_TENSORS // len(self.shapes))
        wanted = max(2, min(most, -(-target // self.set_bytes)))
        return min(wanted, max(available // 2 // self.held_bytes, min(1, available // self.held_bytes)))

    def make(self) -> tuple[list[Tensor], list]:
        """Accumulators and gradients."""
        accumulators = [filled(shape, self.accumulator, self.device) for shape in self.shapes]
        if not self.is_product:
            return accumulators, [filled(shape, self.gradient, self.device) for shape in self.shapes]
        tokens, outputs, inputs = PRODUCTS[self.size]
        factors = ((tokens, outputs), (tokens, inputs))
        return accumulators, [tuple(filled(shape, self.gradient, self.device) for shape in factors)]

    def smallest(self) -> tuple[list[Tensor], list]:
        """The same list of tensors of one element (a product: of one token)."""
        ones = [torch.ones(1, 1) if self.is_product else torch.ones(1) for _ in self.shapes]
        gradients = [one.to(self.gradient) for one in ones]
        return [one.to(self.accumulator) for one in ones], [
            (gradient, gradient.clone()) if self.is_product else gradient for gradient in gradients
        ]

    def case(self, sets: int) -> Case:
        rotated = "the same on every call"
        if sets > 1:
            rotated = f"{sets} sets in turn, {sets * self.set_bytes / 2**20:.3g} MiB"
        if self.is_product:
            tokens, outputs, inputs = PRODUCTS[self.size]
            name = f"product of {tokens} tokens, weight {outputs} x {inputs}"
            shapes = f"dy {tokens} x {outputs}, x {tokens} x {inputs}"
        elif len(self.shapes) == 1:
            name, shapes = f"{count(self.elements)} elements in one tensor", f"1 tensor of {self.elements}"
        elif len(set(self.shapes)) == 1:
            each = " x ".join(map(str, self.shapes[0]))
            short = each if len(each) < 8 else count(math.prod(self.shapes[0]))
            name = f"{len(self.shapes)} tensors of {short}"
            name += ", the same" if self.is_same else ""
            shapes = f"{len(self.shapes)} tensors of {each}"
        else:
            sizes = sorted(map(math.prod, self.shapes))
            name = f"{len(sizes)} tensors of mixed sizes"
            shapes = f"{len(sizes)} tensors of {sizes[0]} to {sizes[-1]}, {self.elements} elements"
        return Case(
            "kernels",
            name,
            "product" if self.is_product else "accumulate",
            f"{shapes}; {rotated}" if sets else shapes,
            self.dtypes.replace(":", " into "),
        )

    def compile_obstacle(self) -> str | None:
        """Compiling takes about 0.04 s per tensor and case: where that is left out."""
        if self.effort == "quick" and (self.size, self.dtypes) != ("1Ki", MAIN_DTYPES[0]):
            return "a quick run compiles for one case only"
        if self.dtypes not in MAIN_DTYPES:
            return f"compiled for {' and '.join(MAIN_DTYPES)} only, for the time that compiling takes"
        most = 300 if self.effort == "full" and self.device.type == "cpu" else 100
        if len(self.shapes) > most:
            return f"lists of more than {most} tensors take too long to compile in this sweep"
        return None
