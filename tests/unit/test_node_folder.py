"""The folder in which machines meet: refused where it is somebody's, and gone afterwards with
nothing that was not the search's.
"""

from pathlib import Path
from threading import Thread

import pytest

from highwater.errors import MachineError, UsageError
from highwater.nouns.request import Request
from highwater.trials.node_folder import NodeFolder, NodeReady
from highwater.trials.node_place import MachineShare, meeting
from highwater.trials.node_share import serve

READY = NodeReady(host="a", highwater_version="1", device_name="CPU", config_digest="d")


def both(path: Path) -> tuple[NodeFolder, NodeFolder]:
    return NodeFolder(path, node=0, nodes=2), NodeFolder(path, node=1, nodes=2)


def test_a_folder_is_new_also_where_another_machine_came_first(tmp_path):
    first, second = both(tmp_path / "meet")
    first.refuse_used()
    second.enter(READY)
    first.refuse_used()
    first.enter(READY)
    assert first.ready(1) == second.ready(0) == READY
    second.leave()
    first.dissolve()
    assert second.is_over
    assert not (tmp_path / "meet").exists()


@pytest.mark.parametrize("name", ["notes.txt", "node-0.json", "over", "trial-1", ".git"])
def test_a_folder_that_has_anything_else_is_refused_and_stays_as_it_is(tmp_path, name):
    (tmp_path / name).write_text("mine")
    first, _ = both(tmp_path)
    with pytest.raises(UsageError, match="no new directory"):
        first.refuse_used()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_what_somebody_puts_there_meanwhile_is_never_removed(tmp_path):
    first, _ = both(tmp_path / "meet")
    first.enter(READY)
    (first.trial(1) / "0").mkdir(parents=True)
    (tmp_path / "meet" / "notes.txt").write_text("mine")
    first.dissolve()
    assert [path.name for path in (tmp_path / "meet").iterdir()] == ["notes.txt"]


def test_machines_that_are_unlike_are_let_go_and_the_folder_is_gone(tmp_path):
    path = tmp_path / "meet"
    _, second = both(path)
    serving = Thread(target=serve, args=(second, READY))
    serving.start()
    request = Request(model="tiny", nodes=2, node_rank=0, rendezvous=str(path))
    share = MachineShare(device="cpu", gpus=1, config_digest="another")
    with (
        pytest.raises(MachineError, match=r"^machine 1, a, has the highwater 1,"),
        meeting(request, share),
    ):
        pass
    serving.join(timeout=10)
    assert not serving.is_alive()
    assert not path.exists()
