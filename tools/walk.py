"""How large highwater is, and how far one walks through it to follow a command.

``python tools/walk.py`` measures the tree that it stands in and prints a table; ``--json`` prints
one document, and ``--tree`` names another checkout. Three commands are run, each in fresh
processes whose caches are empty: ``predict``, ``find`` of one cell on the CPU, ``train``
of two steps. What their own processes start counts along: a ``sitecustomize`` in a temporary
folder of this program watches every Python process below.

A function counts once, however often it is entered, and so does a lambda. Comprehensions that
this Python makes frames of stand beside them; both are frames of ours, of which a depth is made.
"""

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
SMALL_LINES = 80
"""A file below it is usually a part of another."""
STARTS = {
    *("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_output"),
    *("os.fork", "os.forkpty", "os.posix_spawn", "os.posix_spawnp", "os.system", "os.popen"),
    *("subprocess.check_call", "multiprocessing.Process", "multiprocessing.Pool"),
    "multiprocessing.get_context",
}
"""Calls that start a process, or make what does."""
TINY = "examples/tiny --device cpu --gpus 1 --memory 1536MiB --loss full"
COMMANDS = (
    "predict Qwen3-8B --gpus 4xA100-80GB",
    f"find {TINY} --start-length 256 --resolution 256 --max-length 512",
    f"train {TINY} --length 256 --steps 2",
)
WATCH = """
import builtins, os, sys, threading

package = os.environ["WALK_PACKAGE"] + os.sep
record = os.open(f"{os.environ['WALK_FOLDER']}/{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)
kinds, here, deepest = {}, threading.local(), 0

def kind_of(code):
    if not code.co_filename.startswith(package):
        return ""
    if not code.co_flags & 1:  # CO_OPTIMIZED, which bodies of modules and of classes are not
        return "module" if code.co_name == "<module>" else ""
    return "comprehension" if code.co_name.endswith(("comp>", "genexpr>")) else "function"

def watch(frame, event, _):
    global deepest
    code = frame.f_code
    kind = kinds.get(code)
    if kind is None:
        kind = kinds[code] = kind_of(code)
        if kind:  # written at once: some processes are killed
            line = f"{kind}\\t{code.co_filename}\\t{code.co_firstlineno}\\t{code.co_qualname}\\n"
            os.write(record, line.encode())
    if not kind or kind == "module":
        return None
    here.depth = getattr(here, "depth", 0) + 1
    if here.depth > deepest:
        deepest = here.depth
        os.write(record, f"depth\\t{deepest}\\n".encode())
    frame.f_trace_lines = False
    return left

def left(frame, event, _):
    if event == "return":
        here.depth -= 1
    return left

def imported(name, globals=None, locals=None, fromlist=(), level=0):
    if level or name.partition(".")[0] == "highwater" or sys.gettrace() is not watch:
        return usual(name, globals, locals, fromlist, level)
    sys.settrace(None)  # others' modules run nothing of ours as they are imported
    try:
        return usual(name, globals, locals, fromlist, level)
    finally:
        sys.settrace(watch)

usual, builtins.__import__ = builtins.__import__, imported
threading.settrace(watch)
sys.settrace(watch)
"""
"""What each process runs first: it records each frame of ours when it first sees it."""


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    named = parser.parse_args()
    tree = named.tree.resolve()
    found = {"sizes": sizes(tree)}
    found |= {f"highwater {words}": walked(tree, words) for words in COMMANDS}
    if named.json:
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tree, text=True).strip()
        how = {"command": "python tools/walk.py --json", "commit": head}
        print(json.dumps(how | {"python": platform.python_version()} | found, indent=1))
        return 0
    for title, counts in found.items():
        print(title)
        for name, count in counts.items():
            print(f"  {name.replace('_', ' '):32} {count:>9,}")
    return 0


def sizes(tree: Path) -> dict[str, int]:
    """What is counted without running anything."""
    lines = {
        path: path.read_text(encoding="utf-8").count("\n")
        for path in sorted((tree / "src").rglob("*.py"))
    }
    modules = [ast.parse(path.read_text(encoding="utf-8")) for path in lines]
    inside = [list(ast.walk(module)) for module in modules]
    return {
        "src_lines": sum(lines.values()),
        "src_files": len(lines),
        "src_small_files": sum(
            count < SMALL_LINES for path, count in lines.items() if path.name != "__init__.py"
        ),
        "process_starts": sum(starts_processes(nodes) for nodes in inside),
        "functions": sum(isinstance(node, FUNCTION) for nodes in inside for node in nodes),
        "one_caller_functions": len(one_caller(modules, chain.from_iterable(inside))),
        "tests_lines": sum(
            path.read_text(encoding="utf-8").count("\n") for path in (tree / "tests").rglob("*.py")
        ),
        "decision_records": len(list((tree / "docs/decisions").glob("[0-9]*.md"))),
        "changelog_bytes": (tree / "CHANGELOG.md").stat().st_size,
    }


def one_caller(modules: list[ast.Module], nodes: Iterable[ast.AST]) -> list[str]:
    """Functions of a module whose name stands once among all nodes of src, but where it is defined
    and imported.
    """
    names = Counter(
        node.name for module in modules for node in module.body if isinstance(node, FUNCTION)
    )
    uses = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return [name for name, count in names.items() if count == 1 and uses[name] == 1]


def starts_processes(nodes: list[ast.AST]) -> int:
    """Calls in a module that start a process, by whatever name it imported them."""
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    called = (ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call))
    return sum(imported.get(name, name) in STARTS for name in called)


def walked(tree: Path, words: str) -> dict[str, int]:
    """Files, functions, depth and modules of one command and the processes that it starts."""
    with tempfile.TemporaryDirectory() as folder:
        hook, record = Path(folder, "hook"), Path(folder, "record")
        hook.mkdir()
        record.mkdir()
        (hook / "sitecustomize.py").write_text(WATCH)
        text = Path(folder, "text.txt")
        text.write_text("A line to train on, as good as any other.\n" * 200)
        config = (tree / "examples" / "tiny" / "config.json").read_text()
        small = Path(folder, "small")  # 151,936 words lead nowhere else, and take seconds
        small.mkdir()
        (small / "config.json").write_text(config.replace("151936", "512"))
        own = {
            "find": ["--log-dir", f"{folder}/logs"],
            "train": ["--data", str(text), "--output", f"{folder}/run"],
        }
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(hook), str(tree / "src"))),
            "XDG_CACHE_HOME": f"{folder}/cache",
            "WALK_FOLDER": str(record),
            "WALK_PACKAGE": str(tree / "src" / "highwater"),
            "OMP_WAIT_POLICY": "passive",
            "HF_HUB_OFFLINE": "1",
        }
        typed = words.replace("examples/tiny", str(small)).split()
        command = [sys.executable, "-m", "highwater", *typed]
        command += own.get(words.partition(" ")[0], [])
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        rows = {
            tuple(line.split("\t"))
            for path in record.iterdir()
            for line in path.read_text().splitlines()
        }
    kinds = Counter(row[0] for row in rows)
    return {
        "files": len({row[1] for row in rows if row[0] == "function"}),
        "functions": kinds["function"],
        "comprehensions": kinds["comprehension"],
        "depth": max(int(row[1]) for row in rows if row[0] == "depth"),
        "modules": kinds["module"],
    }


if __name__ == "__main__":
    sys.exit(main())
