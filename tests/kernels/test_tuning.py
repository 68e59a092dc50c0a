"""Choices by trial: what decides, how results are kept, and that a trial has no side effects."""

import itertools
import json
import os

import forked
import pytest
import torch
from answers import ScriptedClock, answer, trials
from cases import native
from loops import Operators

from fusedacc import AccumulatingOptimizer
from fusedacc.kernels import tuning, tuning_trial
from fusedacc.kernels.tuning import Choice, Decision, choose
from fusedacc.kernels.tuning_trial import Interruptions
from fusedacc.optimizer.checkpoint.format import MASTER

BF16 = torch.bfloat16
SMALL = "product of bfloat16 into float32, 1 to 16 tokens"
MANY = "product of bfloat16 into float32, over 100 tokens"
CLOCK = ScriptedClock()


def in_file(folder):
    """Return the contents of the cache file."""
    return json.loads((folder / tuning.CACHE_FILE).read_text())


def question(*, slow="first", calls=None, name="how"):
    """Return a question with two ways. `slow` takes 2 ms, a thousand times as long as the other way.

    Every trial appends the name to `calls`.
    """

    def trial():
        if calls is not None:
            calls.append(name)
        return {way: CLOCK.way(2e-3 if way == slow else 2e-6) for way in ("first", "second")}

    return Choice(name, ("first", "second"), "first", trial)


