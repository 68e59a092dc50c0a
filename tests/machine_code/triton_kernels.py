"""Compiles the Triton kernels ahead of time, with the same options as a launch. No GPU is needed.

    python -m machine_code.triton_kernels KERNELS.json FOLDER

This runs in a separate process, because the calling process may use Triton's interpreter. `KERNELS.json`
lists, for each kernel, the target (`sm_90`, `gfx942`), the name of a method of `Compiler`, and its arguments.
The program writes the cubins and `compiled.json`, with a dictionary for each kernel, to `FOLDER`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusedacc.kernels.triton import softmax as softmax_kernels
from fusedacc.kernels.triton.kernels import (
    ADDING,
    TILES,
    WARPS,
    add_long_rows,
    add_runs,
    finish_norm,
    grouped_accumulate,
    join_partials,
    norm_partials,
    scale_accumulate,
)

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Compiler:
    """Compiles kernels for one target.

    Args:
        target: an NVIDIA architecture such as `sm_90`, or an AMD architecture such as `gfx942`.
    """

    def __init__(self, target: str) -> None:
        self.target = target

    def accumulation(self, gradient: str, accumulator: str, noisy: bool = False) -> dict[str, Any]:
        types = {"table": "*i64", "calls": "*i64", "scale": "*fp64", "beta": "*fp64", "count": "i32"}
        constants = {
            "accumulator_dtype": getattr(tl, accumulator),
            "gradient_dtype": getattr(tl, gradient),
            "wide": wide(accumulator),
            "noisy": noisy,
        }
        return self.compiled(scale_accumulate, types, constants, range(2), ADDING)

    def norm(self, dtype: str, infinity: str) -> dict[str, Any]:
        types = {"table": "*i64", "partials": "*fp64", "count": "i32"}
        constants = {"dtype": getattr(tl, dtype), "wide": wide(dtype), "infinity": infinity == "inf"}
        return self.compiled(norm_partials, types, constants, range(2))

    def end(self, dtype: str, infinity: str) -> dict[str, Any]:
        types = {"partials": "*fp64", "count": "i32", "norm": "*fp" + dtype[-2:], "not_finite": "*fp32"}
        return self.compiled(finish_norm, types, {"infinity": infinity == "inf"}, range(1))

    def join(self, infinity: str) -> dict[str, Any]:
        types = {"partials": "*fp64", "count": "i32", "joined": "*fp64"}
        return self.compiled(join_partials, types, {"infinity": infinity == "inf"}, range(1))

    def rows(self, gradient: str, accumulator: str, kernel: str) -> dict[str, Any]:
        types = {"table": "*" + SHORT[accumulator], "table_stride": "i32", "table_rows": "i32"}
        types |= {"width": "i32", "rows": "*i64"}
        if kernel == "add_runs":
            fresh = {"gradients": "*" + SHORT[gradient], "gradient_stride": "i32"}
            types |= {"order": "*i64", "count": "i32", **fresh}
        else:
            types |= {"count": "i32"}
        sums = "fp64" if accumulator == "float64" else "fp32"
        types |= {"scale": "*fp64", "padding": "i32", "sums": "*" + sums, "sum_stride": "i32"}
        constants = {"by_frequency": True, "block": 1024}
        if kernel == "add_runs":
            constants["wide"] = wide(accumulator)
        other = ("table_rows", "count", "scale", "padding")
        function = {"add_runs": add_runs, "add_long_rows": add_long_rows}[kernel]
        return self.compiled(function, types, constants, places(types, other))

    def grouped(
        self,
        operand: str,
        accumulator: str,
        on_device: bool,
        precision: str,
    ) -> dict[str, Any]:
        *block, warps = TILES[BYTES[operand]]
        number = "*fp32" if on_device else "fp32"
        types = {"accumulator": "*" + SHORT[accumulator], "left": "*" + SHORT[operand]}
        types |= {"right": "*" + SHORT[operand], "offsets": "*i32", "scale": number, "beta": number}
        numbers = ("rows", "columns", "tokens", "expert_stride", "row_stride", "left_stride", "right_stride")
        types |= dict.fromkeys(numbers, "i32")
        constants = {"scale_on_device": on_device, "beta_on_device": on_device, "wide": wide(accumulator)}
        constants |= dict(zip(("block_rows", "block_columns", "block_tokens"), block, strict=True))
        constants |= {"precision": precision}
        aligned = places(types, ("scale", "beta", "tokens"))
        result = self.compiled(grouped_accumulate, types, constants, aligned, {"num_warps": warps})
        return result | {"tile": TILES[BYTES[operand]]}

    def softmax(self, dtype: str, name: str) -> dict[str, Any]:
        types = {"numbers": "*fp32", "logits": "*" + SHORT[dtype], "target": "*i64", "class_weights": "*fp32"}
        types |= {"first": "i32", "tokens": "i32", "classes": "i32"}
        constants = {"smooths": True} if name == "statistics" else {}
        constants |= {"weighs": True, "step": 1024}
        aligned = places(types, ("first", "tokens"))
        return self.compiled(getattr(softmax_kernels, f"softmax_{name}"), types, constants, aligned)

    def compiled(
        self,
        function: Any,
        types: Mapping[str, str],
        constants: Mapping[str, Any],
        aligned: Iterable[int],
        options: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Compile one kernel.

        Args:
            function: the Triton function.
            types: the type of each argument, in order.
            constants: the constexpr arguments.
            aligned: the positions of the arguments that are divisible by 16.
            options: options for Triton's compiler.

        Returns:
            The assembly text and properties of the kernel.
        """
        options = options or {"num_warps": WARPS}
        source = ASTSource(
            function,
            {**types, **dict.fromkeys(constants, "constexpr")},
            constexprs=dict(constants),
            attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
        )
        if self.target.startswith("sm_"):
            target = GPUTarget("cuda", int(self.target[3:]), 32)
        else:
            target = GPUTarget("hip", self.target, 64)
            # Launches on ROCm do not limit the number of registers.
            options = {"num_warps": options["num_warps"]}
        kernel = triton.compile(source, target=target, options=dict(options))
        text = "ptx" if target.backend == "cuda" else "amdgcn"
        result = {text: kernel.asm[text], "shared": kernel.metadata.shared, "name": kernel.metadata.name}
        return result | {"threads": options["num_warps"] * target.warp_size, "cubin": kernel.asm.get("cubin")}


def wide(dtype: str) -> Any:
    return tl.float64 if dtype == "float64" else tl.float32


def places(types: Iterable[str], other: Sequence[str]) -> list[int]:
    return [index for index, name in enumerate(types) if name not in other]


def main(wanted: Sequence[Sequence[Any]], folder: Path) -> None:
    results = []
    for number, (target, kernel, *arguments) in enumerate(wanted):
        result = getattr(Compiler(target), kernel)(*arguments)
        if result["cubin"] is not None:
            (folder / f"{number}.cubin").write_bytes(result["cubin"])
        results.append(result | {"cubin": f"{number}.cubin" if result["cubin"] is not None else None})
    (folder / "compiled.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
