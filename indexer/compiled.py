"""Which of the optional compiled kernels are in use, and if not, why.

A kernel (`_speed.pyx`) does what its plain twin does, only faster. It is used if it was built, was
built from this source (`ABI`), and `SELECT_SERVICE_PURE` is not set. The choice is made once, when
the module that uses the kernel is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

PURE_VARIABLE: Final = "SELECT_SERVICE_PURE"
"""Environment variable that forces the plain twins, unless it is empty or 0."""

_NOT_BUILT: Final = "not built"
_STALE: Final = "stale: built from other source; install again"
_BIG: Final = "written for little-endian machines"
_PURE: Final = f"{PURE_VARIABLE} is set"
_OBJECTIONS: Final[dict[str, str]] = {}


def usable(kernel: str, abi: int) -> bool:
    """Decide whether to use a compiled kernel instead of its plain twin, and record it.

    Args:
        kernel: name of the compiled module.
        abi: expected value of its `ABI`; a build left over from other source has another.
    """
    _OBJECTIONS[kernel] = _objection(kernel, abi)
    return not _OBJECTIONS[kernel]


def kernels_in_use() -> dict[str, bool]:
    """Return the kernels that were asked for, and whether each one is in use."""
    return {kernel: not objection for kernel, objection in _OBJECTIONS.items()}


def objections() -> dict[str, str]:
    """Return the reason for each kernel that is not in use."""
    return {kernel: objection for kernel, objection in _OBJECTIONS.items() if objection}


def kernels_text() -> str:
    """Return how many of the kernels that were asked for are in use, "8/8"."""
    used = kernels_in_use()
    return f"{sum(used.values())}/{len(used)}"


def unwanted() -> dict[str, str]:
    """Return the objections that were not intended."""
    return {name: why for name, why in objections().items() if why != _PURE}


def complaints() -> list[str]:
    """Return a line for each of those; kernels that were not built have one together."""
    found = unwanted()
    absent = [name for name, why in found.items() if why == _NOT_BUILT]
    lines = [
        f"{kernel}: {objection}; plain Python is used instead"
        for kernel, objection in found.items()
        if objection != _NOT_BUILT
    ]
    if absent:
        lines.append(
            f"{len(absent)} OF {len(_OBJECTIONS)} COMPILED KERNELS ARE MISSING, and all is several "
            "times slower: install a C compiler and Python's headers, and install again "
            f"({', '.join(sorted(absent))})"
        )
    return lines


def _objection(kernel: str, abi: int) -> str:
    if os.environ.get(PURE_VARIABLE, "0") not in ("", "0"):
        return _PURE
    if sys.byteorder != "little":
        return _BIG
    try:
        built = importlib.import_module(kernel)
    except ModuleNotFoundError:
        return _NOT_BUILT
    except ImportError as error:
        return f"cannot be loaded: {error}"
    except Exception as error:  # noqa: BLE001 - it looks at our classes, and may find others
        return f"{_STALE}: {error}"
    return "" if getattr(built, "ABI", None) == abi else _STALE
