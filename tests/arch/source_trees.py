"""The files of src, each read and parsed once for all tests of a process."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "highwater"


@cache
def trees() -> dict[Path, ast.Module]:
    """Each file below ``src/highwater`` as it is parsed."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Everything in each file, wherever it stands."""
    return {path: list(ast.walk(tree)) for path, tree in trees().items()}
