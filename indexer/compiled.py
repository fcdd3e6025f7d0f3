"""Which of the optional compiled kernels are in use, and if not, why.

A kernel (`_speed.pyx`) does what a plain twin beside it does, only faster. It is taken when it was
built, was built from this source (`ABI`), and `SELECT_SERVICE_PURE` is not set. This is decided
once, when the code that uses it is imported.
"""

from __future__ import annotations

import importlib
import os
from typing import Final

__all__ = ["KERNELS", "PURE_VARIABLE", "usable"]

PURE_VARIABLE: Final = "SELECT_SERVICE_PURE"
"""Environment variable that forces the plain twins, unless it is empty or 0."""

KERNELS: Final[dict[str, str]] = {}
"""Kernel → why its plain twin is in use instead, "" when the kernel is."""


def usable(kernel: str, abi: int) -> bool:
    """Whether to take a compiled kernel rather than its plain twin; noted in `KERNELS`.

    Args:
        kernel: name of the compiled module.
        abi: what `ABI` must say in it. A build left over from other source says something else.
    """
    KERNELS[kernel] = _objection(kernel, abi)
    return not KERNELS[kernel]


def _objection(kernel: str, abi: int) -> str:
    if os.environ.get(PURE_VARIABLE, "0") not in ("", "0"):
        return f"{PURE_VARIABLE} is set"
    try:
        built = importlib.import_module(kernel)
    except ModuleNotFoundError:
        return "not built"
    except ImportError as error:
        return f"cannot be loaded: {error}"
    if getattr(built, "ABI", None) != abi:
        return "stale: built from other source; install again"
    return ""
