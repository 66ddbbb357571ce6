"""Imported files: the files of the package that a process imports which runs one of its modules.

The imports are read, not run: nothing heavy is loaded to know them. What a file only loads by a
name in a string is not among them.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from highwater.nouns.codec import digest

_ONLY_TYPES = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_digest(module: str, package: Path) -> str:
    """Name the code that running ``module`` imports: 16 digits, others once one of
    ``imported_files`` changes.
    """
    return digest(
        [
            (str(path.relative_to(package)), path.read_text(encoding="utf-8"))
            for path in imported_files(module, package)
        ]
    )


def imported_files(module: str, package: Path) -> tuple[Path, ...]:
    """Files of the package in this folder that running ``module`` may import, sorted: its own, and
    what those import, wherever in a file it says so, with the ``__init__`` of every folder between.

    An import under ``if TYPE_CHECKING`` never runs, and is not followed.
    """
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file(name, package)
        if name in found or path is None:
            continue
        found[name] = path
        waiting += _with_folders(name)
        for node in _nodes_that_run(ast.parse(path.read_bytes())):
            waiting += _imported_names(node, of=module.partition(".")[0])
    return tuple(sorted(found.values()))


def _file(name: str, package: Path) -> Path | None:
    """The file of a module; None for a name that is no module, as a function's."""
    *folders, last = (package.name, *name.split(".")[1:])
    base = package.parent.joinpath(*folders, last)
    for path in (base / "__init__.py", base.with_name(f"{last}.py")):
        if path.is_file():
            return path
    return None


def _nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below ``tree``, without the branches that only a type checker reads."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) in _ONLY_TYPES:
            for other in child.orelse:
                yield other
                yield from _nodes_that_run(other)
        else:
            yield child
            yield from _nodes_that_run(child)


def _imported_names(node: ast.AST, *, of: str) -> Iterator[str]:
    """Modules of the package ``of`` that a statement imports, and what may be ones: ``from a import
    b`` imports ``a``, and ``a.b`` where that is a module.
    """
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module is not None:  # all are absolute here
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    else:
        return
    yield from (name for name in names if name.partition(".")[0] == of)


def _with_folders(name: str) -> Iterator[str]:
    """The packages that a module lies in, which are imported before it."""
    while name := name.rpartition(".")[0]:
        yield name
