"""`dynamo.llm.SelectionService` of Dynamo's Python binding, with the decisions of this service.

Whoever embeds that class, such as the KV-aware router of Ray Serve LLM, gets the same calls,
dictionaries and errors from `SelectionService` here. `install()` puts it in that place; in Ray,
`runtime_env={"worker_process_setup_hook": "select_service.compat.dynamo.install"}` does so in every
process. Importing this module is cheap: the service is loaded with its class.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from select_service.compat.dynamo_errors import DynamoException, SelectionServiceError
from select_service.compat.provider import install
from select_service.compat.selection_cache import SelectionCacheConfig

if TYPE_CHECKING:
    from select_service.compat.selection_service import SelectionService

__all__ = [
    "DynamoException",
    "SelectionCacheConfig",
    "SelectionService",
    "SelectionServiceError",
    "install",
]


def __getattr__(name: str) -> object:
    if name == "SelectionService":
        return import_module("select_service.compat.selection_service").SelectionService
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
