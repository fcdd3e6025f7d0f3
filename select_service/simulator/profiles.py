"""Reads the planner's profiling results from a directory, as times of engines.

The same files in the same order as the planner: each half as NPZ, else as JSON. Only numbers are
read; a pickle in an NPZ is refused.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from select_service.simulator.core.latency import ProfileLatency

__all__ = ["read_profile"]

_NPZ: Final = "selected_{}_interpolation/raw_data.npz"
_JSON: Final = "{}_raw_data.json"


def read_profile(directory: Path) -> ProfileLatency:
    """Read both halves, `prefill` and `decode`.

    Raises:
        OSError: a half is missing, or cannot be opened.
        ValueError: naming the file, or the directory if its two halves do not fit together.
    """
    halves = [_arrays(directory, half) for half in ("prefill", "decode")]
    try:
        return ProfileLatency(*halves)
    except KeyError as missing:
        raise ValueError(f"{directory}: there is no array {missing}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{directory}: {error}") from None


def _arrays(directory: Path, half: str) -> dict[str, Any]:
    npz, plain = directory / _NPZ.format(half), directory / _JSON.format(half)
    path = npz if npz.is_file() else plain
    if not path.is_file():
        raise FileNotFoundError(f"no {half} profile: neither {npz} nor {plain} is there")
    try:
        if path is npz:
            return _from_npz(path)
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: {error}") from None


def _from_npz(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                array = np.lib.format.read_array(member, allow_pickle=False)
            found[name.removesuffix(".npy")] = array.ravel().tolist()
    return found
