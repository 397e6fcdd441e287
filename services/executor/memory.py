"""How much memory this process may still take, and giving back what it does not use."""

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes that can be had without swapping: the machine's, or the container's if that has fewer left.

    On a system that says neither, half of its physical memory.
    """
    free = [left for left in (_of_machine(meminfo), _of_container(cgroup)) if left is not None]
    return min(free) if free else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def untouched(num_bytes: int) -> mmap.mmap:
    """Memory of zeros that is taken only where it is used, in large pages if the system has them to give.

    Reading a cache or weights from beginning to end meets a new page every few kilobytes otherwise, and each costs a
    walk through the page table.
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def give_back_unused() -> None:
    """Return freed memory to the operating system; the allocator keeps it otherwise. Does nothing where it can't."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)


def _of_machine(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _of_container(cgroup: Path) -> int | None:
    """Pages of files that were read once count as used there, but are given back when they are needed."""
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
