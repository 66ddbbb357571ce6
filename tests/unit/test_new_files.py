"""Files that are written for a user: none that is there is touched, and none is left half
written.
"""

import errno
import os
import resource
from collections.abc import Iterator

import pytest

from highwater.errors import MachineError
from highwater.store.directory import check_log_directory, write_new_file

LIMIT_BYTES = 1000


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may be longer than the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_came_while_another_was_being_made_is_left_alone(tmp_path):
    path = tmp_path / "guide.html"
    path.write_text("mine")
    with pytest.raises(MachineError, match=os.strerror(errno.EEXIST)):
        write_new_file(path, b"theirs", flag="-o")
    assert path.read_text() == "mine"


def test_where_there_is_no_room_no_half_file_is_left(tmp_path, small_disk):
    write_new_file(tmp_path / "short.md", b"x" * LIMIT_BYTES, flag="-o")
    with pytest.raises(MachineError, match=os.strerror(errno.EFBIG)) as refused:
        write_new_file(tmp_path / "long.md", b"x" * (LIMIT_BYTES + 1), flag="-o")
    assert "`-o`" in refused.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["short.md"]


def test_checking_a_log_directory_touches_no_file_that_is_there(tmp_path):
    mine = tmp_path / f".highwater-{os.getpid()}"
    mine.write_text("mine")
    check_log_directory(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {mine.name: "mine"}