def question_of_tensors():
    def trial():
        x = torch.ones(3, 3, device="cpu")
        return {"first": lambda: x @ x, "second": lambda: x @ x}

    return Choice("products", ("first", "second"), "first", trial)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(tuning.TUNE_ENV, "1")
    monkeypatch.setenv(tuning.CACHE_DIR_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_found", {})
    CLOCK.install(monkeypatch)
    return tmp_path / "cache"


@pytest.fixture
def now(monkeypatch):
    """Return the time of day in seconds, as a list of one number that the test changes."""
    found = [1e9]
    monkeypatch.setattr(tuning.time, "time", lambda: found[0])
    return found


def written(folder):
    return in_file(folder)[tuning.machine()]


def test_the_faster_way_is_found_once_and_kept(folder):
    calls = []
    found = choose(question(calls=calls))
    assert (found.candidate, found.reason) == ("second", "the fastest in a trial")
    assert found.microseconds == {"first": 2000, "second": 2}
    assert choose(question(calls=calls, slow="second")) is found
    assert len(calls) == 1
    entry = {
        "way": "second",
        "why": found.reason,
        "microseconds": {"first": 2000, "second": 2},
        "conclusive": True,
        "tries": 1,
        "tried_at": found.tried_at,
    }
    assert written(folder)["how"] == entry
    assert tuning.report() == [{"question": "how", "default": "first", **entry}]
    assert tuning.describe(tuning.report()[0]) == (
        "how: second: the fastest in a trial (first 2000 us, second 2 us; default first; "
        "conclusive after 1 try)"
    )
    tuning.forget()  # as in another process
    assert choose(question(calls=calls, slow="second")) == found
    assert len(calls) == 1


def test_threads_and_instruction_sets_make_another_machine(monkeypatch, threads):
    names = {tuning.machine()}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    names.add(tuning.machine())
    threads(torch.get_num_threads() + 1)
    names.add(tuning.machine())
    with torch.backends.mkldnn.flags(enabled=False):
        names.add(tuning.machine())
    assert len(names) == 4


def test_the_first_answer_in_the_file_is_used(folder):
    calls = []
    asked = question(calls=calls)

    def trial():
        # Another process saves its answer during this trial.
        tuning.save(tuning.machine(), asked, Decision("first", "another process"))
        return asked.trial()

    assert choose(Choice("how", asked.candidates, "first", trial)).reason == "another process"
    assert written(folder)["how"]["way"] == "first"


def _choose_there(folder, name):
    os.environ |= {tuning.TUNE_ENV: "1", tuning.CACHE_DIR_ENV: folder}
    choose(question(name=name))


def test_processes_that_write_at_once_lose_nothing(folder):
    names = [f"how {index}" for index in range(6)]
    workers = [forked.context.Process(target=_choose_there, args=(str(folder), name)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * len(names)
    assert sorted(itertools.chain.from_iterable(in_file(folder).values())) == names
    file = tuning.CACHE_FILE
    assert sorted(path.name for path in folder.iterdir()) == [file, f"{file}.lock"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 3}', '{"MACHINE": {"how": {"way": "third"}}}'])
def test_a_damaged_file_is_replaced(folder, content):
    folder.mkdir()
    (folder / tuning.CACHE_FILE).write_text(content.replace("MACHINE", tuning.machine()))
    assert choose(question()).candidate == "second"
    assert written(folder)["how"]["way"] == "second"


def test_answers_stay_in_the_process_if_the_folder_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tuning, "_unsaved", "")
    CLOCK.install(monkeypatch)
    with trials(FUSEDACC_CACHE=str(tmp_path / "file" / "below")):
        calls = []
        assert choose(question(calls=calls)).candidate == choose(question(calls=calls)).candidate == "second"
        assert len(calls) == 1
        assert "not written: NotADirectoryError" in tuning.kept_where()


# What decides


def test_the_environment_and_determinism_disable_trials(folder, monkeypatch):
    calls = []
    torch.use_deterministic_algorithms(True)
    try:
        chosen = choose(question(calls=calls), {"how": "second"})
    finally:
        torch.use_deterministic_algorithms(False)
    assert chosen.candidate == "first"
    assert "torch.use_deterministic_algorithms disables trials" in chosen.reason
    monkeypatch.setenv(tuning.TUNE_ENV, "0")
    assert "FUSEDACC_TUNE=0 disables" in choose(question(calls=calls)).reason
    assert not calls
    assert not folder.exists()
    monkeypatch.setenv(tuning.TUNE_ENV, "yes")
    with pytest.raises(ValueError, match="FUSEDACC_TUNE='yes': allowed are '0'"):
        choose(question(calls=calls))


def test_the_answers_that_the_caller_keeps_decide(folder):
    kept = {"how": "first"}
    assert choose(question(), kept).candidate == "first"
    assert choose(question(name="other"), kept).candidate == "second"
    assert kept == {"how": "first", "other": "second"}
    assert choose(question(), {"how": "of a later release"}).candidate == "second"


# Inconclusive trials


def test_an_inconclusive_trial_is_repeated_by_a_later_process(folder, now, monkeypatch):
    calls = []
    with monkeypatch.context() as busy:
        busy.setattr(Interruptions, "since_mark", lambda self: True)
        found = choose(question(calls=calls))
        assert (found.candidate, found.conclusive, found.tries) == ("first", False, 1)
        assert found.reason == "the default for this CPU: other processes disturbed the trial"
        assert choose(question(calls=calls)) is found
        tuning.forget()  # as in another process
        now[0] += tuning_trial.FIRST_PAUSE - 1
        assert choose(question(calls=calls)) == found
        assert len(calls) == 1
        tuning.forget()
        now[0] += 1
        assert choose(question(calls=calls)).tries == 2
        assert "; default first; inconclusive after 2 tries)" in tuning.describe(tuning.report()[0])
    tuning.forget()
    now[0] += 2 * tuning_trial.FIRST_PAUSE
    found = choose(question(calls=calls))
    assert (found.candidate, found.conclusive, found.tries) == ("second", True, 3)
    assert written(folder)["how"]["conclusive"]
    tuning.forget()
    now[0] += 1e6
    assert choose(question(calls=calls)) == found
    assert len(calls) == 3


def test_inconclusive_trials_become_rare(folder, now, monkeypatch):
    """A process starts every half minute, for four days, on a machine that is always busy."""
    monkeypatch.setattr(Interruptions, "since_mark", lambda self: True)
    begin, tried, days = now[0], [], []
    for _ in range(4):
        for _ in range(24 * 60 * 2):
            now[0] += 30
            tuning.forget()
            choose(question(calls=tried))
        days.append(len(tried) - sum(days))
    assert days == [11, 1, 1, 1]
    now[0] = begin  # the clock was set back
    tuning.forget()
    assert choose(question(calls=tried)).tries == len(tried) == 15


def test_a_new_wrapper_asks_again_and_an_old_one_keeps_its_answer(folder, now, monkeypatch):
    calls, old, new = [], {}, {}
    with monkeypatch.context() as busy:
        busy.setattr(Interruptions, "since_mark", lambda self: True)
        choose(question(calls=calls), old)
    now[0] += tuning_trial.FIRST_PAUSE
    assert choose(question(calls=calls), old).candidate == "first"
    assert choose(question(calls=calls)).candidate == "first"  # a function that keeps nothing
    assert len(calls) == 1
    assert choose(question(calls=calls), new).candidate == "second"
    assert choose(question(calls=calls), old).candidate == "first"
    assert choose(question(calls=calls)).candidate == "second"
    assert (old, new, len(calls)) == ({"how": "first"}, {"how": "second"}, 2)


def test_a_conclusive_answer_replaces_an_inconclusive_one_and_stays(folder):
    """In the second step, two processes made their first trial at the same time."""
    for way, conclusive, tries, kept in (
        ("first", False, 1, ("first", 1)),
        ("first", False, 1, ("first", 1)),
        ("first", False, 2, ("first", 2)),
        ("first", False, 1, ("first", 2)),
        ("second", True, 1, ("second", 1)),
        ("first", True, 4, ("second", 1)),
        ("first", False, 4, ("second", 1)),
    ):
        decision = Decision(way, "of another process", {}, "first", conclusive, tries, 0.0)
        found = tuning.save(tuning.machine(), question(), decision)
        assert (found.candidate, found.tries) == kept
    assert written(folder)["how"]["tries"] == 1
    assert choose(question(slow="second")).candidate == "second"


DISTURBED = "the default for this CPU: other processes disturbed the trial"


@pytest.mark.parametrize(
    ("entry", "way"),
    [
        ({"way": "first", "why": DISTURBED, "microseconds": {"first": 9.0, "second": 9.5}}, "second"),
        ({"way": "first", "why": "the fastest in a trial", "microseconds": {"first": 9.0}}, "second"),
        ({"way": "first", "why": "the fastest", "microseconds": {"first": 9.0, "second": 9.5}}, "first"),
        ({"way": "first"}, "first"),
        ({"way": "first", "why": None, "conclusive": 0, "tries": "x", "tried_at": []}, "first"),
        ({"way": "first", "why": "", "conclusive": False, "tries": -1, "tried_at": float("nan")}, "second"),
        ({"way": "first", "why": "", "conclusive": False, "tries": 10**9, "tried_at": 0}, "second"),
    ],
)
def test_files_of_earlier_releases_and_damaged_entries(folder, entry, way):
    """If the entry makes another trial necessary, the trial finds `second`, the faster way."""
    folder.mkdir()
    (folder / tuning.CACHE_FILE).write_text(json.dumps({tuning.machine(): {"how": entry}}))
    found = choose(question())
    assert (found.candidate, found.conclusive) == (way, True)


def test_a_trial_has_no_side_effects(folder):
    """Modes, the random generator and autograd do not see it."""
    seen = []

    def trial():
        def run():
            x = torch.ones(3, 3, device="cpu", requires_grad=True)
            product = x @ x
            seen.append((product.dtype, product.requires_grad, product.is_inference()))
            CLOCK.pass_by(1e-3)

        return {"first": run, "second": run}

    asked = Choice("how", ("first", "second"), "first", trial)
    state = torch.get_rng_state()
    with Operators() as called, torch.device("meta"), torch.autocast("cpu", BF16), torch.inference_mode():
        choose(asked)
    assert set(seen) == {(torch.float32, False, False)}
    assert called.names == []
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "run", [lambda asks, x: torch.func.vmap(asks)(x), lambda asks, x: torch.jit.trace(asks, x)(x)]
)
def test_no_trial_runs_in_a_transform_or_a_trace(folder, run):
    """They would see its operators. The default is used, and not kept as the answer."""
    why = set()

    def asks(x):
        why.add(choose(question_of_tensors()).reason)
        return x + 1

    assert torch.equal(run(asks, torch.ones(2)), torch.full((2,), 2.0))
    assert "the default for this CPU: no trial can run here" in why
    choose(question())
    assert "how" in written(folder)


def test_a_question_within_a_trial_gets_the_default(folder):
    inner = []
    asked = question(name="inner")

    def trial():
        inner.append(choose(asked).reason)
        return asked.trial()

    choose(Choice("outer", asked.candidates, "first", trial))
    assert inner == ["the default for this CPU: no trial can run here"]
    assert set(written(folder)) == {"outer"}


# In a wrapper


def made(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(96, 200), torch.nn.Tanh(), torch.nn.Linear(200, 96)).to(BF16)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, AccumulatingOptimizer(inner, 2, model=model, master_weights=True)


def train(model, optimizer, batches):
    """Return the weights, and their float32 masters, which differ where a cast may hide a different sum."""
    for batch in batches:
        model(batch).float().square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
    masters = [state[MASTER] for state in optimizer.state_dict()["state"].values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *masters)]


