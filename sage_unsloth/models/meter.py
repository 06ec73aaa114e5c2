"""Time and peak memory of a piece of work, on a GPU or on a CPU.

Peak memory is the maximum above the memory at the start: on a GPU PyTorch's count, on Linux without
one the process's largest resident set, reset before each measurement; elsewhere it is not measured.
"""

import contextlib
import ctypes
import functools
import gc
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch

RESIDENT = "largest resident set of the process (VmHWM), reset before each pass"
ALLOCATED = "torch.cuda.max_memory_allocated, reset before each pass"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def measure() -> Iterator[dict[str, float | None]]:
    """Measures `seconds`, `cpu_seconds` of this process, and `peak_bytes` (None if not measurable).

    They are set once the context ends.
    """
    gc.collect()
    result: dict[str, float | None] = {"peak_bytes": None}
    gpu, source = torch.cuda.is_available(), memory_source()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    elif source == RESIDENT:
        _give_back()
        _reset_peak()
        before = _resident("VmRSS")
    synchronize()
    started, worked = time.perf_counter(), time.process_time()
    yield result
    synchronize()
    result["seconds"] = time.perf_counter() - started
    result["cpu_seconds"] = time.process_time() - worked
    if gpu:
        result["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    elif source == RESIDENT:
        result["peak_bytes"] = _resident("VmHWM") - before


@functools.cache
def memory_source() -> str | None:
    """How peak memory is measured here, or None."""
    if torch.cuda.is_available():
        return ALLOCATED
    try:
        _reset_peak()
    except OSError:
        return None
    return RESIDENT


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> int:
    """Bytes in a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status must have a line {field}, but it has none")


def _give_back() -> None:
    """Returns freed memory to the system, so that one variant does not hide the next one's."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    model = (
        [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        if Path("/proc/cpuinfo").exists()
        else []
    )
    return f"{model[0] if model else platform.machine()}, {os.cpu_count()} cores"
