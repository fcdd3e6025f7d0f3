"""Provides `dynamo.llm` where ai-dynamo is absent, for programs that import it by that name.

An import finder at the end of the line: whatever is installed under that name comes first. It costs
an interpreter nothing until somebody imports `dynamo`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_MODULES: Final[dict[str, tuple[str, ...]]] = {
    "dynamo": (),
    "dynamo.llm": ("SelectionService",),
    "dynamo._core": (
        "DynamoException",
        "SelectionCacheConfig",
        "SelectionService",
        "SelectionServiceError",
    ),
}
"""The modules provided, and what each has, all out of `select_service.compat.dynamo`."""


class DynamoFinder(MetaPathFinder, Loader):
    """Finder and loader of the modules above."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for these modules; the import system asks only if nobody else has one."""
        if name not in _MODULES:
            return None
        return ModuleSpec(name, self, origin="select_service.compat", is_package="." not in name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let the import system make the module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        names = _MODULES[module.__name__]
        if names:
            ours = import_module("select_service.compat.dynamo")
            for name in names:
                setattr(module, name, getattr(ours, name))


def install() -> None:
    """Provide `dynamo.llm.SelectionService` in this process, unless ai-dynamo does. Repeatable."""
    if not any(isinstance(one, DynamoFinder) for one in sys.meta_path):
        sys.meta_path.append(DynamoFinder())
