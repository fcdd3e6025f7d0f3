"""How many instructions this thread has executed in user space, by the processor's own count.

On a machine that others use, too, times differ by half from run to run, and this by a percent. It
says nothing of the kernel, nor of waiting for memory, which is most of what a cold request costs.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["instruction_counter"]

_PERF_EVENT_OPEN: Final = {"x86_64": 298, "aarch64": 241}  # see perf_event_open(2)
_SIZE: Final = 128  # of the attributes; what is not said is 0
_HARDWARE, _INSTRUCTIONS = 0, 1
_FLAGS_AT: Final = 40
_NO_KERNEL, _NO_HYPERVISOR = 1 << 5, 1 << 6


def instruction_counter() -> Callable[[], int] | None:
    """Return what reads the count; None where the system or the processor has none for us."""
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None:
        return None
    asked = bytearray(_SIZE)
    struct.pack_into("IIQ", asked, 0, _HARDWARE, _SIZE, _INSTRUCTIONS)
    struct.pack_into("Q", asked, _FLAGS_AT, _NO_KERNEL | _NO_HYPERVISOR)
    attributes = (ctypes.c_char * _SIZE).from_buffer(asked)
    descriptor = ctypes.CDLL(None).syscall(number, attributes, 0, -1, -1, 0)
    if descriptor < 0:
        return None
    return lambda: int.from_bytes(os.read(descriptor, 8), "little")
