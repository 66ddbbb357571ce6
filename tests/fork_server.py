"""Processes that need not import anew what takes seconds: they are forked from one that has.

A ``ForkServer`` is the tests' end. Run as a script, with the names of modules, this file is the
process that forks. What it forks is a child of whoever ordered it, as if started by that process:
with its streams, session, process group, folder and environment, and ``/proc`` shows the words and
the environment that were ordered.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

TESTS = Path(__file__).parent
COMMANDS = {
    "highwater": "highwater.cli.app:main",
    "search_context_length_capacity": "highwater.cli.search_context_length_capacity:main",
}
"""The installed commands, each with the function that it calls."""
Order = dict[str, Any]
"""``program`` and ``words``, as ``_run`` takes them; ``shown``, the words of the whole command;
``environment``, ``cwd``, and ``is_apart``: in a session of its own."""
Given = dict[int, int]
"""File descriptors of the process that is ordered, each with the one of who orders."""
Prepare = Callable[[], None] | None
Fork = Callable[[Order, Given, Prepare], int]

_ROOM = "-" * 8192
"""Last word of the server's: the words of what it forks are shown in its place."""
INSIDE = "HIGHWATER_TEST_INSIDE"
"""A variable with the id of a process whose user and mount namespaces what is forked enters."""
_CLONE_PARENT = 0x8000
_CLONE = {"x86_64": 56, "aarch64": 220}
"""Numbers of the system call, source: clone(2)."""
_HIGH = 512
"""Above every file descriptor that a process is given."""
_FDS = 64
_HUGE = 2 * 2**20
"""Bytes of a huge page."""
_MADV_COLLAPSE = 25
"""Source: madvise(2)."""


class Forked(subprocess.Popen[Any]):
    """A process that is forked where it is a module or command of ours, and started where not."""

    fork: ClassVar[Fork]

    def _execute_child(self, args: Any, *named: Any) -> None:
        words = [os.fspath(word) for word in args]
        found = self._program(words)
        _, prepare, _, keeps, cwd, environment, _, _, _, *others = named
        if found is None:
            return super()._execute_child(args, *named)  # pyright: ignore[reportAttributeAccessIssue]
        program, behind = found
        pipes, is_apart = others[:6], others[11]
        order = {
            "program": program,
            "words": behind,
            "shown": words,
            "environment": dict(os.environ if environment is None else environment),
            "cwd": os.path.realpath(cwd or Path.cwd()),
            "is_apart": is_apart,
        }
        stdin, _, _, stdout, _, stderr = pipes
        streams = {number: own for number, own in enumerate((stdin, stdout, stderr)) if own != -1}
        given = {0: 0, 1: 1, 2: 2} | streams | {number: number for number in keeps}
        self.pid = type(self).fork(order, given, prepare)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # pyright: ignore[reportAttributeAccessIssue]
        return None

    def _program(self, words: list[str]) -> tuple[str, list[str]] | None:
        return program_of(words)


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """What ``_run`` is told to run these words; None: they are not of ours."""
    if words[:3] == [sys.executable, "-P", "-m"]:
        return f"-m{words[3]}", words[4:]
    if (name := Path(words[0]).name) in COMMANDS:
        return COMMANDS[name], words
    if words[0] == sys.executable and Path(words[1]).is_relative_to(TESTS.parent):
        return words[1], words[2:]
    return None


def fork_here(order: Order, given: Given, prepare: Prepare) -> int:
    """Fork this very process; the child's id."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if (child := os.fork()) == 0:
        _become(order, given, prepare)
    return child


def execute_here(path: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Be another program, as ``os.execve`` does; one of ours without a new interpreter."""
    if (found := program_of(list(words))) is None:
        _execve(path, list(words), environment)
    program, behind = found
    order = {"program": program, "words": behind, "shown": words, "cwd": str(Path.cwd())}
    _become(order | {"environment": dict(environment), "is_apart": False}, {0: 0, 1: 1, 2: 2}, None)


_execve = os.execve


