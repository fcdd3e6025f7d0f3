"""Stands in for the packages that SGLang imports and that exist for CUDA only.

Installed as `sitecustomize` of SGLang's environment. Whatever SGLang imports of them is there, and
fails when it is called. Nobody else sees them: transformers asks whether torchvision can be had.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NoReturn

NAMES: Final = frozenset({"torchvision", "sgl_kernel"})


def _class(path: str) -> type:
    """A class whose attributes are such classes, too; it can be inherited from."""

    class Meta(type):
        def __getattr__(cls, name: str) -> type:
            return _class(f"{path}.{_plain(name)}")

    def fail(cls: type, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"{path} exists for CUDA only")

    return Meta(path.rpartition(".")[2], (), {"__new__": fail, "__module__": path})


def _plain(name: str) -> str:
    """The name, unless Python looks for something of its own."""
    if name.startswith("__"):
        raise AttributeError(name)
    return name


class StandIn(ModuleType):
    """A module that has everything."""

    def __getattr__(self, name: str) -> type:
        return _class(f"{self.__name__}.{_plain(name)}")


class StandIns(MetaPathFinder, Loader):
    """Finds those modules for SGLang, after all others failed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A package, if SGLang or a stand-in asks."""
        if fullname.partition(".")[0] not in NAMES:
            return None
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_globals["__name__"]:
            frame = frame.f_back
        asks = str(frame.f_globals["__name__"]).partition(".")[0]
        return ModuleSpec(fullname, self, is_package=True) if asks in {"sglang", *NAMES} else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """One that has everything."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.append(StandIns())
