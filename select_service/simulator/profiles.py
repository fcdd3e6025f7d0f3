"""The planner's profiling results in a directory, as times of engines: read, and written.

Each half is read as NPZ, else as JSON; only numbers are, and a pickle in an NPZ is refused. Written
as JSON, with the formula that was fitted beside it: the planner's arrays have the fixed cost of a
step in both halves, which counts it twice where prompts are computed beside answers.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from select_service.simulator.core.latency import ProfileLatency
from select_service.simulator.results import write_whole

if TYPE_CHECKING:
    from select_service.simulator.core.latency import AnalyticLatency

_PROMPTS: Final = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_USAGES: Final = (0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)

_NPZ: Final = "selected_{}_interpolation/raw_data.npz"
_JSON: Final = "{}_raw_data.json"
_FORMULA: Final = "engine.json"

_Time = Annotated[float, msgspec.Meta(ge=0.0)]


def read_profile(directory: Path) -> ProfileLatency:
    """Read both halves, `prefill` and `decode`.

    Raises:
        OSError: a half is missing, or cannot be opened.
        ValueError: naming the file, or the directory if its two halves do not fit together.
    """
    halves = [read_arrays(directory, half)[0] for half in ("prefill", "decode")]
    try:
        return ProfileLatency(*halves)
    except KeyError as missing:
        raise ValueError(f"{directory}: there is no array {missing}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{directory}: {error}") from None


class _Formula(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `write_profile` writes of a formula, times in seconds."""

    kv_tokens: Annotated[int, msgspec.Meta(gt=0)]
    base_s: _Time
    prefill_token_s: _Time
    prefill_pair_s: _Time
    sequence_s: _Time
    kv_token_s: _Time


def read_formula(directory: Path) -> dict[str, float] | None:
    """Return the values of `EngineSpec` that `calibrate` wrote; None: they are measurements only.

    Raises:
        OSError: it cannot be read.
        ValueError: naming the file and the member.
    """
    path = directory / _FORMULA
    if not path.is_file():
        return None
    try:
        return msgspec.structs.asdict(msgspec.json.decode(path.read_bytes(), type=_Formula))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


def read_arrays(directory: Path, half: str) -> tuple[dict[str, Any], Path]:
    """Return the arrays of one half by name, and the file they are from; NPZ precedes JSON.

    Raises:
        OSError: there is neither, or it cannot be opened.
        ValueError: naming the file.
    """
    npz, plain = directory / _NPZ.format(half), directory / _JSON.format(half)
    path = npz if npz.is_file() else plain
    if not path.is_file():
        raise FileNotFoundError(f"no {half} profile: neither {npz} nor {plain} is there")
    try:
        if path is npz:
            return _from_npz(path), path
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]), path
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: {error}") from None


def _from_npz(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                array = np.lib.format.read_array(member, allow_pickle=False)
            found[name.removesuffix(".npy")] = array
    return found


def write_profile(directory: Path, latency: AnalyticLatency, kv_tokens: int, longest: int) -> None:
    """Write an engine's formula, and what it says of prompts of up to twice `longest` tokens.

    Raises:
        ValueError: the KV cache does not hold the shortest prompt.
        OSError: the directory cannot be made.
        NotWritten: a file cannot be written.
    """
    if kv_tokens < _PROMPTS[0]:
        raise ValueError(
            f"a KV cache of {kv_tokens} tokens does not even hold a prompt of {_PROMPTS[0]}"
        )
    directory.mkdir(parents=True, exist_ok=True)
    step_s = latency.stretch_s(0, 0, 1)
    lengths = [one for one in _PROMPTS if one < 2 * longest] or [_PROMPTS[0]]
    prefill = {
        "prefill_isl": lengths,
        "prefill_ttft": [1e3 * (step_s + latency.prefill_s(one, 0)) for one in lengths],
    }
    points = []
    for context in lengths:
        for usage in _USAGES:
            sequences = max(1, round(usage * kv_tokens / context))
            tokens = sequences * context
            if tokens <= kv_tokens:
                itl_ms = 1e3 * latency.stretch_s(sequences, tokens, 1)
                points.append((tokens / kv_tokens, context, itl_ms))
    decode = {
        "x_kv_usage": [usage for usage, _, _ in points],
        "y_context_length": [context for _, context, _ in points],
        "z_itl": [itl_ms for _, _, itl_ms in points],
        "max_kv_tokens": [kv_tokens],
    }
    formula = {name: getattr(latency, name) for name in latency.__slots__}
    for name, content in (
        (_JSON.format("prefill"), prefill),
        (_JSON.format("decode"), decode),
        (_FORMULA, {"kv_tokens": kv_tokens, **formula}),
    ):
        text = msgspec.json.format(msgspec.json.encode(content), indent=1)
        write_whole(directory / name, text + b"\n")
