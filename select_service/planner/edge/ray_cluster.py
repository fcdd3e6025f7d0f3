"""The way into a Ray cluster: this process becomes one of its drivers."""

from __future__ import annotations

import importlib
from typing import Any

from select_service.planner.errors import MissingExtra, SettingsError

__all__ = ["joined"]


def joined(what: str) -> Any:
    """Return the module `ray`, connected to the cluster of RAY_ADDRESS or of this machine.

    Args:
        what: needs it.

    Raises:
        MissingExtra: Ray is not installed.
        SettingsError: there is no cluster.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtra(what, "ray") from error
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            text = str(error).splitlines()[0]
            raise SettingsError(f"{what} needs a Ray cluster to join: {text}") from error
    return ray