def batches(tokens, count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, 96, generator=generator).to(BF16) for _ in range(count)]


def same(ours, others):
    return all(map(torch.equal, ours, others))


@native
def test_a_wrapper_keeps_its_way_and_so_its_bits():
    ends = {}
    for way in ("whole", "rank_k"):
        with answer(MANY, way):
            model, optimizer = made()
            train(model, optimizer, batches(150)[:3])
        with answer(MANY, "rank_k" if way == "whole" else "whole"):
            ends[way] = train(model, optimizer, batches(150)[3:])
            assert optimizer._accumulators.choices == {MANY: way}
        with answer(MANY, way):
            model, optimizer = made()
            assert same(ends[way], train(model, optimizer, batches(150)))
    assert not same(ends["whole"], ends["rank_k"])


@native
def test_every_class_of_tokens_has_its_own_question_and_explanation():
    with answer(SMALL, "whole", MANY, "rank_k"):
        model, optimizer = made()
        train(model, optimizer, [*batches(8), *batches(150)])
        assert optimizer._accumulators.choices == {SMALL: "whole", MANY: "rank_k"}
        said = optimizer.explain()
    assert "with 1 to 16 tokens whole: says the test" in said
    assert "with over 100 tokens rank_k: says the test" in said
    _, fresh = made()
    assert "a trial will decide how" in fresh.explain()
