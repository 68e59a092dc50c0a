"""Which backend runs: the order, the environment variable, explicit choices, and errors."""

import re

import forked
import pytest
import torch

from fusedacc import functional
from fusedacc.kernels import native, registry

CPU = torch.device("cpu")
FLOAT = torch.float32


def select(backend="auto", device=CPU):
    return registry.select(device, FLOAT, FLOAT, backend)


FORGET_TRITON = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
    del sys.modules[name]
"""


def in_new_process(code):
    """Return the output of a program in a process that has imported neither the package nor Triton."""
    done = forked.run(FORGET_TRITON + code, TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_auto_selects_the_first_backend_that_can_run():
    possible = [name for name in ("cpu", "eager") if registry.obstacle(name, CPU, FLOAT, FLOAT) is None]
    chosen = select()
    assert chosen.backend.name == possible[0]
    assert "first of cuda, cpu, eager that can run here" in chosen.reason
    assert "not cuda: " in chosen.reason
    assert select() is chosen


def test_other_devices_use_the_eager_backend():
    chosen = select(device=torch.device("meta"))
    assert chosen.backend.name == "eager"
    assert all(f"not {name}: " in chosen.reason for name in ("cuda", "triton", "cpu"))


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("8.0", (8, 0), True),
        ("8.0", (8, 9), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("9.0", (8, 9), False),
        ("9.0+PTX", (12, 0), True),
        ("9.0+PTX", (8, 9), False),
        ("9.0a", (9, 0), True),
        ("9.0a+PTX", (10, 0), False),
        ("10.0f", (10, 3), True),
        ("10.0f+PTX", (12, 0), False),
    ],
)
def test_which_gpus_run_code_for_an_architecture(built, capability, runs):
    assert native.runs_on(built, capability) is runs


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that simulates a GPU with Triton and a library, and selects the backend for it."""

    def pretend(capability, built, hip=None, problem=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(native.library, "load_error", lambda: None)
        build = {"cuda": "13.0", "cuda_architectures": built}
        monkeypatch.setattr(native.library, "built_with", lambda: build)
        monkeypatch.setattr(native.library, "launch_problem", lambda index: problem)
        triton = registry.get("triton")
        monkeypatch.setattr(triton, "obstacle", lambda *where: None)
        return registry._untested.__wrapped__("auto", "backend", torch.device("cuda", 0), FLOAT, FLOAT)

    return pretend


def test_auto_selects_cuda_if_the_library_has_code_for_the_gpu(gpu):
    assert gpu((9, 0), ["8.0", "9.0"]).backend.name == "cuda"
    assert gpu((12, 0), ["8.0", "9.0+PTX"]).backend.name == "cuda"


OLD_DRIVER = "CUDA driver version is insufficient for CUDA runtime version"


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (((12, 0), ["8.0", "9.0"]), "the native library was built for 8.0, 9.0, and cuda:0 is of 12.0"),
        (((9, 0), ["9.0"], None, OLD_DRIVER), rf"CUDA refuses kernels on cuda:0: {OLD_DRIVER}.* CUDA 13\.0"),
        (((9, 4), ["9.0"], "7.1"), "this torch is for ROCm"),
    ],
)
def test_auto_selects_triton_if_the_library_cannot_run(gpu, made, says):
    chosen = gpu(*made)
    assert chosen.backend.name == "triton"
    assert re.search(f"not cuda: {says}", chosen.reason)


def test_an_explicit_choice_is_used():
    chosen = select("eager")
    assert (chosen.backend.name, chosen.reason) == ("eager", "chosen by backend='eager'")


def test_the_error_of_an_explicit_choice_names_reason_and_alternatives():
    with pytest.raises(RuntimeError) as caught:
        select("cuda")
    message = str(caught.value)
    assert message.startswith("backend='cuda' cannot run float32 into float32 on cpu: ")
    for words in (registry.obstacle("cuda", CPU, FLOAT, FLOAT), "Allowed here: 'auto'", "'eager'"):
        assert words in message


def test_the_error_of_an_unknown_name_lists_the_allowed():
    with pytest.raises(ValueError, match="backend='fast' is no backend") as caught:
        select("fast")
    assert str(caught.value).endswith("allowed: 'auto', 'cuda', 'triton', 'cpu', 'eager'")


def test_variable_overrides_auto_only(monkeypatch):
    monkeypatch.setenv("FUSEDACC_BACKEND", "eager")
    assert (select().backend.name, select().reason) == ("eager", "chosen by FUSEDACC_BACKEND='eager'")
    monkeypatch.setenv("FUSEDACC_BACKEND", "cuda")
    assert select("eager").backend.name == "eager"
    with pytest.raises(RuntimeError, match="FUSEDACC_BACKEND='cuda' cannot run float32 into float32 on cpu"):
        functional.scale_accumulate_([torch.zeros(1)], [torch.ones(1)])
    for unset in ("", "auto"):
        monkeypatch.setenv("FUSEDACC_BACKEND", unset)
        assert select().reason.startswith("first of ")


def test_an_error_names_the_variable_its_value_and_the_allowed(monkeypatch):
    monkeypatch.setenv("FUSEDACC_BACKEND", "CUDA ")
    expected = "FUSEDACC_BACKEND='CUDA ' is no backend; allowed: 'auto', 'cuda', 'triton', 'cpu', 'eager'"
    for call in (
        lambda: select(),
        lambda: functional.scale_accumulate_([torch.zeros(1)], [torch.ones(1)]),
        lambda: functional.scale_accumulate_([], []),
        lambda: functional.prepare([]),
    ):
        with pytest.raises(ValueError, match="FUSEDACC_BACKEND") as caught:
            call()
        assert str(caught.value) == expected


SELECT_CUDA_TWICE = """
import torch, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from fusedacc import functional
    from fusedacc.kernels import registry
    functional.scale_accumulate_([torch.zeros(1)], [torch.ones(1)])
    print([name for name in ("triton", "torch.utils.flop_counter") if name in sys.modules])
    for dtype in (torch.float32, torch.float64):
        chosen = registry.select(torch.device("cuda", 0), dtype, dtype)
print(chosen.backend.name)
print(chosen.reason)
print(sum("Triton fails to import" in str(warning.message) for warning in caught))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, cuda is chosen before Triton is looked at")
def test_broken_triton_warns_once_and_another_serves(tmp_path):
    broken = tmp_path / "triton"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libtriton.so: wrong ELF class')")
    program = f"sys.path.insert(0, {str(tmp_path)!r})" + SELECT_CUDA_TWICE
    imported_for_cpu_tensors, name, reason, warned = in_new_process(program).splitlines()
    assert imported_for_cpu_tensors == "[]"
    assert name == "eager"
    assert "not triton: Triton fails to import (ImportError: libtriton.so: wrong ELF class)" in reason
    assert warned == "1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, cuda is chosen before Triton is looked at")
def test_absent_triton_is_no_warning():
    hidden = "import importlib.util as u; f = u.find_spec; "
    hidden += "u.find_spec = lambda name, *a: None if name == 'triton' else f(name, *a)"
    _, name, reason, warned = in_new_process(hidden + SELECT_CUDA_TWICE).splitlines()
    assert name == "eager"
    assert "not triton: Triton is not installed (pip install triton)" in reason
    assert warned == "0"
