"""`dynamo.llm.SelectionService` of Dynamo's Python binding, with the decisions of this service.

Programs that embed that class, such as the KV-aware router of Ray Serve LLM, gets the same calls,
dictionaries and errors from `SelectionService` here. `install()` puts it in that place; in Ray,
`runtime_env={"worker_process_setup_hook": "select_service.compat.dynamo.install"}` does so in every
process. Importing this module is cheap: the service is loaded with its class.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Final

from select_service.compat.dynamo_errors import DynamoException, SelectionServiceError
from select_service.compat.selection_cache import SelectionCacheConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from select_service.compat.selection_service import SelectionService

__all__ = [
    "DynamoException",
    "SelectionCacheConfig",
    "SelectionService",
    "SelectionServiceError",
    "install",
]


# Provides `dynamo.llm` where ai-dynamo is absent, for programs that import it by that name. An
# import finder at the end of the line: whatever is installed under that name comes first. It costs
# an interpreter nothing until `dynamo` is imported.

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
        """Return a spec for these modules; the import system asks only if no finder has one."""
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


def __getattr__(name: str) -> object:
    if name == "SelectionService":
        return import_module("select_service.compat.selection_service").SelectionService
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
