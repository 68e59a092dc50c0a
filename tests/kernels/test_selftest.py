"""Self-tests at first use, here of the CPU's backends: what they find, and what follows."""

import copy
import json
import warnings
from pathlib import Path
from unittest import mock

import forked
import pytest
import torch
from broken_backends import BROKEN, breaks, broken, self_tests
from cases import native
from torch import nn

import fusedacc
from fusedacc.kernels import grouped, matmul, registry, selftest, selftest_checks
from fusedacc.kernels.dtypes import PAIRS
from fusedacc.kernels.lists import select_for_rows

CPU = torch.device("cpu")
FLOAT, LOW = torch.float32, torch.bfloat16

pytestmark = native


@pytest.fixture
def folder(tmp_path):
    """Enable self-tests on the CPU, and return the folder of their results."""
    with self_tests(tmp_path, "cpu"):
        yield tmp_path


def select(dtype=FLOAT, backend="auto"):
    return registry.select(CPU, dtype, dtype, backend)


def wrap(backend="auto"):
    model = nn.Linear(4, 3)
    return fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), backend=backend)


# What is checked


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_correct_backends_pass(backend):
    for gradient, accumulator in PAIRS:
        assert selftest_checks.sums(registry.get(backend), CPU, gradient, accumulator) is None


@pytest.mark.parametrize("what", BROKEN)
def test_a_wrong_kernel_is_found(what, folder):
    with breaks("cpu", what), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = select(LOW)
    assert chosen.backend.name == "eager"
    said = BROKEN[what][1]
    assert "not cpu: its self-test has failed: bfloat16 into bfloat16: " in chosen.reason
    assert said in selftest.failure("cpu", CPU)


def test_rows_are_checked(folder):
    assert select_for_rows(CPU, FLOAT, LOW).backend.name == "cpu"
    selftest.forget()
    (folder / selftest.FILE).unlink()
    said = "'cpu, rows of a table' has failed on cpu"
    with breaks("cpu", "rows"), pytest.warns(RuntimeWarning, match=said):
        chosen = select_for_rows(CPU, FLOAT, LOW)
    assert chosen.backend.name == "eager"
    assert "not cpu: its self-test has failed: bfloat16 into float32: " in chosen.reason
    assert select(LOW).backend.name == "cpu"


@pytest.mark.parametrize("dtype", [FLOAT, LOW])
@pytest.mark.parametrize("experts", [False, True])
def test_products_are_checked(dtype, experts):
    multiply, check = matmul.gemm_accumulate_, selftest_checks.product
    if experts:
        multiply, check = grouped.grouped_accumulate_, selftest_checks.grouped

    def spoils_a_corner(total, *others):
        multiply(total, *others)
        total[..., -1, -1] += 1.0

    def keeps_always(total, *others):
        multiply(total, *others[:-1], 1.0)

    assert check(multiply, CPU, dtype, FLOAT) is None
    assert "scale a number, beta 1: " in check(spoils_a_corner, CPU, dtype, FLOAT)
    assert "scale a number, beta 0: " in check(keeps_always, CPU, dtype, FLOAT)


# What follows


