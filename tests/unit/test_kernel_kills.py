"""Kills for want of memory are counted where this process's control group counts them, whatever is
mounted where.
"""

import pytest

from highwater.trials.ranks import kernel_kills, memory_limit

V1 = "35 31 0:32 {root} {at} rw,relatime - cgroup cgroup rw,memory\n"
V2 = "41 31 0:38 {root} {at} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
UNUSUAL = (
    b"50 31 0:40 / /x rw,relatime - tmpfs  rw\n51 31 0:41 / /d\xe9 rw - ext4 /dev/b rw\n"
    b"52 31 0:42 / /- rw - ext4 - rw\n\n"
)
"""Mounted from nothing; on a path that is not UTF-8; on a hyphen; and no line at all."""
OTHER = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n1 2 0:1 / / rw - "
    "ext4 /dev/vda rw\n"
)


@pytest.mark.parametrize(
    ("groups", "mount", "root", "below"),
    [
        pytest.param(
            "0::/user.slice/a.scope\n", V2, "/", "user.slice/a.scope/memory.events", id="v2"
        ),
        pytest.param("0::/\n", V2, "/", "memory.events", id="a container's own root"),
        pytest.param(
            "0::/docker/1\n",
            V2,
            "/docker/1",
            "memory.events",
            id="a container that is told its whole name",
        ),
        pytest.param("5:cpu:/b\n4:memory:/a\n0::/\n", V1, "/", "a/memory.oom_control", id="v1"),
        pytest.param(
            "4:cpu,memory:/docker/1/a\n",
            V1,
            "/docker/1",
            "a/memory.oom_control",
            id="v1 in a container",
        ),
    ],
)
def test_the_groups_own_count_is_read(tmp_path, groups, mount, root, below):
    mounted = tmp_path / "mounted"
    counter = mounted / below
    counter.parent.mkdir(parents=True)
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom 5\noom_kill 3\noom_group_kill 1\n")
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "mountinfo").write_bytes(
        UNUSUAL + (OTHER + mount.format(root=root, at=mounted)).encode()
    )
    assert kernel_kills(tmp_path) == 3


def test_where_nobody_counts_no_kill_is_proven(tmp_path):
    assert kernel_kills(tmp_path) == 0
    (tmp_path / "cgroup").write_text("0::/gone\n")
    (tmp_path / "mountinfo").write_text(OTHER + V2.format(root="/", at=tmp_path))
    assert kernel_kills(tmp_path) == 0


@pytest.mark.parametrize(
    ("groups", "mount", "limits", "found"),
    [
        ("0::/a/b\n", V2, {"a/b/memory.max": "max\n"}, None),
        ("0::/a/b\n", V2, {"a/b/memory.max": "5368709120\n"}, 5368709120),
        ("0::/a/b\n", V2, {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096),
        ("0::/\n", V2, {"memory.max": "8192\n"}, 8192),
        ("4:memory:/a\n", V1, {"a/memory.limit_in_bytes": "1024\n"}, 1024),
    ],
)
def test_the_limit_is_the_least_of_the_group_and_those_around_it(
    tmp_path, groups, mount, limits, found
):
    mounted = tmp_path / "mounted"
    for name, text in limits.items():
        (mounted / name).parent.mkdir(parents=True, exist_ok=True)
        (mounted / name).write_text(text)
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "mountinfo").write_text(mount.format(root="/", at=mounted))
    assert memory_limit(tmp_path) == found
