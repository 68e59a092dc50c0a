"""Scripts of examples/other_libraries, which compare a training with that of the library alone."""

import pytest
import sweeps
from example_scripts import output_of


def test_heads_of_other_libraries_have_the_gradients_of_float64():
    pytest.importorskip("liger_kernel", reason="the script compares Liger's head")
    pytest.importorskip("cut_cross_entropy", reason="the script compares the head of cut-cross-entropy")
    printed = output_of("other_libraries/heads.py")
    assert [line.split(":")[0] for line in printed.splitlines()] == ["fusedacc", "Liger", "cut-cross-entropy"]


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "bnpo"] if sweeps.FULL else ["dapo"])
def test_trl_trains_the_same_parameters_with_and_without_the_wrapper(loss):
    pytest.importorskip("trl", reason="the script trains with TRL")
    printed = output_of("other_libraries/trl_grpo.py", loss)
    assert f"{loss}: 6 updates, largest difference of a parameter 0\n" in printed
