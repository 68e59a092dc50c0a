"""`python -m fusedacc info`, with and without the native library, and with errors."""

import json
import re
import shutil
from pathlib import Path
from unittest import mock

import forked
import pytest
import torch

import fusedacc
from fusedacc import __main__
from fusedacc.commands import info
from fusedacc.kernels import dtypes, library, native_module, registry

PACKAGE, ROOT = Path(fusedacc.__file__).parent, Path(__file__).parents[2]


@pytest.fixture
def one_pair(monkeypatch):
    """Try one dtype pair, because Triton's interpreter is slow."""
    monkeypatch.setattr(dtypes, "PAIRS", frozenset([(torch.float32, torch.float32)]))


def by_name(facts, name):
    return next(row for row in facts["devices"][0]["backends"] if row["backend"] == name)


def run_copy(tmp_path, *arguments, in_its_place=None):
    """Run `python -m fusedacc` of a copy of the package without the library or with other bytes for it."""
    skip = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "fusedacc", ignore=skip)
    if in_its_place is not None:
        (tmp_path / "fusedacc" / library.LIBRARY.name).write_bytes(in_its_place)
    program = "import runpy; runpy.run_module('fusedacc', run_name='__main__', alter_sys=True)"
    return forked.run(program, *arguments, root=tmp_path, folder=tmp_path, TRITON_INTERPRET=None)


def joined(text):
    """Return a text without its line breaks."""
    return " ".join(text.split())


def test_info_names_versions_engine_and_backends(capsys):
    assert __main__.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"torch {torch.__version__}" in text
    assert "native library: " in text
    assert "engine: " in text
    assert "self-test: off (FUSEDACC_SELFTEST=0)" in text
    for name in registry.NAMES:
        reason = registry.obstacle(name, torch.device("cpu"), torch.float32, torch.float32)
        expected = f"unavailable: {reason}" if reason else "works on cpu"
        assert f" {name} {expected}" in joined(text)


def test_the_summary_is_one_page_and_shows_every_problem():
    facts = info.collect()
    works = {"runs": True, "pairs": ["float32 into float32"], "failures": {}, "why_not": None}
    fails = {**works, "runs": False, "failures": {"float32 into float32": "OSError: " + "/long/path" * 99}}
    for index in range(16):
        missing = {**works, "runs": False, "pairs": [], "why_not": f"{index}: {'x' * 3000} remedy {index}"}
        rows = [{"backend": "cuda", **missing}, {"backend": "triton", **(fails if index % 2 else works)}]
        auto = {"backend": None, "reason": "y" * 3000} if index else {"backend": "triton", "reason": ""}
        facts["devices"].append({"device": f"cuda:{index}", "name": "GPU", "auto": auto, "backends": rows})
    by_name(facts, "eager").update(fails)
    lines = info.summary(facts).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110
    text = joined("\n".join(lines))
    assert "cuda unavailable: 15: xxx" in text
    assert "remedy 15 (and 16 more, see --json) triton FAILS on cuda:1, cuda:3, " in text
    assert "eager FAILS on cpu: float32 into float32: OSError: " in text
    assert "cuda:0-15 (GPU)" in text
    assert "triton on cuda:0, none (yyy" in text


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (registry.VARIABLE, "gpu", "none (FUSEDACC_BACKEND='gpu' is no backend; allowed: "),
    ],
)
def test_a_wrong_variable_is_shown_and_fails(monkeypatch, capsys, name, value, said):
    monkeypatch.setenv(name, value)
    assert __main__.main(["info"]) == 1
    assert said in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        fusedacc.AccumulatingOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))


@pytest.mark.parametrize(
    ("raised", "said"), [(None, "elements are wrong"), (OSError("no device"), "OSError: no device")]
)
def test_wrong_sums_and_exceptions_are_reported_and_fail(monkeypatch, raised, said):
    monkeypatch.setattr(registry.get("eager"), "accumulate_", mock.Mock(side_effect=raised))
    facts = info.collect()
    failures = by_name(facts, "eager")["failures"]
    assert len(failures) == 8
    assert all(said in problem for problem in failures.values())
    assert not info.healthy(facts)
    assert "eager   FAILS" in info.summary(facts)


@pytest.mark.skipif(native_module.module() is None, reason=f"{native_module.why_not()}")
def test_info_names_the_engine_and_the_reason(monkeypatch, capsys, one_pair):
    assert __main__.main(["info"]) == 0
    assert f"engine: native (built for torch {torch.__version__}, Python " in capsys.readouterr().out
    monkeypatch.setenv("FUSEDACC_ENGINE", "0")
    assert __main__.main(["info"]) == 0
    assert "engine: none (FUSEDACC_ENGINE=0)" in capsys.readouterr().out
    monkeypatch.setenv("FUSEDACC_ENGINE", "yes")
    assert __main__.main(["info"]) == 1
    assert "engine: none (FUSEDACC_ENGINE='yes': allowed are '0' " in capsys.readouterr().out


def test_without_the_native_library_info_names_the_fallbacks(tmp_path):
    done = run_copy(tmp_path, "info")
    assert done.returncode == 0, done.stderr
    assert "native library: not loaded: " in done.stdout
    assert "engine: none (" in done.stdout
    assert 'backend="auto": eager on cpu' in done.stdout
    assert "Warning" not in done.stderr
    assert "cpu     unavailable: the native library is not loaded" in done.stdout
    assert "eager   works on cpu" in done.stdout


def test_a_library_that_does_not_load_is_reported_once(tmp_path):
    done = run_copy(tmp_path, "info", "--json", in_its_place=b"no library")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert not facts["library"]["loaded"]
    assert "does not load" in facts["library"]["why_not"]
    assert facts["devices"][0]["auto"]["backend"] == "eager"
    # One warning, with the cause and the cure.
    assert done.stderr.count("UserWarning") == 1
    assert "build it again" in done.stderr


def test_version_is_that_of_pyproject(capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--version"])
    assert ended.value.code == 0
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert capsys.readouterr().out == f"fusedacc {version[1]}\n"
