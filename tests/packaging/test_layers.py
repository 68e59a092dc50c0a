"""Which room of the package may import which."""

import ast
import functools
import graphlib
import subprocess
from pathlib import Path

import fusedacc

PACKAGE = Path(fusedacc.__file__).parent
ROOT = PACKAGE.parent
#: From the ground up; a room imports only rooms on lower floors, and itself.
FLOORS = (
    {"kernels"},
    {"functional", "traffic"},
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
    """Source files as they would be committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [ROOT / name for name in listed if Path(name).suffix in (".py", ".cpp", ".h", ".cu")]
    return [path for path in found if path.exists()]


def room_of(module: str) -> str:
    """The room of `fusedacc.room.file`; the package itself is `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(path: Path) -> str:
    """The name of the module that a file is; a package is its `__init__.py`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """The modules of ours that a file imports, anywhere in it."""
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
    """The modules of one cycle of imports; empty where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_every_room_has_a_floor_and_there_are_twelve_at_most():
    rooms = {room_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in files("fusedacc")}
    assert rooms == set.union(*FLOORS)
    assert len(rooms - {"__init__", "__main__"}) <= 12


def test_rooms_import_lower_floors_only():
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    wrong = []
    for path in files("fusedacc"):
        room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for module in imports(path):
            other = room_of(module)
            if other != room and floor_of[other] >= floor_of[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_a_cycle_is_found():
    assert set(cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_no_file_imports_itself_by_way_of_others():
    """Imports inside functions, under TYPE_CHECKING and of a package's `__init__` count."""
    assert cycle_in({module_of(path): set(imports(path)) for path in files("fusedacc")}) == []
