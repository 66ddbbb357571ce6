"""Writes the signatures of the public names into the reference of Python, each with the first
paragraph of its docstring, from the source: nothing is imported.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import highwater

PAGE = Path(__file__).with_name("reference") / "python.md"
SOURCE = Path(__file__).parents[1] / "src"
_FROM_HERE = "## All signatures\n"
"""Above it the page is written by hand."""
_WIDTH = 100


def python_page() -> str:
    """The page, with the signatures as they are now."""
    by_hand, heading, _ = PAGE.read_text(encoding="utf-8").partition(_FROM_HERE)
    return by_hand + heading + "\n".join(_signatures()) + "\n"


def _signatures() -> Iterator[str]:
    for name, module in sorted(highwater._PUBLIC.items(), key=lambda each: each[0].lower()):
        path = SOURCE / f"{module.replace('.', '/')}.py"
        body = ast.parse(path.read_text(encoding="utf-8")).body
        named = (each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef))
        node = next(each for each in named if each.name == name)
        first, *_ = (ast.get_docstring(node) or "").split("\n\n")
        said = " ".join(first.split()).replace("``", "`")
        lines = _signature(node) if isinstance(node, ast.FunctionDef) else _class(node)
        yield from ("", f"### `{name}`", "", "```py", *lines, "```", "", said)


def _signature(node: ast.FunctionDef, name: str = "") -> Iterator[str]:
    """How a function is called, or ``name``, whose own first parameter is left out."""
    parameters, returned = _parameters(node)[bool(name) :], node.returns
    after = "" if returned is None or name[:1].isupper() else f" -> {ast.unparse(returned)}"
    yield from _called(name or node.name, parameters, after)


def _class(node: ast.ClassDef) -> Iterator[str]:
    """How a class is called, and then its methods."""
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    init = methods.pop("__init__", None)
    yield from _called(node.name, _fields(node)) if init is None else _signature(init, node.name)
    for name, each in methods.items():
        if not name.startswith("_"):
            is_read = any(ast.unparse(one) == "property" for one in each.decorator_list)
            lines = _signature(each, f".{name}")
            yield from (line.replace("()", "", 1) if is_read else line for line in lines)


def _called(name: str, parameters: Sequence[str], after: str = "") -> Iterator[str]:
    """A call, one parameter a line where it is long."""
    line = f"{name}({', '.join(parameters)})".replace("'", '"') + after.replace("'", "")
    if len(line) <= _WIDTH:
        yield line
        return
    yield f"{name}("
    yield from (f"    {each},".replace("'", '"') for each in parameters)
    yield f"){after}"


def _parameters(node: ast.FunctionDef) -> list[str]:
    own = node.args
    positional = [*own.posonlyargs, *own.args]
    defaults = [None] * (len(positional) - len(own.defaults)) + own.defaults
    said = [_parameter(*each) for each in zip(positional, defaults, strict=True)]
    if own.vararg or own.kwonlyargs:
        said.append(f"*{ast.unparse(own.vararg) if own.vararg else ''}")
    said += [_parameter(*each) for each in zip(own.kwonlyargs, own.kw_defaults, strict=True)]
    return [*said, *([f"**{ast.unparse(own.kwarg)}"] if own.kwarg else [])]


def _parameter(named: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(named)
    between = " = " if named.annotation else "="
    return f"{ast.unparse(named)}{between}{ast.unparse(default)}"


def _fields(node: ast.ClassDef) -> list[str]:
    """The fields of a record, which are its keywords."""
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return ["*", *map(ast.unparse, fields)]
