"""Private names of PyTorch are in `fusedacc/kernels/torch_private.py`, each with the reason for it."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import fusedacc
from fusedacc.kernels.torch_private import ATTRIBUTES

PACKAGE = Path(fusedacc.__file__).parent
#: Files and folders that still use other private names.
UNFINISHED = ("optimizer/wrapper.py",)
#: Private attributes of other libraries' objects: Accelerate, Keras, Lightning, Transformers.
OF_OTHER_LIBRARIES = {
    "_can_stop_early",
    "_check_variables_are_known",
    "_experts_implementation",
    "_make_zero_grad_fn",
    "_num_ready_batches_reached",
    "_optimizers",
    "_set_sync_gradients",
    "_should_accumulate",
    "_trainable_variables",
}
#: Documented methods and attributes of named tuples.
OF_NAMED_TUPLES = {"_asdict", "_fields", "_replace"}
#: Attributes of frames and code objects. What they hold depends on how Python runs the code.
OF_FRAMES = {"__code__", "f_code", "f_globals", "f_locals"}
LISTED = {name for kind in ATTRIBUTES.values() for name in " ".join(kind).split() if name.startswith("_")}
READERS = {"getattr", "hasattr", "setattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax trees of the package's files."""
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))
    }


def defined_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, variables and attributes of `self` that a file defines."""
    for node in ast.walk(tree):
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif is_stored and isinstance(node, ast.Name):
            yield node.id
        elif is_stored and isinstance(node, ast.Attribute) and root_of(node) in ("self", "cls"):
            yield node.attr


@functools.cache
def own_names() -> frozenset[str]:
    return frozenset(name for tree in trees().values() for name in defined_in(tree))


def root_of(node: ast.expr) -> str:
    """Return the name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_allowed(name: str, of_torch: bool) -> bool:
    """Whether a file may read a private attribute of this name. of_torch: it is one of torch's for sure."""
    return name in LISTED or (not of_torch and name in own_names() | OF_OTHER_LIBRARIES | OF_NAMED_TUPLES)


def found_in(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node uses and that `torch_private` lacks."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if names_private_module(alias.name))
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from filter(names_private_module, names)
    elif isinstance(node, ast.Attribute):
        of_torch = root_of(node) == "torch"
        if node.attr in OF_FRAMES or (is_private(node.attr) and not is_allowed(node.attr, of_torch)):
            yield ast.unparse(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if names_private_module(node.value):
            yield repr(node.value)
    elif isinstance(node, ast.Call) and root_of(node.func) in READERS:
        names = [str(value.value) for value in node.args[1:2] if isinstance(value, ast.Constant)]
        yield from (name for name in names if is_private(name) and not is_allowed(name, of_torch=False))


def names_private_module(name: str) -> bool:
    """Whether it is the full name of something private in torch."""
    return re.fullmatch(r"torch(\.\w+)+", name) is not None and any(map(is_private, name.split(".")))


def test_a_private_name_is_found():
    source = "\n".join(
        (
            "from torch._C import x",
            "from torch.utils._pytree import tree_map",
            "import torch._dynamo",
            "torch.compiler._unheard_of",
            "getattr(value, '_unheard_of')",
            "sys.modules.get('torch._dynamo.config')",
            "sys._getframe(1)",
            "function.__code__",
        )
    )
    for line in source.splitlines():
        assert any(list(found_in(node)) for node in ast.walk(ast.parse(line))), line


def test_private_names_are_in_one_file():
    found = [
        f"{path}:{node.lineno}: {name}"
        for path, tree in trees().items()
        if path != "kernels/torch_private.py" and not path.startswith(UNFINISHED)
        for node in ast.walk(tree)
        for name in found_in(node)
    ]
    assert found == []


def test_every_listed_attribute_is_read():
    """A name that nothing reads any more has to go."""
    others = " ".join(
        ast.unparse(tree) for path, tree in trees().items() if path != "kernels/torch_private.py"
    )
    words = set(re.findall(r"\w+", others))
    assert sorted(LISTED - words) == []
