"""The compiled kernels and their plain twins, for tests that hold both to the same."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest


def twins(kernel: str, plain: ModuleType) -> list[Any]:
    """Both as parameters of a fixture or test; the kernel is skipped where it was not built."""
    try:
        built: ModuleType | None = importlib.import_module(kernel)
    except ImportError:
        built = None
    skip = pytest.mark.skipif(built is None, reason=f"{kernel} is not built")
    return [pytest.param(plain, id="plain"), pytest.param(built, id="kernel", marks=skip)]
