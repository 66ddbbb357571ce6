"""Plain pickles: dicts, lists, tuples, texts and numbers, read by an interpreter of their opcodes.

``pickle`` itself would run code that a file names. This reads what ``pickle.dump`` of protocol 2
and later writes for plain values, and refuses an opcode that imports or calls something by name.
Every step takes at least one byte of the file, and nothing is allocated by a length that the file
claims: time and memory are bounded by its size. Source of the opcodes: CPython's ``pickletools``.
"""

import gc
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pickletools import opcodes
from typing import Any

MOST_VALUES = 64_000_000
"""Most values in one file: a snapshot of 100,000 events with stacks of 60 frames has 8 million."""
_MOST_MARKS = 64
"""Most marks open at once. A snapshot has six."""
_LONGEST_INTEGER = 16
"""Most bytes of an integer: an address has at most 9."""
_CALLING = (
    *("GLOBAL", "INST", "OBJ", "REDUCE", "BUILD", "PERSID", "BINPERSID", "NEWOBJ", "NEWOBJ_EX"),
    *("EXT1", "EXT2", "EXT4", "STACK_GLOBAL", "NEXT_BUFFER"),
)
_CALLS = {each.code.encode("latin-1"): each.name for each in opcodes if each.name in _CALLING}
"""Names of the opcodes that import, call or set up something, by their byte."""


class PlainPickleError(ValueError):
    """A pickle is damaged, or has more than plain data; the text says why."""


def read_plain_pickle(data: bytes) -> Any:
    """Read the value in a pickle: dicts with texts as keys, lists, tuples, texts, numbers, None.
    Shared and recursive values keep their structure. Raises PlainPickleError for other pickles.
    """
    try:
        with _without_collection():
            return _Machine(data).run()
    except (IndexError, struct.error) as error:
        raise PlainPickleError("it ends, or goes wrong, in the middle of a value") from error


@contextmanager
def _without_collection() -> Generator[None]:
    """Context manager: pause the garbage collector, which would scan millions of new lists."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Machine:
    """A reader of pickles that builds plain data: its stack, its marks, its memo."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def run(self) -> Any:
        data, handlers = self._data, self._handlers()
        if data[:1] != _PROTOCOL:
            raise PlainPickleError("it does not begin as a pickle of protocol 2 or later does")
        for _ in range(MOST_VALUES):
            operation = data[self._at]
            self._at += 1
            if operation == _STOP:
                if self._marks or len(self._stack) != 1:
                    raise PlainPickleError("it ends, or goes wrong, in the middle of a value")
                return self._stack[0]
            handlers[operation]()
        raise PlainPickleError(f"it has more than {MOST_VALUES:,} values")

    def _handlers(self) -> list[Callable[[], None]]:
        known: dict[bytes, Callable[[], None]] = {
            b"\x94": lambda: self._memo.append(self._stack[-1]),
            b"]": lambda: self._stack.append([]),
            b"}": lambda: self._stack.append({}),
            b"(": self._mark,
            b"a": lambda: self._extend([self._pop()]),
            b"e": lambda: self._extend(self._since_mark()),
            b"s": lambda: self._update([self._pop(), self._pop()][::-1]),
            b"u": lambda: self._update(self._since_mark()),
            b"t": lambda: self._stack.append(tuple(self._since_mark())),
            b"\x8a": self._long,
            _PROTOCOL: self._protocol,
            b"\x95": self._frame,
        }
        for code, value in {b"N": None, b"\x88": True, b"\x89": False, b")": ()}.items():
            known[code] = partial(self._stack.append, value)
        for code, form in {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}.items():
            known[code] = partial(self._number, struct.Struct(form))
        sized = (
            (self._text, {b"\x8c": 1, b"X": 4, b"\x8d": 8}),
            (self._recall, {b"h": 1, b"j": 4}),
            (self._put, {b"q": 1, b"r": 4}),
            (self._short_tuple, {b"\x85": 1, b"\x86": 2, b"\x87": 3}),
        )
        known |= {code: partial(read, n) for read, sizes in sized for code, n in sizes.items()}
        return [known.get(bytes((code,)), self._refuse) for code in range(256)]

    def _number(self, form: struct.Struct) -> None:
        self._stack.append(form.unpack_from(self._data, self._at)[0])
        self._at += form.size

    def _count(self, size: int) -> int:
        """The next ``size`` bytes as an index or a length."""
        start, self._at = self._at, self._at + size
        return int.from_bytes(self._data[start : self._at], "little")

    def _text(self, size: int) -> None:
        start, end = self._at + size, self._count(size) + self._at
        # checked before slicing: a slice past the end would be short, not refused
        if end > len(self._data):
            raise PlainPickleError("it ends in the middle of a text")
        self._at = end
        self._stack.append(self._data[start:end].decode("utf-8", errors="replace"))

    def _recall(self, size: int) -> None:
        self._stack.append(self._memo[self._count(size)])

    def _put(self, size: int) -> None:
        index = self._count(size)
        # ``pickle`` numbers them in order: a table as long as the largest index would be a bomb
        if index > len(self._memo):
            raise PlainPickleError("it numbers its values with gaps, as no pickle.dump does")
        self._memo[index : index + 1] = [self._stack[-1]]

    def _short_tuple(self, count: int) -> None:
        self._stack.append(tuple([self._pop() for _ in range(count)][::-1]))

    def _mark(self) -> None:
        if len(self._marks) == _MOST_MARKS:
            raise PlainPickleError(f"it is nested more than {_MOST_MARKS} deep")
        self._marks.append(len(self._stack))

    def _pop(self) -> Any:
        """Pop the topmost value. Raises PlainPickleError if there is none above the last mark."""
        if self._marks and len(self._stack) == self._marks[-1]:
            raise PlainPickleError("it ends, or goes wrong, in the middle of a value")
        return self._stack.pop()

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise PlainPickleError("it adds to a list that is none")
        target.extend(values)

    def _update(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise PlainPickleError("it adds to a dict that is none")
        names = values[::2]
        # a tuple as a key would be hashed, however deep it is
        if not all(type(name) is str for name in names):
            raise PlainPickleError("it has a dict whose keys are no texts")
        target.update(zip(names, values[1::2], strict=True))

    def _long(self) -> None:
        size = self._data[self._at]
        if size > _LONGEST_INTEGER:
            raise PlainPickleError(f"it has an integer of {size} bytes")
        start = self._at + 1
        self._at = start + size
        if self._at > len(self._data):
            raise PlainPickleError("it ends in the middle of a number")
        self._stack.append(int.from_bytes(self._data[start : self._at], "little", signed=True))

    def _protocol(self) -> None:
        version = self._data[self._at]
        self._at += 1
        if not _OLDEST <= version <= _NEWEST:
            raise PlainPickleError(f"it is of pickle's protocol {version}")

    def _frame(self) -> None:
        """Check the length of the next frame, which matters only to readers of a stream."""
        if self._count(8) + self._at > len(self._data):
            raise PlainPickleError("it ends in the middle of a frame")

    def _refuse(self) -> None:
        code = self._data[self._at - 1 : self._at]
        if name := _CALLS.get(code):
            raise PlainPickleError(
                f"it holds more than plain data: {name} at byte {self._at - 1:,} would run code"
            )
        raise PlainPickleError(f"byte {self._at - 1:,} is no part of a pickle of plain data")


_PROTOCOL, _STOP = b"\x80", b"."[0]
_OLDEST, _NEWEST = 2, 5
