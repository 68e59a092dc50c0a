"""The report: its text, its JSON, `check()`, and arguments that cannot be used."""

import io
import json

import other_loops
import plain_loops
import pytest
import torch
from auditing_cases import audited, factors
from plain_loops import K, adam, data, loop, mlp
from torch import nn
from torch.nn import functional as F

import fusedacc

TABLE = "update          micro-batches  weight of each  sum\n"


def without_time(text):
    """Return a report without the seconds at its end."""
    head, _, _ = text.rpartition(" The audit took ")
    return head


def test_the_report_of_a_right_loop():
    report = audited(plain_loops.CASES["right"])
    assert without_time(report.text) == (
        "Gradient accumulation of this program: 24 micro-batches, 6 updates, AdamW, float32\n\n"
        f"{TABLE}"
        "1-6             4              1/4 each        1      ok\n\n"
        "No problem found."
    )
    report.check()


def test_the_report_of_a_fault_names_cause_factor_and_line():
    report = audited(plain_loops.CASES["bad_zero_grad_each"])
    _, line, _ = without_time(report.text).rsplit("\n", 2)
    assert line.startswith(
        "PROBLEM lost: updates 1-6: only 1 of 4 micro-batches reaches the optimizer; zero_grad() clears them "
        "at plain_loops.py:"
    )
    assert line.endswith("]")
    assert f"{TABLE}1-6             4              0 0 0 1/4       1/4    PROBLEM: lost\n" in report.text
    with pytest.raises(AssertionError) as raised:
        report.check()
    assert str(raised.value) == report.text


TEXTS = {
    "bad_mean_of_means": "mean of means: losses over 12 to 48 samples or tokens count the same, so one token "
    "counts up "
    "to 4 times as much as another",
    "bad_not_divided": "the gradient is 4 times the mean of 4 micro-batches: nothing divides by their number",
    "bad_divided_twice": "the gradient is 1/4 of the mean of 4 micro-batches: something divides twice",
    "bad_last_window_divided_by_k": "it holds 2 micro-batches instead of 4 but divides by the same number, "
    "so its gradient is 1/2 of what it should be",
    "bad_step_each": "the loss is divided by 4, but an update holds 1 micro-batch: 1/4 of their mean",
    "bad_no_zero_grad": "the gradient of the update before counts again: nothing clears it",
    "bad_backward_twice": "a loss goes through backward() twice, so its micro-batch counts 2 times",
    "bad_tied_added_twice": "embed.weight: counts 2 times as much as in the rest",
    "bad_not_unscaled_65536": "the loss scale 65536 is not removed from the gradients",
    "bad_doubling": "the micro-batches count differently: 4, 2, 1, 1/2",
    "bad_multiplied_by_k": "the gradient is 16 times the mean of 4 micro-batches: it is multiplied by their "
    "number",
}


@pytest.mark.parametrize("name", TEXTS)
def test_each_problem_is_one_sentence(name):
    cases = plain_loops.CASES | other_loops.CASES
    report = audited(cases[name])
    assert [problem.text for problem in report.problems] == [TEXTS[name]]


def test_rounding_of_16_bit_sums_is_a_note():
    report = audited(plain_loops.CASES["right_bf16_64"])
    rounding = report.as_json()["rounding"]
    assert list(rounding) == ["bfloat16"]
    assert 1e-3 < rounding["bfloat16"] < 0.2
    assert "note rounding: bfloat16 sums change the gradients by up to " in report.text


def test_json_has_the_documented_schema(tmp_path):
    file = tmp_path / "report.json"
    report = audited(plain_loops.CASES["bad_last_window_divided_by_k"], json_file=str(file))
    found = json.loads(file.read_text())
    assert found == json.loads(json.dumps(report.as_json()))
    seconds = found.pop("seconds")
    assert 0 < seconds["audit"] <= seconds["total"]
    (problem,) = found.pop("problems")
    assert problem.pop("location").startswith("plain_loops.py:")
    assert problem == {
        "kind": "scale",
        "updates": [3, 6],
        "optimizers": [0],
        "factor": pytest.approx(0.5),
        "text": TEXTS["bad_last_window_divided_by_k"],
    }
    row = {"optimizer": 0, "micro_batches": 4, "weights": "1/4 each", "sum": "1"}
    partial = {"micro_batches": 2, "sum": "1/2", "verdict": "PROBLEM: scale"}
    assert found == {
        "version": 1,
        "status": 1,
        "micro_batches": 20,
        "updates": 6,
        "checked": 6,
        "ranks": 1,
        "optimizers": ["AdamW"],
        "rounding": {},
        "notes": [],
        "table": [
            {**row, "updates": [1, 2, 4, 5], "verdict": "ok"},
            {**row, "updates": [3, 6], **partial},
        ],
    }


def test_what_clipping_shrank_alone_is_a_note():
    model = mlp()

    def clip_first_layer():
        nn.utils.clip_grad_norm_(model[0].parameters(), 1e-3)

    report = audited(lambda: loop(model, adam(model), data(), before_step=clip_first_layer))
    assert report.status == 0
    note = "0.weight, 0.bias: clip_grad_norm_ shrinks them by another factor than the rest"
    assert report.notes == [note]


def test_micro_batches_after_the_last_update_are_a_note():
    model = mlp()
    report = audited(lambda: loop(model, adam(model), data(10)))
    assert report.status == 0
    assert "2 micro-batches after the last update reached no update" in report.notes


