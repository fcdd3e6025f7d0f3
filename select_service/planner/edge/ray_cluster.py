"""Connects this process to a Ray cluster, as one of its drivers."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any, Final
from urllib.parse import urlsplit

from select_service.planner.errors import MissingExtra, SettingsError

REACHED_WITHIN_S: Final = 5.0
"""Ray itself keeps trying to reach an address for two minutes before it reports anything."""


def joined(what: str) -> Any:
    """Return the module `ray`, connected to the cluster of RAY_ADDRESS or of this machine.

    Args:
        what: the feature that needs it, for errors.

    Raises:
        MissingExtra: Ray is not installed.
        SettingsError: there is no cluster.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtra(what, "ray", "ray[serve]>=2.55") from error
    if not ray.is_initialized():
        _reach(what, os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(address="auto", log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            text = str(error).splitlines()[0]
            raise SettingsError(f"{what} needs a Ray cluster to join: {text}") from error
    return ray


def _reach(what: str, address: str) -> None:
    """Raise SettingsError if an address with a port does not accept connections."""
    try:
        parts = urlsplit(address if "//" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return
    if not host or not port:
        return
    try:
        socket.create_connection((host, port), REACHED_WITHIN_S).close()
    except OSError as error:
        raise SettingsError(
            f"{what} needs a Ray cluster to join: none answers at RAY_ADDRESS={address}: {error}"
        ) from error
