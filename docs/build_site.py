"""Hook of mkdocs.yml: adds pages from outside of docs/ and the version to each page, and checks that the API
reference is complete.

Pages link to files of the repository by relative paths, so that the links also work in the repository itself.
`on_page_markdown` changes the links to files outside of docs/ into links to the pages made from them, or
into plain text if there is no such page. A link to a file that does not exist fails the build.
"""

from __future__ import annotations

import ast
import posixpath
import re
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Files outside of docs/ that are pages of the site, by the page's path.
PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "benchmark-method.md": "benchmarks/README.md",
    "benchmark-notes.md": "benchmarks/NOTES.md",
    "emulation.md": "tests/emulation/README.md",
}
#: A link: its text, which may hold brackets, and its target.
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
#: The pages that are generated: the examples' sources, and the API reference of the adapters.
EXAMPLES, ADAPTERS = "examples.md", "api/integrations.md"
#: Modules whose `__all__` is public; so is every module of fusedacc.integrations that has an `__all__`.
MODULES = (
    "fusedacc",
    "fusedacc.amp",
    "fusedacc.functional",
    "fusedacc.nn.functional",
    "fusedacc.planner",
    "fusedacc.traffic",
)


def examples(root: Path = ROOT) -> str:
    """The page of all example scripts."""
    parts = ["# Examples\n\nEach script trains a small model and needs no download. Run it from the root."]
    for path in sorted((root / "examples").glob("*.py")):
        parts.append(f"## {path.name}\n\n```python\n{path.read_text()}```")
    return "\n\n".join(parts) + "\n"


def adapter_modules(root: Path = ROOT) -> list[str]:
    """The public modules of fusedacc.integrations: those that have an `__all__`."""
    files = sorted((root / "fusedacc" / "integrations").glob("*.py"))
    return [f"fusedacc.integrations.{path.stem}" for path in files if "__all__ =" in path.read_text()]


def adapters_page(root: Path = ROOT) -> str:
    """The page of the API reference with all adapters."""
    head = "# Frameworks\n\nThe [guide to frameworks](../integrations.md) says which of these to use."
    return "\n\n".join([head, *(f"::: {name}" for name in adapter_modules(root))]) + "\n"


def targets(root: Path = ROOT) -> dict[Path, str]:
    """The page for each file outside of docs/ that has one."""
    found = {root / name: page for page, name in PAGES.items()}
    found[root / "README.md"] = "README.md"
    found[root / "examples"] = EXAMPLES
    for path in (root / "examples").glob("*.py"):
        found[path] = f"{EXAMPLES}#{path.name.replace('.', '').lower()}"
    return found


def rewritten(markdown: str, page: str, root: Path = ROOT) -> str:
    """`markdown` with its relative links as the site's page `page` needs them."""
    source = root / PAGES[page] if page in PAGES else root / "docs" / page
    pages = targets(root)

    def link(match: re.Match[str]) -> str:
        text, (name, hash_sign, anchor) = match[1], match[2].partition("#")
        if not name or "://" in name:
            return match[0]
        path = (source.parent / name).resolve()
        if path in pages:
            target = pages[path]
        elif path.is_relative_to(root / "docs"):
            target = path.relative_to(root / "docs").as_posix()
        elif path.exists():
            return text
        else:
            return match[0]
        target = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"[{text}]({target}{hash_sign}{anchor})"

    # Code blocks are left alone.
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(p if p.startswith("```") else re.sub(LINK, link, p) for p in parts)


