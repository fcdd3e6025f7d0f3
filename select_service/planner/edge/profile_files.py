"""Reads a directory of profiling results, as NPZ or JSON, into a validated profile.

NPZ files hold plain numbers; pickles in them are refused.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

import msgspec
from numpy.lib import format as npy

from select_service.planner.core.profile import Profile, decode_of, prefill_of
from select_service.planner.errors import ProfileError

_NPZ: Final = "selected_{}_interpolation/raw_data.npz"
_JSON: Final = "{}_raw_data.json"


def read_profile(directory: Path) -> Profile:
    """Read both halves; NPZ takes precedence over JSON.

    Raises:
        ProfileError: neither file is there, it cannot be read, or what it says cannot be used.
    """
    prefill, where_prefill = _arrays(directory, "prefill")
    decode, where_decode = _arrays(directory, "decode")
    return Profile(prefill_of(prefill, where_prefill), decode_of(decode, where_decode))


def _arrays(directory: Path, half: str) -> tuple[dict[str, object], str]:
    npz, plain = directory / _NPZ.format(half), directory / _JSON.format(half)
    try:
        if npz.is_file():
            return _from_npz(npz), str(npz)
        if plain.is_file():
            return msgspec.json.decode(plain.read_bytes(), type=dict[str, object]), str(plain)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, msgspec.MsgspecError) as error:
        raise ProfileError(f"{npz if npz.is_file() else plain}: {error}") from error
    raise ProfileError(f"no {half} profile in {directory}: neither {npz} nor {plain} is there")


def _from_npz(path: Path) -> dict[str, object]:
    """Read the members of a zip archive one by one; object arrays are refused."""
    found: dict[str, object] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                found[name.removesuffix(".npy")] = npy.read_array(member, allow_pickle=False)
    return found
