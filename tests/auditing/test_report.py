"""The report: its text, its JSON, `check()`, and arguments that cannot be used."""

import io
import json
import re

import other_loops
import plain_loops
import pytest
import torch
from auditing_cases import audited, factors
from plain_loops import K, adam, data, loop, mlp
from torch import nn
from torch.nn import functional as F

import fusedacc
from fusedacc.auditing.remedies import find_remedy

LEGEND = (
    "A micro-batch is one backward pass. Its weight says how much its loss counts in an update: 1/4 each is "
    "the mean of 4.\n\n"
)
TABLE = "updates         micro-batches  weight of each  sum (1 is right)\n"


def without_time(text):
    """Return a report without the seconds at its end."""
    head, _, _ = text.rpartition(" The audit took ")
    return head


def test_the_report_of_a_right_loop():
    report = audited(plain_loops.CASES["right"])
    assert without_time(report.text) == (
        "Gradient accumulation of this program: 24 micro-batches, 6 updates, AdamW, float32\n"
        f"{LEGEND}{TABLE}"
        "1-6             4              1/4 each        1                 ok\n\n"
        "No problem found."
    )
    report.check()


def test_the_report_of_a_fault_names_cause_factor_line_and_remedy():
    report = audited(plain_loops.CASES["bad_zero_grad_each"])
    problem = without_time(report.text)
    problem = problem[problem.index("PROBLEM lost:") :]
    assert re.sub(r"py:\d+", "py:7", problem) == (
        "PROBLEM lost: updates 1-6: only 1 of 4 micro-batches reaches the optimizer: zero_grad() at "
        "plain_loops.py:7 clears the other 3 gradients\n"
        "    Where: zero_grad() at plain_loops.py:7, before step() at plain_loops.py:7\n"
        "    Fix: call zero_grad() once for each update, after step(), not between micro-batches.\n\n"
        "1 problem found. In the updates with this problem the audit did not check whether "
        "micro-batches count the same or what the weights add up to. Fix it, then audit again."
    )
    row = "1-6             4              0 0 0 1/4       1/4               PROBLEM: lost\n"
    assert f"{TABLE}{row}" in report.text
    with pytest.raises(AssertionError) as raised:
        report.check()
    assert str(raised.value) == report.text