def main_grad_loop(lose=False, keep=False):
    """Train as Megatron-Core does: gradients are added to float32 main_grad, which the optimizer uses.

    Args:
        lose: clear main_grad after the first micro-batch of a window.
        keep: leave the last gradient in p.grad, which nothing uses.
    """
    model = mlp(torch.bfloat16)
    optimizer = MainGradSGD(model.parameters(), lr=0.05)
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)

    def add(param):
        param.main_grad += param.grad.float()
        param.grad = param.grad.clone() * 0 if keep else None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(add)
    for i, (x, y) in enumerate(data(dtype=torch.bfloat16)):
        (F.cross_entropy(model(x), y) / K).backward()
        if lose and i % K == 0:
            optimizer.zero_main_grad()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_main_grad()


class MainGradSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_((group["lr"] * param.main_grad).to(param.dtype))

    def zero_main_grad(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.main_grad.zero_()


@pytest.mark.parametrize("keep", [False, True])
def test_main_grad_is_read_at_the_update(keep):
    report = audited(lambda: main_grad_loop(keep=keep))
    assert (report.status, report.as_json()["checked"]) == (0, 6), report.text


def test_micro_batches_that_main_grad_has_lost_are_told():
    report = audited(lambda: main_grad_loop(lose=True))
    assert factors(report) == {"lost": 0.75}, report.text


def test_modules_that_add_to_main_grad_themselves_are_not_judged():
    model = mlp()
    for param in model.parameters():
        param.main_grad = torch.ones_like(param)
        param.grad_added_to_main_grad = True
    report = audited(lambda: loop(model, MainGradSGD(model.parameters(), 0.1), data()))
    assert report.status == 2
    assert any("modules add their gradients to main_grad by themselves" in note for note in report.notes)


def test_parameters_have_the_names_of_the_given_model():
    inner = mlp()
    outer = nn.ModuleDict({"network": inner})

    def train():
        loop(
            inner,
            adam(inner),
            data(),
            before_step=lambda: inner[4].weight.grad.mul_(2),
        )

    assert "network.4.weight" in audited(train).text
    assert ": 4.weight" in audited(train, model=inner).text
    assert "network" not in audited(train, model=inner).text
    assert outer["network"] is inner


# Options and bad input


def test_steps_demands_a_number_of_micro_batches():
    report = audited(plain_loops.CASES["right"], steps=8)
    assert [(problem.kind, problem.text) for problem in report.problems] == [
        ("count", "4 micro-batches instead of 8")
    ]
    assert audited(plain_loops.CASES["right"], steps=4).status == 0


def test_scale_says_what_the_weights_add_up_to():
    assert audited(plain_loops.CASES["bad_not_divided"], scale=4.0).status == 0
    report = audited(plain_loops.CASES["right"], scale=3.0)
    assert [problem.text for problem in report.problems] == ["the weights add up to 1 instead of 3"]


def test_ignored_kinds_are_not_reported():
    report = audited(plain_loops.CASES["bad_not_divided"], ignore=["scale"])
    assert (report.status, report.problems) == (0, [])


def test_updates_ends_the_audit_and_lets_the_program_go_on():
    trained = []
    report = audited(lambda: trained.append(plain_loops.CASES["right"]()), updates=2)
    assert report.as_json()["updates"] == 2
    assert len(trained) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": -1}, r"updates must be 0 .all. or more, not -1"),
        ({"steps": 0}, "steps must be 1 or more, not 0"),
        ({"scale": 0.0}, "scale must be positive, not 0.0"),
        ({"ignore": ["typo"]}, "there is no kind of problem 'typo': choose from lost, double, scale"),
        ({"model": nn.Linear(2, 2, device="meta")}, "the model is on the meta device"),
    ],
)
def test_arguments_that_cannot_be_used(options, message):
    with pytest.raises(ValueError, match=message):
        fusedacc.audit(**options)


def test_two_audits_at_once_are_refused():
    with fusedacc.audit(output=io.StringIO()):
        with pytest.raises(RuntimeError, match="an audit is already running: end it"):
            fusedacc.audit().__enter__()
        with pytest.raises(RuntimeError, match="an audit is already running"), fusedacc.audit():
            pass


def test_an_update_with_nan_is_not_checked():
    model = mlp()

    def train():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for i, (x, y) in enumerate(data(12)):
            factor = float("nan") if i == 5 else 1.0
            (factor * F.cross_entropy(model(x), y) / K).backward()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

    report = audited(train)
    assert report.status == 0, report.text
    assert report.as_json()["checked"] == 1  # then the parameters are nan
    note = "the optimizer used gradients with an inf or nan: those updates were not checked"
    assert note in report.notes


def test_complex_parameters():
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))

    def train(lose):
        optimizer = torch.optim.SGD([weight], lr=0.0)
        for i in range(12):
            x = torch.randn(3, 6, dtype=torch.complex64)
            ((x @ weight).abs().square().mean() / K).backward()
            if lose and i % K == 0:
                optimizer.zero_grad()
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert audited(lambda: train(False)).status == 0
    assert factors(audited(lambda: train(True))) == {"lost": 0.75}


def test_json_in_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*missing to write the JSON to"):
        fusedacc.audit(json_file=str(tmp_path / "missing" / "report.json"))