class ForkServer:
    def __init__(
        self,
        *modules: str,
        environment: Mapping[str, str] = {},
        forked_from: "ForkServer | None" = None,
    ) -> None:
        """``environment``: what is special of the environment in which modules are imported.
        ``forked_from``: a server that has imported most of them.
        """
        self._words = [__file__, *modules, _ROOM]
        self._forked_from = forked_from
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._lock = threading.Lock()
        self.popen_of_commands: type[Forked] = type("Popen", (Forked,), {"fork": self._fork})
        self._popen = type("Popen", (_Ordered,), {"fork": self._fork})

    def popen(self, program: str, *words: str, **named: Any) -> "subprocess.Popen[Any]":
        """Start a process, with what ``subprocess.Popen`` is told. ``program``: a script,
        ``module:function``, or code behind ``-c``.
        """
        return self._popen([program, *words], **named)

    def run(
        self,
        program: str,
        *words: str,
        within_s: float,
        cwd: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        pipe = subprocess.PIPE
        process = self.popen(
            *(program, *words),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            encoding="utf-8",
            cwd=cwd,
            env=self._environment if environment is None else environment,
        )
        try:
            said, errors = process.communicate(timeout=within_s)
        except BaseException:  # also a test's own timeout
            process.kill()
            process.wait()
            raise
        return subprocess.CompletedProcess(words, process.returncode, said, errors)

    def end(self) -> None:
        if self._process is not None:
            self._orders.close()
            self._process.wait()
            self._process = None

    def start(self) -> None:
        """Start the process. In the main thread: where a thread ends, children are told so."""
        if self._process is None:
            self._orders, theirs = socket.socketpair()
            named: dict[str, Any] = {"stdin": theirs.fileno(), "env": self._environment}
            self._process = (
                Started([sys.executable, "-P", *self._words], **named)
                if self._forked_from is None
                else self._forked_from.popen(*self._words, **named)
            )
            theirs.close()

    def _fork(self, order: Order, given: Given, prepare: Prepare) -> int:
        assert prepare is None, "nothing of this process runs in what another one forks"
        text = json.dumps(order | {"given": list(given)}).encode(errors="surrogateescape")
        with self._lock:
            self.start()
            socket.send_fds(self._orders, [len(text).to_bytes(4)], list(given.values()))
            self._orders.sendall(text)
            child = int.from_bytes(self._orders.recv(4))
        assert child, "the server has ended"
        return child


Started = subprocess.Popen
"""Starts a process from its beginning, also where a test has all others forked."""


class _Ordered(Forked):
    """A process of which the first word is the program that the server is told."""

    def _program(self, words: list[str]) -> tuple[str, list[str]] | None:
        return words[0], words[1:]


def serve(modules: Sequence[str]) -> None:
    """Start what is ordered until stdin, a socket, ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for who orders
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    assert threading.active_count() == 1, "a thread would be missing in every child"
    gc.freeze()
    _collapse()
    orders = socket.socket(fileno=0)
    while True:
        length, own, _, _ = socket.recv_fds(orders, 4, _FDS)
        if not length:
            return
        left = int.from_bytes(length)
        text = b""
        while len(text) < left:
            text += orders.recv(left - len(text))
        order = json.loads(text.decode(errors="surrogateescape"))
        if (child := _forked_beside()) == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _become(order, dict(zip(order["given"], own, strict=True)), None)
        for descriptor in own:
            os.close(descriptor)
        orders.sendall(child.to_bytes(4))


def _collapse() -> None:
    """Ask for huge pages under all that was imported: a fork copies an entry for each page, which
    takes most of its time. A kernel before 6.1 has none to give.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_, path = line.split(maxsplit=5) if "/" in line else (*line.split(), "")
        start, end = (int(address, 16) for address in span.split("-"))
        start, end = -(-start // _HUGE) * _HUGE, end // _HUGE * _HUGE
        if access == "rw-p" and not path.startswith("/") and start < end:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def _forked_beside() -> int:
    """Fork, as ``os.fork`` does, a child of this process's parent."""
    python = ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    flags = _CLONE_PARENT | signal.SIGCHLD
    child = python.syscall(_CLONE[platform.machine()], flags, 0, 0, 0, 0)
    if child == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if child == -1:
        raise OSError(ctypes.get_errno(), "clone failed")
    return child


def _become(order: Order, given: Given, prepare: Prepare) -> NoReturn:
    """Be the process that was ordered, made in the order in which ``subprocess`` makes one."""
    status = 1
    try:
        environment = order["environment"]
        _hold(given)
        if (inside := environment.pop(INSIDE, None)) is not None:
            _enter(inside)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(environment)
        _show(order["shown"], environment)  # over what the variables were read from, so after
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if order["is_apart"]:
            os.setsid()
        if prepare is not None:
            prepare()
        _open_streams()
        status = _run(order["program"], order["words"])
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            sys.stderr.write(f"{leaving.code}\n")
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 -- the edge of the process, as an interpreter has it
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
            atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(status & 0xFF)


def _hold(given: Given) -> None:
    """Have these file descriptors, and no other."""
    high = {
        number: os.dup2(own, _HIGH + place)
        for place, (number, own) in enumerate(sorted(given.items()))
    }
    first = 0
    for number, own in high.items():
        if first < number:  # of no numbers at all it closes all
            os.closerange(first, number)
        os.dup2(own, number)
        first = number + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _enter(process: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "mnt"):
        namespace = os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY)
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of {process}")
        os.close(namespace)


def _show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write these where ``/proc`` shows a process's words and environment, as much as has room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    starts_and_ends = [int(fields[number - 3]) for number in (48, 49, 50, 51)]  # source: proc(5)
    ours_first = sorted(environment, key=lambda name: not name.startswith("HIGHWATER_"))
    pairs = [f"{name}={environment[name]}" for name in ours_first]
    for entries, start, end in ((words, *starts_and_ends[:2]), (pairs, *starts_and_ends[2:])):
        shown = b"".join(os.fsencode(entry) + b"\0" for entry in entries)
        room = end - start - 1
        ctypes.memmove(start, shown[:room].ljust(room, b"\0") + b"\0", room + 1)


def _open_streams() -> None:
    """Open what an interpreter opens, and forget what it would not know."""
    atexit._clear()  # pyright: ignore[reportPrivateUsage]
    tempfile.tempdir = None
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or os.isatty(1)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", 1 if is_unbuffered else -1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, "utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _run(program: str, words: list[str]) -> int:
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in own if folder and folder not in sys.path]
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if program.startswith("-c"):
        sys.argv = ["-c", *words]
        code = compile(program.removeprefix("-c"), "<string>", "exec")
        exec(code, {"__name__": "__main__"})  # noqa: S102 -- a test's
        return 0
    if program.startswith("-m"):
        sys.argv[1:] = words
        runpy.run_module(program.removeprefix("-m"), run_name="__main__", alter_sys=True)
        return 0
    if program.endswith(".py"):
        sys.argv, folder = [program, *words], Path(program).parent
        sys.path[:0] = [str(folder), str(folder.parent)]
        runpy.run_path(program, run_name="__main__")
        return 0
    module, _, function = program.partition(":")
    sys.argv = [words[0], *words[1:]]
    return getattr(importlib.import_module(module), function)() or 0


if __name__ == "__main__":
    serve(sys.argv[1:-1])