def test_auto_warns_once_and_takes_the_next_backend(folder):
    with breaks("cpu", "tail"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = wrap()
        assert select(LOW).backend.name == "eager"
    (warning,) = caught
    for words in (
        "the self-test of 'cpu' has failed on cpu (",
        "float32 into float32: addition: ",
        "Backend 'eager' is used instead. Please report it: run `python -m fusedacc selftest`",
    ):
        assert words in str(warning.message)
    assert " eager " in optimizer.explain()
    assert "its self-test has failed" in optimizer.explain()


def test_an_explicitly_chosen_backend_raises(folder, monkeypatch):
    said = "='cpu' cannot run float32 into float32 on cpu: its self-test has failed: float32 into float32: "
    with breaks("cpu", "tail"):
        with pytest.raises(RuntimeError, match="backend" + said + "addition: .*Allowed here: 'auto', "):
            wrap("cpu")
        monkeypatch.setenv("FUSEDACC_BACKEND", "cpu")
        with pytest.raises(RuntimeError, match="FUSEDACC_BACKEND" + said):
            wrap()


def test_an_unusable_device_raises_and_the_next_process_uses_another_backend(folder, monkeypatch):
    monkeypatch.setattr(selftest, "_left_unusable", lambda device: RuntimeError("illegal address"))
    said = "has left the device unusable in this process: OSError: no such dev"
    with breaks("cpu", "raises"), pytest.raises(RuntimeError, match=said):
        wrap()
    selftest.forget()
    with pytest.warns(RuntimeWarning, match="the self-test of 'cpu' has failed"):
        assert select().backend.name == "eager"


def test_a_variable_disables_self_tests(folder, monkeypatch):
    with monkeypatch.context() as patch:  # undone before `folder` restores the variable
        patch.setenv("FUSEDACC_SELFTEST", "0")
        with breaks("cpu", "raises"):
            assert select().backend.name == "cpu"
        patch.setenv("FUSEDACC_SELFTEST", "no")
        with pytest.raises(ValueError, match="FUSEDACC_SELFTEST='no': allowed are '0' "):
            wrap()


def test_a_wrapper_on_a_cpu_runs_no_self_test(tmp_path):
    with self_tests(tmp_path), breaks("cpu", "raises"):
        wrap()
    assert not any(tmp_path.iterdir())


# What is kept


@pytest.fixture
def checks(monkeypatch):
    """Return the names of the backends that were checked, in order."""
    found, check = [], selftest_checks.sums
    counting = mock.Mock(side_effect=lambda own, *others: found.append(own.name) or check(own, *others))
    monkeypatch.setattr(selftest_checks, "sums", counting)
    return found


def test_a_result_is_kept_for_other_wrappers_and_processes(folder, checks, monkeypatch):
    wrap(), wrap()
    assert checks == ["cpu"]
    selftest.forget()  # as in another process
    wrap()
    assert checks == ["cpu"]
    (entries,) = json.loads((folder / selftest.FILE).read_text()).values()
    assert {name: entry["problem"] for name, entry in entries.items()} == {"cpu: float32 into float32": None}
    select(LOW)
    monkeypatch.setattr(selftest, "_kernels", lambda: 1)
    selftest.forget()
    wrap()
    assert checks == ["cpu"] * 3
    assert len(json.loads((folder / selftest.FILE).read_text())) == 2


@pytest.mark.parametrize("text", ["", "[]", '{"here": 3}', '{"%s": {"cpu: float32 into float32": 3}}'])
def test_a_damaged_file_is_replaced(folder, checks, text):
    (folder / selftest.FILE).write_text(text.replace("%s", selftest.machine(CPU)))
    wrap()
    assert checks == ["cpu"]
    assert selftest.results(CPU) == {"cpu: float32 into float32": None}
    json.loads((folder / selftest.FILE).read_text())[selftest.machine(CPU)]


def test_without_a_folder_results_are_kept_in_the_process(tmp_path, checks):
    (tmp_path / "file").touch()
    with self_tests(tmp_path / "file", "cpu"):
        wrap(), wrap()
    assert checks == ["cpu"]


AT_ONCE = """
import sys, time
from pathlib import Path
import torch
from fusedacc.kernels import selftest
selftest.DEVICE_TYPES = ("cpu",)
folder, own, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def check():
    with open(folder / "checked", "a") as file:
        file.write("once\\n")
    time.sleep(0.2)

(folder / f"ready {own}").touch()
while len(list(folder.glob("ready *"))) < count:
    time.sleep(0.01)
print(selftest.problem_of("cpu", "a pair", torch.device("cpu"), check))
"""


def test_only_one_of_several_processes_runs_the_self_test(tmp_path: Path):
    variables = {"FUSEDACC_SELFTEST": "1", "FUSEDACC_CACHE": str(tmp_path)}
    running = [forked.start(AT_ONCE, str(tmp_path), str(own), "3", **variables) for own in range(3)]
    done = [each.wait() for each in running]
    assert [each.stdout for each in done] == ["None\n"] * 3, done
    assert (tmp_path / "checked").read_text() == "once\n"


# When it cannot run


def test_it_is_deferred_to_the_end_of_a_trace(folder, checks):
    """A backend that was selected during the trace does not count as tested."""
    with torch._subclasses.FakeTensorMode():
        assert select().backend.name == "cpu"
    torch.func.vmap(lambda x: select() and x)(torch.zeros(2))
    assert checks == []
    assert len(selftest.deferred) == 1
    on_meta = nn.Parameter(torch.zeros(1, device="meta"))  # needs no backend
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD([on_meta], lr=1.0))
    with breaks("cpu", "tail"), pytest.warns(RuntimeWarning, match="the self-test of 'cpu' has failed"):
        optimizer.step()
    assert checks == ["cpu"]
    assert not selftest.deferred
    assert select().backend.name == "eager"


def test_it_is_deferred_if_memory_is_too_small(folder, monkeypatch):
    monkeypatch.setattr(selftest_checks, "sums", mock.Mock(side_effect=torch.OutOfMemoryError("too large")))
    assert select().backend.name == "cpu"
    assert selftest.results(CPU) == {}
    selftest.retry()
    assert len(selftest.deferred) == 1


def test_a_backend_that_fails_in_a_window_adds_no_gradients_in_the_next(folder, monkeypatch):
    eager = registry.get("eager")
    additions = mock.Mock(side_effect=eager.accumulate_)
    monkeypatch.setattr(eager, "accumulate_", additions)
    model = nn.Linear(4, 3)
    optimizer = fusedacc.AccumulatingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), 4)

    def micro_batch() -> int:
        before = additions.call_count
        with optimizer.accumulate():  # then hooks are native, and Python ends the micro-batch
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step(), optimizer.zero_grad()
        return additions.call_count - before

    assert [micro_batch() for _ in range(6)] == [0] * 6
    selftest.exclude("cpu", CPU, "says another rank")
    called = [micro_batch() > 0 for _ in range(6)]
    assert called[3:] == [True] * 3  # not in the next window's first, whose gradients become the sums


def test_a_broken_copy_does_not_change_the_backend():
    assert broken(registry.get("cpu"), "raises").norm_partials is registry.get("cpu").norm_partials


class Layers(nn.Module):
    """A Linear, and experts whose matrices are read one by one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x):
        hidden = self.linear(x)
        for expert in range(2):
            hidden = torch.tanh(hidden @ self.experts[expert])
        return hidden


def test_modules_select_their_products_again_after_a_failure(folder):
    """A check that is deferred may fail in the middle of training."""
    torch.manual_seed(0)
    model = Layers()
    twin = copy.deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = fusedacc.AccumulatingOptimizer(inner, 2, model=model)
    for step in range(6):
        if step == 2:
            for kind in ("products", grouped._KIND):
                selftest.exclude(f"cpu, {kind}", CPU, "wrong sums")
        x = torch.randn(4, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(x).square().mean().backward()
            (twin(x).square().mean() / 2).backward()
            if step % 2:
                for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad)
                twin.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    row = next(line for line in optimizer.explain().splitlines() if line.startswith("linear.weight"))
    assert row.split()[2:4] == ["gemm", "eager"]