TEXTS = {
    "bad_mean_of_means": (
        "mean of means: each loss is a mean over the 8 to 64 tokens of its micro-batch, and all "
        "micro-batches get the same weight (see the table). So one token counts up to 8 times as much as "
        "another in the same update"
    ),
    "bad_not_divided": (
        "the gradient is 4 times the mean of 4 micro-batches: nothing divides by their number"
    ),
    "bad_divided_twice": "the gradient is 1/4 of the mean of 4 micro-batches: something divides twice",
    "bad_last_window_divided_by_k": (
        "the update holds 2 micro-batches instead of 4, but each loss is divided as in the other updates,"
        " so the gradient is 1/2 of what it should be"
    ),
    "bad_step_each": (
        "each loss is divided by 4, but the update holds 1 micro-batch, so the gradient is 1/4 of what it"
        " should be"
    ),
    "bad_no_zero_grad": "the gradient of the previous update counts again: nothing clears it",
    "bad_backward_twice": "a loss goes through backward() twice, so its micro-batch counts 2 times",
    "bad_tied_added_twice": (
        "embed.weight: the gradient counts 2 times as much as that of the other parameters (the table "
        "shows those)"
    ),
    "bad_one_expert_lost": (
        "2.0.weight, 2.0.bias, 2.1.weight and 5 more: the gradient does not reach the optimizer, unlike "
        "that of the other parameters (the table shows those)"
    ),
    "bad_not_unscaled_65536": (
        "the loss scale is not removed: the gradient is 65536 times what it should be"
    ),
    "bad_doubling": (
        "the micro-batches of an update count differently (see the table): one counts up to 8 times as "
        "much as another"
    ),
    "bad_scaler_updates_each": (
        "the losses of an update are multiplied by different numbers, the largest up to 8 times the "
        "smallest. So one label counts up to 8 times as much as another in the same update"
    ),
    "bad_labels_counted_with_padding": (
        "the losses are divided by 1.06 to 1.73 times the number of their tokens, so the "
        "gradient is 0.58 to 0.94 of what it should be"
    ),
    "bad_multiplied_by_k": (
        "the gradient is 16 times the mean of 4 micro-batches: it is multiplied by their number instead "
        "of divided"
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_problem(name):
    cases = plain_loops.CASES | other_loops.CASES
    report = audited(cases[name])
    assert [problem.text for problem in report.problems] == [TEXTS[name]]


# Updates whose facts differ


def windows_with_zero_grad_each(lengths):
    """Train in windows of given lengths, of which only the last micro-batch counts."""
    model = mlp()
    optimizer = adam(model)
    source = iter(data(sum(lengths)))
    for length in lengths:
        for _ in range(length):
            optimizer.zero_grad()
            x, y = next(source)
            (F.cross_entropy(model(x), y) / length).backward()
        optimizer.step()


def problem_lines(report):
    """Return the lines of the problems, with all lines of the script as 7."""
    lines = re.sub(r"py:\d+", "py:7", report.text).splitlines()
    return [line for line in lines if line.startswith(("PROBLEM", "    "))]


def test_updates_with_different_facts_have_sentences_of_their_own():
    report = audited(lambda: windows_with_zero_grad_each([4, 4, 2, 4]))
    cleared = "zero_grad() at test_report.py:7 clears"
    first = f"only 1 of 4 micro-batches reaches the optimizer: {cleared} the other 3 gradients"
    second = f"only 1 of 2 micro-batches reaches the optimizer: {cleared} the other gradient"
    assert problem_lines(report)[:3] == [
        f"PROBLEM lost: updates 1-2, 4: {first}",
        f"    update 3: {second}",
        "    Where: zero_grad() at test_report.py:7, before step() at test_report.py:7",
    ]
    (problem,) = report.as_json()["problems"]
    assert re.sub(r"py:\d+", "py:7", problem["text"]) == f"{first} (update 3: {second})"
    assert problem["updates"] == [1, 2, 3, 4]
    assert "1 problem found." in report.text


def test_many_different_facts_share_a_sentence():
    report = audited(lambda: windows_with_zero_grad_each([2, 3, 4, 5, 6, 2]))
    lines = problem_lines(report)
    assert lines[0].startswith("PROBLEM lost: updates 1, 6: only 1 of 2")
    assert lines[3] == "    updates 4-5: the same with other numbers (see the table)"


def test_a_problem_names_its_optimizer():
    def train():
        plain_loops.CASES["right"]()
        windows_with_zero_grad_each([4, 4])

    report = audited(train)
    assert problem_lines(report)[0].startswith("PROBLEM lost: updates 1-2 of optimizer 2: only 1 of 4")
    assert "updates (optimizer)  micro-batches" in report.text


def test_the_head_of_sums_says_what_is_right():
    head = "sum (1 is right)"
    assert head in audited(plain_loops.CASES["bad_not_divided"]).text
    assert "sum (3 is right)" in audited(plain_loops.CASES["right"], scale=3.0).text
    # The factor of this loss may be right.
    report = audited(plain_loops.CASES["right_half_mse"])
    assert (report.status, head in report.text) == (0, False)


def test_ignored_problems_that_hide_others_are_mentioned():
    report = audited(plain_loops.CASES["bad_zero_grad_each"], ignore=["lost"])
    assert (
        "No problem found. In the updates with ignored problems the audit did not check whether "
        "micro-batches count the same or what the weights add up to. Fix them, then audit again."
    ) in report.text


def test_in_a_frameworks_loop_the_remedy_is_the_frameworks():
    report = audited(plain_loops.CASES["bad_fusedacc_divided_too"])
    assert problem_lines(report)[2].startswith("    Fix in fusedacc: do not divide the loss")
    (other,) = re.findall("Fix.*", audited(plain_loops.CASES["bad_divided_twice"]).text)
    assert other.startswith("Fix: divide once")
    assert find_remedy("scale", "not full", "lightning", 1).startswith("Fix in Lightning: ")
    assert find_remedy("scale", "not divided", "", 2).startswith(
        "Fix: divide each loss by the number of micro-batches on one rank"
    )


# The rest of the report


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


@pytest.mark.parametrize(
    ("unscales", "scale", "limit"),
    [(False, 1024.0, 0.1), (True, 1024.0, 0.1), (False, 1024.0, 1e9), (False, 1.0, 1e-3)],
)
def test_clipping_with_the_loss_scale_is_a_note(unscales, scale, limit):
    """The note needs a loss scale, and gradients that clipping has shrunk before they are unscaled."""
    model = mlp()
    optimizer = adam(model)

    def train():
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for i, (x, y) in enumerate(data()):
            scaler.scale(F.cross_entropy(model(x), y) / K).backward()
            if (i + 1) % K == 0:
                if unscales:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), limit)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    report = audited(train)
    assert report.status == 0, report.text
    notes = [re.sub(r"py:\d+", "py:7", note) for note in report.notes]
    note = (
        "clip_grad_norm_ at test_report.py:7 clips gradients that are still multiplied by the loss scale: "
        "call scaler.unscale_(optimizer) before it. This is right only if you multiply max_norm by the "
        "scale too"
    )
    assert notes == [note] * (not unscales and scale != 1 and limit < 1)


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
        ("count", "the update holds 4 micro-batches instead of 8")
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


def test_the_factor_is_that_of_the_worst_update():
    """The text says "up to 8 times"; the first update has 4 times."""
    report = audited(plain_loops.CASES["bad_mean_of_means"])
    assert "up to 8 times" in report.problems[0].text
    assert [problem["factor"] for problem in report.as_json()["problems"]] == [8.0]


def test_a_report_of_the_first_updates_says_so():
    note = "only the first 2 updates of each optimizer were watched"
    assert note in audited(plain_loops.CASES["right"], updates=2).text
    assert "only the first" not in audited(plain_loops.CASES["right"]).text


def test_the_sum_of_an_update_with_stale_gradients():
    table = audited(plain_loops.CASES["bad_no_zero_grad"]).as_json()["table"]
    rows = [(row["sum"], row["weights"]) for row in table if "stale" in row["verdict"]]
    assert rows == [("1 + the previous update", "1/4 each + the previous update")]