class Sources:
    """Finds public names and their docstrings in the sources of a package, which need not be importable."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root

    def _tree(self, module: str) -> tuple[ast.Module, bool]:
        """The module's syntax tree, and whether it is a package."""
        path = self.root.joinpath(*module.split("."))
        package = path.is_dir()
        file = path / "__init__.py" if package else path.with_suffix(".py")
        return ast.parse(file.read_text()), package

    def _statements(self, module: str) -> list[ast.stmt]:
        """The module's statements, with those under `if TYPE_CHECKING:`."""
        found: list[ast.stmt] = []
        for node in self._tree(module)[0].body:
            is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            found += node.body if is_for_types else [node]
        return found

    def _is_module(self, name: str) -> bool:
        path = self.root.joinpath(*name.split("."))
        return path.is_dir() or path.with_suffix(".py").exists()

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The full name of the module that `node` imports from."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        keep = len(parts) - node.level + self._tree(module)[1]
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def exported(self, module: str) -> list[str]:
        """The names in the module's `__all__`."""
        for node in self._tree(module)[0].body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
        raise ValueError(f"{module} has no __all__")

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """The module and the statement that define `module.name`; None for a submodule."""
        for node in self._statements(module):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign):
                to = node.targets if isinstance(node, ast.Assign) else [node.target]
                if name in map(ast.unparse, to):
                    return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        origin = self._absolute(module, node)
                        if not origin.startswith("fusedacc") or self._is_module(f"{origin}.{alias.name}"):
                            return None
                        return self.find(origin, alias.name)
        return None

    def methods(self, module: str, node: ast.ClassDef) -> dict[str, bool]:
        """Public methods and properties, also inherited from the package: whether each has a docstring."""
        found: dict[str, bool] = {}
        for base in node.bases:
            origin = self.find(module, ast.unparse(base))
            if origin is not None and isinstance(origin[1], ast.ClassDef):
                found |= self.methods(origin[0], origin[1])
        for each in node.body:
            if not isinstance(each, ast.FunctionDef) or each.name.startswith("_"):
                continue
            if any(ast.unparse(decorator).endswith(".setter") for decorator in each.decorator_list):
                continue
            found[each.name] = found.get(each.name, False) or bool(ast.get_docstring(each))
        return found

    def public(self) -> dict[str, bool]:
        """Every public name of the package: whether it has a docstring. Constants need none."""
        found: dict[str, bool] = {}
        adapters = adapter_modules(self.root)
        for module in (*MODULES, *adapters):
            found[module] = bool(ast.get_docstring(self._tree(module)[0]))
            for name in self.exported(module):
                origin = self.find(module, name)
                if origin is None:
                    continue
                where, node = origin
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    found[f"{module}.{name}"] = bool(ast.get_docstring(node))
                else:
                    found[f"{module}.{name}"] = True
                # Frameworks call most methods of the adapters' classes, users do not.
                if isinstance(node, ast.ClassDef) and module not in adapters:
                    for method, has in self.methods(where, node).items():
                        found[f"{module}.{name}.{method}"] = has
        return found


def inventory(data: bytes) -> set[str]:
    """The names in a Sphinx inventory (`objects.inv`)."""
    header = data.split(b"\n", 4)
    return {line.split(" ", 1)[0] for line in zlib.decompress(header[4]).decode().splitlines()}


def problems(documented: set[str], root: Path = ROOT) -> list[str]:
    """What is missing in the API reference, a line for each public name."""
    found = []
    for name, has_docstring in Sources(root).public().items():
        if not has_docstring:
            found.append(f"{name} has no docstring")
        if name not in documented:
            found.append(f"{name} is not in the API reference: add it to a page in docs/api/")
    return found


def version(root: Path = ROOT) -> str:
    """The package's version."""
    found = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml has no line with the version")
    return found[1]


def on_config(config: Any) -> Any:
    """Put the version into the footer of each page."""
    config.copyright = f"fusedacc {version()}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages whose sources are outside of docs/, and those that are generated."""
    from mkdocs.structure.files import File

    for page, name in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    files.append(File.generated(config, EXAMPLES, content=examples()))
    files.append(File.generated(config, ADAPTERS, content=adapters_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change links to files outside of docs/ into links to their pages."""
    return rewritten(markdown, page.file.src_uri)


def on_post_build(config: Any) -> None:
    """Fail if a public name has no docstring or is missing in the API reference."""
    from mkdocs.exceptions import PluginError

    found = problems(inventory((Path(config.site_dir) / "objects.inv").read_bytes()))
    if found:
        raise PluginError("The API reference is incomplete:\n  " + "\n  ".join(found))
