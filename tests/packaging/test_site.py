"""docs/build_site.py: links, and the check of the API reference."""

import runpy
import textwrap
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fusedacc

SITE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "build_site.py"))

#: A package with a public function, a public class that inherits a method, and its submodules.
PACKAGE = {
    "__init__.py": '''
        """The package."""
        from . import amp
        from .part import Thing, act
        __all__ = ["Thing", "act", "amp"]
    ''',
    "part.py": '''
        class Base:
            def inherited(self):
                """Do it."""

        class Thing(Base):
            """A thing."""

            @property
            def size(self):
                """Its size."""

            @size.setter
            def size(self, value): ...

            def _private(self): ...

        def act():
            """Act."""
    ''',
}
SUBMODULES = ("amp", "functional", "nn/functional", "planner", "traffic", "integrations/lightning")
PUBLIC = {f"fusedacc{name}" for name in ("", ".Thing", ".Thing.size", ".Thing.inherited", ".act")}
PUBLIC |= {f"fusedacc.{name.replace('/', '.')}" for name in SUBMODULES}


def problems(tmp_path: Path, documented: set[str], without: str = "") -> list[str]:
    """Return the check's findings for the package above, without the docstring `without`."""
    sources = PACKAGE | {f"{name}.py": '"""A module."""\n__all__ = []\n' for name in SUBMODULES}
    for name, text in sources.items():
        path = tmp_path / "fusedacc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text.replace(f'"""{without}"""', "...") if without else text))
    lines = "".join(f"{name} py:function 1 api.html#$ -\n" for name in documented).encode()
    inventory = b"# 1\n# 2\n# 3\n# 4\n" + zlib.compress(lines)
    return SITE["problems"](SITE["inventory"](inventory), tmp_path)


def test_a_complete_reference_passes(tmp_path):
    assert problems(tmp_path, PUBLIC) == []


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_that_is_not_in_the_reference_fails(tmp_path, name):
    (problem,) = problems(tmp_path, PUBLIC - {name})
    assert problem.startswith(f"{name} is not in the API reference")


@pytest.mark.parametrize(
    ("docstring", "name"),
    [
        ("The package.", ""),
        ("A thing.", ".Thing"),
        ("Its size.", ".Thing.size"),
        ("Do it.", ".Thing.inherited"),
        ("Act.", ".act"),
    ],
)
def test_a_public_name_without_a_docstring_fails(tmp_path, docstring, name):
    assert problems(tmp_path, PUBLIC, without=docstring) == [f"fusedacc{name} has no docstring"]


def test_every_method_of_the_wrapper_is_checked():
    public = SITE["Sources"]().public()
    assert {"fusedacc.functional.total_norm", "fusedacc.planner.Plan", "fusedacc.planner.KINDS"} <= set(
        public
    )
    wrapper = fusedacc.AccumulatingOptimizer
    own = {
        name for name in dir(wrapper) if not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
    }
    assert own
    assert {f"fusedacc.AccumulatingOptimizer.{name}" for name in own} <= set(public)


@pytest.mark.parametrize(
    ("link", "page", "expected"),
    [
        ("docs/loops.md#a", "changelog.md", "loops.md#a"),
        ("../CONTRIBUTING.md", "loops.md", "contributing.md"),
        ("../../examples/scheduler.py", "integrations/pytorch.md", "../examples.md#schedulerpy"),
        ("../benchmarks/README.md#method", "figures.md", "benchmark-method.md#method"),
        ("https://example.org/docs/a.md", "loops.md", "https://example.org/docs/a.md"),
        ("../nothing.py", "loops.md", "../nothing.py"),
    ],
)
def test_links_lead_to_the_pages_of_the_site(link, page, expected):
    text = "Read [`weight[e]`]({}).\n```\n[code](../CONTRIBUTING.md)\n```\n"
    assert SITE["rewritten"](text.format(link), page) == text.format(expected)


def test_links_to_files_without_a_page_become_text():
    assert SITE["rewritten"]("See [setup.py](../setup.py) there.", "loops.md") == "See setup.py there."


def test_the_footer_of_each_page_has_the_version(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "fusedacc"\nversion = "9.8.7"\n')
    assert SITE["version"](tmp_path) == "9.8.7"
    config = SITE["on_config"](SimpleNamespace(copyright=None))
    assert config.copyright == f"fusedacc {fusedacc.__version__}"
