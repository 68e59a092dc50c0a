"""Other projects' own test suites, with every optimizer that they make inside a wrapper (wrapping_plugin.py).

Their source distributions, of the pinned versions, are unpacked into the second environment by
`make test-integrations`. That of torch-optimi holds no tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import sweeps

import fusedacc

HERE = Path(__file__).resolve().parent
SUITES = Path(sys.prefix) / "suites"

TRAINING = "test_optimizers.py::TestOptimizerTraining::"
INTERFACE = "test_optimizers.py::TestOptimizerInterface::"
WRAPPERS = "test_wrapper_optimizers.py::"

#: Tests of pytorch-optimizer that make no optimizer, or whose subject is not the optimizer.
NO_OPTIMIZER = (
    "test_docs.py",
    "test_load_modules.py",
    "test_loss_functions.py",
    "test_lr_schedulers.py",  # its schedules of learning rates; one kind of optimizer
    "test_test_helpers.py",  # its own search for classes
    "utils/",
)
#: Each runs Inductor, or makes process groups, for many seconds.
SLOW = (
    "test_create_optimizer.py::TestCreateOptimizer::test_create_compiled_optimizer",
    "optimizers/test_muon.py::TestMuon::test_sharded_updates",
)
#: By the reason, beginnings of the names of tests that do not hold of a wrapped optimizer, in either loop.
DESELECTED = {
    "updates inside the backward: it has no step()": (
        "optimizers/test_lomo.py::TestLomo::test_lomo_optimizer",
        "optimizers/test_lomo.py::TestLomo::test_lomo_deepspeed_zero3",
    ),
    "compares str(optimizer), or looks into optimizer.optimizer: the wrapper's are its own": (
        WRAPPERS + "test_load_wrapper_optimizer",
        WRAPPERS + "TestMagma::test_magma_str_and_closure",
        WRAPPERS + "TestMagma::test_magma_moment_selection",
        WRAPPERS + "TestLookahead::test_lookahead_resume_with_new_parameters[pullback]",
    ),
    "takes __getstate__() for the inner one's": (
        WRAPPERS + "TestLookahead::test_lookahead_parameters",
        WRAPPERS + "TestScheduleFreeWrapper::test_schedulefree_wrapper",
    ),
    "looks which function torch.compile is given": (
        "test_create_optimizer.py::TestCreateOptimizer::test_create_optimizer_compile_wiring",
    ),
    "one parameter in two optimizers": (
        WRAPPERS + "TestScheduleFreeWrapper::test_schedulefree_wrapper_legacy_state_dict",
    ),
    "its class does not call Optimizer.__init__: no defaults, no hooks": (
        WRAPPERS + "TestSafeFP16Optimizer",
        WRAPPERS + "TestPCGrad::test_checkpoint_hooks_and_resume",
    ),
}
#: Those that do not hold in a counted loop.
DESELECTED_COUNTED = {
    "a counted sum has no graph to differentiate": (
        "optimizers/test_hessian.py::test_hessian_optimizer",
        "test_gradients.py::TestGradientAvailability::test_missing_and_frozen_gradients[adahessian]",
        "test_gradients.py::TestGradientAvailability::test_missing_and_frozen_gradients[sophiah]",
        "test_optimizer_variants.py::test_variant_training[adam_debias-adahessian",
        *(TRAINING + f"test_training[{name}" for name in ("adahessian", "sophiah")),
        *(
            TRAINING + f"test_tensor_lr[{foreach}-{name}"
            for name in ("adahessian", "sophiah")
            for foreach in (False, True)
        ),
        *(INTERFACE + f"test_checkpoint_resume[{name}]" for name in ("adahessian", "sophiah")),
    ),
    "wants the closure itself, or evaluates it many times": (
        "test_gradients.py::TestGradientAvailability::test_missing_and_frozen_gradients[alig]",
        "test_gradients.py::TestGradientAvailability::test_missing_and_frozen_gradients[bsam]",
        "test_gradients.py::TestSparseGradients::test_sparse_not_supported[alig]",
        "test_optimizer_variants.py::TestMaximize::test_maximize[alig",
        TRAINING + "test_training[alig",
        TRAINING + "test_tensor_lr[False-alig",
        TRAINING + "test_tensor_lr[True-alig",
        *(INTERFACE + f"test_checkpoint_resume[{name}]" for name in ("alig", "bsam", "lbfgs")),
        WRAPPERS + "TestSAM::test_sam_optimizer[adamw-True",
        WRAPPERS + "TestSAM::test_sam_family_methods",
        WRAPPERS + "TestWSAM::test_wsam_optimizer[True-True",
        WRAPPERS + "TestBSAM::test_bsam_optimizer",
    ),
    "clears a backward that no step() has ended": (
        INTERFACE + "test_checkpoint_resume[lomo]",
        INTERFACE + "test_checkpoint_resume[adalomo]",
    ),
    "a step() with no gradient is no update": (
        *(INTERFACE + f"test_closure[{name}]" for name in ("adai", "adams", "alig", "ranger21")),
        "optimizers/test_muon.py::TestMuonClip::test_clip_projection_roles",
        "optimizers/test_muon.py::TestMuonClip::test_clip_shape_validation",
    ),
    "updates again from the gradient that stands in p.grad: it is spent": (
        "optimizers/test_dash.py::TestDASHUpdates::test_parameter_groups_and_missing_gradients",
        "optimizers/test_dash.py::TestDASHUpdates::test_update_momentum",
        "optimizers/test_flash_adamw.py::TestFlashAdamw::test_relative_weight_decay",
        "optimizers/test_schedulefree.py::test_schedule_free_adamw_ams_bound",
        "optimizers/test_shampoo.py::test_scalable_shampoo_pre_conditioner_with_svd",
        "optimizers/test_swats.py::test_swats_sgd_phase",
        WRAPPERS + "TestLookahead::test_added_parameter_group",
    ),
}


def run(package: str, tests: str, steps: str, folder: Path, deselected: list[str]) -> tuple[int, int, int]:
    """How many tests have passed, none failing, and how many optimizers of how many classes they made."""
    root = SUITES / f"{package}-{version(package)}"
    if not root.is_dir():
        pytest.skip(f"{root} is not there; `make test-integrations` fetches it")
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n")
    paths = [str(Path(fusedacc.__file__).parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "FUSEDACC_SUITE_STEPS": steps,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    options = ["-q", "--tb=short", "--disable-warnings", "-c", str(settings), "--rootdir", str(root)]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "wrapping_plugin"]
    options += [f"--deselect={tests}/{name}" for name in deselected if not name.endswith("/")]
    options += [f"--ignore={root / tests / name}" for name in deselected if name.endswith("/")]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tests],
        cwd=root,
        env={name: value for name, value in environment.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert found.returncode == 0, found.stdout[-20000:] + found.stderr[-2000:]
    passed = re.search(r"(\d+) passed", found.stdout)
    wrapped = re.search(r"wrapped: (\d+) optimizers of (\d+) classes", found.stdout)
    return int(passed[1]), int(wrapped[1]), int(wrapped[2])


#: Thousands of tests: in both loops in `make test-full` only.
@pytest.mark.parametrize("steps", ["manual", "1"] if sweeps.FULL else ["1"])
def test_pytorch_optimizer(steps: str, tmp_path: Path) -> None:
    deselected = [*NO_OPTIMIZER, *SLOW]
    for reasons in (DESELECTED, DESELECTED_COUNTED) if steps == "1" else (DESELECTED,):
        deselected += [name for names in reasons.values() for name in names]
    passed, optimizers, classes = run("pytorch_optimizer", "tests", steps, tmp_path, deselected)
    assert passed > 2800
    assert optimizers > 2500
    assert classes > 130


@pytest.mark.parametrize("steps", ["manual", "1"])
def test_schedulefree(steps: str, tmp_path: Path) -> None:
    """What wants the closure itself is theirs to compare with; counted, its step() refuses to go without."""
    file = "test_schedulefree.py::"
    closures = [file + f"test_schedulefree_{name}" for name in ("sgd", "adam", "radam")]
    passed, optimizers, classes = run(
        "schedulefree", "schedulefree", steps, tmp_path, closures if steps == "1" else []
    )
    assert passed == (5 if steps == "1" else 8)
    assert optimizers >= 6
    assert classes >= 2
