"""Sampled peaks: the memory of a trial as seen from outside, ten times a second.

On GPUs what the driver reports as used, of each; on the CPU the largest data segment among the
trial's processes, which RLIMIT_DATA bounds. A peak between two samples is missed.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread

import psutil

from highwater.nouns.trial import RankMemory, RankReport

SAMPLES_PER_S = 10
_MOSTLY = 0.5
"""Share of a trial's time that a process has lived which is a rank, and no helper of one."""
_AROUND_S = 5.0
"""Seconds before the last line of a log in which whoever wrote it may have gone."""
_IDLE_SHARE = 0.05
"""Share of a core below which a process waits. A hang in NCCL spins and looks like work; there the
rank that failed is known by its error."""


class SampledPeak:
    """What was seen of one trial so far. Its samples are taken in a thread of their own."""

    def __init__(self, reaper: int, gpus: Sequence[int]) -> None:
        """Watch what runs under a reaper, by its process id, on these GPUs, as the driver counts
        them; none: on the CPU.
        """
        self._reaper = reaper
        self._gpus = gpus
        self._used_bytes = [0] * len(gpus)
        self._total_bytes = [0] * len(gpus)
        self._segment_bytes = 0
        self._began = self._worked_at = time.monotonic()
        self._seen: dict[int, tuple[float, float]] = {}
        """When a process was seen first and last, by its id."""
        self._alive: frozenset[int] = frozenset()
        self._cpu_s: dict[int, float] = {}

    @property
    def idle_s(self) -> float:
        """Seconds since any of its GPUs worked, or its processes took CPU time to speak of."""
        return time.monotonic() - self._worked_at

    def has_lost_a_process(self, since: float) -> bool:
        """Whether a process that had been there for most of the trial went about then, or later."""
        return any(
            pid not in self._alive
            and last >= since - _AROUND_S
            and last - first >= _MOSTLY * (last - self._began)
            for pid, (first, last) in tuple(self._seen.items())
        )

    def ranks(self) -> tuple[RankReport, ...]:
        """A report for each GPU, one on the CPU, with what was sampled alone."""
        if not self._gpus:
            memory = RankMemory(peak_data_segment_bytes=self._segment_bytes or None)
            return (RankReport(rank=0, memory=memory),)
        pairs = zip(self._used_bytes, self._total_bytes, strict=True)
        return tuple(
            RankReport(
                rank=rank,
                memory=RankMemory(device_used_bytes=used or None, device_total_bytes=total or None),
            )
            for rank, (used, total) in enumerate(pairs)
        )

    def sample(self, handles: Sequence[object]) -> None:
        """Look once."""
        for position, handle in enumerate(handles):
            self._sample_gpu(position, handle)
        self._sample_processes()

    def _sample_gpu(self, position: int, handle: object) -> None:
        import pynvml

        with suppress(pynvml.NVMLError):
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            self._used_bytes[position] = max(self._used_bytes[position], int(memory.used))
            self._total_bytes[position] = int(memory.total)
            if int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu):
                self._worked_at = time.monotonic()

    def _sample_processes(self) -> None:
        alive: set[int] = set()
        for process in _under(self._reaper):
            with suppress(psutil.Error), process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                alive.add(process.pid)
                times = process.cpu_times()
                self._note_work(process.pid, times.user + times.system)
                if not self._gpus:
                    self._segment_bytes = max(self._segment_bytes, process.memory_info().data)
        now = time.monotonic()
        for pid in alive:
            self._seen[pid] = (self._seen.get(pid, (now, now))[0], now)
        self._alive = frozenset(alive)

    def _note_work(self, pid: int, cpu_s: float) -> None:
        """Note that a process took more than a twentieth of a core since it last did."""
        now, before_s = time.monotonic(), self._cpu_s.get(pid)
        if before_s is None or cpu_s - before_s > _IDLE_SHARE * (now - self._worked_at):
            self._cpu_s[pid] = cpu_s
            self._worked_at = now


@contextmanager
def sampled_peak(reaper: int, gpus: Sequence[int]) -> Generator[SampledPeak]:
    """Sample a trial for as long as this is open."""
    peak, over = SampledPeak(reaper, gpus), Event()
    thread = Thread(target=_sample, args=(peak, gpus, over), daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def _sample(peak: SampledPeak, gpus: Sequence[int], over: Event) -> None:
    import pynvml

    handles: list[object] = []
    with suppress(pynvml.NVMLError):  # no driver: nothing of a GPU is seen
        if gpus:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in gpus]
    while not over.wait(1 / SAMPLES_PER_S):
        peak.sample(handles)
    if handles:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _under(reaper: int) -> list[psutil.Process]:
    try:
        return psutil.Process(reaper).children(recursive=True)
    except psutil.Error:
        return []
