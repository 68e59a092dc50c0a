"""Tests which PTX the translation rejects."""

from __future__ import annotations

import pytest
from emulation.ptx import translate

pytestmark = pytest.mark.cuda
KERNEL = """
.version 8.7
.visible .entry kernel(.param .u64 kernel_param_0)
{{
    .reg .b64 %rd<4>;
    .reg .b32 %r<4>;
    .reg .pred %p<2>;
    ld.param.b64 %rd1, [kernel_param_0];
    {statement}
    ret;
}}
"""


def lines(statement: str) -> list[str]:
    (entry,) = translate.entries(KERNEL.format(statement=statement))
    return entry.lines


@pytest.mark.parametrize(
    "statement",
    [
        "wgmma.fence.sync.aligned;",
        "add.ftz.f32 %r1, %r2, %r3;",
        "cvt.rz.f32.f64 %r1, %rd1;",
        "cvt.rzi.s32.f32 %r1, %r2;",
        "ld.global.v4.b32 {%r1, %r2}, [%rd1];",
        "ld.volatile.global.b32 %r1, [%rd1];",
        "shfl.sync.down.b32 %r1, %r2, 1, 31, -1;",
        "bar.sync 1;",
        "mov.u32 %r1, %clock;",
        "atom.global.add.f32 %r1, [%rd1], %r2;",
    ],
)
def test_what_is_not_known_is_an_error(statement):
    with pytest.raises(translate.UnknownPtx, match=statement.split()[0].split(".")[0]):
        lines(statement)


def test_accesses_name_their_size_so_that_alignment_and_bounds_are_checked():
    assert any(
        "global(" in line and "16, true" in line
        for line in lines("st.global.v4.b32 [%rd1+16], {%r1, %r1, %r1, %r1};")
    )
    assert any("global(" in line and "2, false" in line for line in lines("ld.global.b16 %r1, [%rd1];"))


def test_a_predicate_guards_its_statement():
    assert lines("@!%p1 add.s32 %r1, %r2, 5;")[-2].startswith("if (!as<bool>(r_p1))")
