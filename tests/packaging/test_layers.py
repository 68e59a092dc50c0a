"""Which part of the package may import which."""

import ast
import functools
import graphlib
import re
import subprocess
from pathlib import Path

import fusedacc

PACKAGE = Path(fusedacc.__file__).parent
ROOT = PACKAGE.parent
#: From the lowest layer to the highest. A part imports only itself and parts of lower layers.
LAYERS = (
    {"kernels"},
    {"auditing", "functional", "traffic"},
    {"accumulators"},
    {"autograd", "distributed"},
    {"nn"},
    {"optimizer"},
    {"amp", "planner"},
    {"commands"},
    {"integrations", "__init__"},
    {"__main__"},
)


@functools.cache
def files(*folders: str) -> list[Path]:
    """Return the source files that a commit would contain."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [ROOT / name for name in listed if Path(name).suffix in (".py", ".cpp", ".h", ".cu")]
    return [path for path in found if path.exists()]


def part_of(module: str) -> str:
    """Return the part of `fusedacc.part.file`. The package itself is `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(path: Path) -> str:
    """Return the name of a file's module. A package is its `__init__.py`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    known = {module_of(each) for each in files("fusedacc")}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            target = ".".join(filter(None, (base, node.module)))
            names = {f"{target}.{alias.name}" for alias in node.names}
            found |= (names & known) or {target}
    return frozenset(name for name in found if name.split(".")[0] == "fusedacc")


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle, or an empty list."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_every_part_has_a_layer_and_there_are_at_most_thirteen():
    parts = {part_of(module_of(path)) for path in files("fusedacc")}
    assert parts == set.union(*LAYERS)
    assert len(parts - {"__init__", "__main__"}) <= 13


def test_the_drawing_has_these_layers():
    drawn = re.findall(r"^ +(\d+)  ([\w, ]+?)  ", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    assert {int(floor): set(parts.split(", ")) for floor, parts in drawn} == dict(enumerate(LAYERS, 1))


def test_parts_import_only_lower_layers():
    layer_of = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    wrong = []
    for path in files("fusedacc"):
        part = part_of(module_of(path))
        for module in imports(path):
            other = part_of(module)
            if other != part and layer_of[other] >= layer_of[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_there_is_no_import_cycle():
    """Imports inside functions, under TYPE_CHECKING and of a package's `__init__` count."""
    assert set(cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}
    assert cycle_in({module_of(path): set(imports(path)) for path in files("fusedacc")}) == []
