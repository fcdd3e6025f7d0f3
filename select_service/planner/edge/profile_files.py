"""Reads a directory of profiling results, as the simulator does, into a validated profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.planner.core.profile import Profile, decode_of, prefill_of
from select_service.planner.errors import ProfileError
from select_service.simulator.profiles import read_arrays

if TYPE_CHECKING:
    from pathlib import Path


def read_profile(directory: Path) -> Profile:
    """Read both halves.

    Raises:
        ProfileError: one is not there, it cannot be read, or what it says cannot be used.
    """
    try:
        prefill, where_prefill = read_arrays(directory, "prefill")
        decode, where_decode = read_arrays(directory, "decode")
    except (OSError, ValueError) as error:
        raise ProfileError(str(error)) from error
    return Profile(prefill_of(prefill, str(where_prefill)), decode_of(decode, str(where_decode)))
