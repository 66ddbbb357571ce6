"""Control group: the cgroup's limit of host memory, and the kernel's out-of-memory kills in it.

Kills are counted in this process's own group, where its ranks are too: the count of the whole
machine would blame them whenever anything else ran out. Sources: cgroups(7); in the kernel's
documentation ``memory.events`` of cgroup-v2.rst, and ``memory.oom_control`` of
cgroup-v1/memory.rst.
"""

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath


def host_memory_bytes() -> int:
    """Bytes of the host's memory for this control group: its limit, or all of the machine's."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine_bytes, memory_limit() or machine_bytes)


def kernel_kills(proc: Path = Path("/proc/self")) -> int:
    """Processes of this group that the kernel killed for lack of memory; 0 if it counts none."""
    for path in counters(proc):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def memory_limit(proc: Path = Path("/proc/self")) -> int | None:
    """The lowest limit, in bytes, of this control group and of those above it; None: no limit."""
    limits: list[int] = []
    for path in counters(proc):
        name = "memory.max" if path.name == "memory.events" else "memory.limit_in_bytes"
        for folder in path.parents:
            with suppress(OSError, ValueError):  # ValueError: "max"
                limits.append(int((folder / name).read_text()))
    return min(limits, default=None)


def counters(proc: Path = Path("/proc/self")) -> list[Path]:
    """Paths of the counters of killed processes; with control groups 1 and 2 both, 1 first."""
    try:
        groups = [line.split(":", 2) for line in _lines(proc / "cgroup")]
        # Split at each blank: a field may be empty, as what a tmpfs mounts.
        mounts = [line.split(" ") for line in _lines(proc / "mountinfo")]
    except OSError:
        return []
    found: list[Path] = []
    for _, controllers, group in groups:
        is_v1 = "memory" in controllers.split(",")
        if not is_v1 and controllers:
            continue
        for fields in mounts:
            root, mounted_at = fields[3:5]
            # Optional fields, from the seventh on, end with a hyphen.
            kind, _, options = fields[fields.index("-", 6) + 1 :][:3]
            if is_v1 and kind == "cgroup" and "memory" in options.split(","):
                found.append(_below(Path(mounted_at), root, group) / "memory.oom_control")
            elif not is_v1 and kind == "cgroup2":
                found.append(_below(Path(mounted_at), root, group) / "memory.events")
    return found


def _lines(path: Path) -> list[str]:
    """The non-empty lines of a file, whose names may be any bytes."""
    return [line for line in path.read_text(errors="surrogateescape").split("\n") if line]


def _below(mounted_at: Path, root: str, group: str) -> Path:
    """The group's directory below the mount point, which may show only a part of the tree."""
    name = PurePosixPath(group)
    inside = name.relative_to(root) if name.is_relative_to(root) else name.relative_to("/")
    return mounted_at / inside
