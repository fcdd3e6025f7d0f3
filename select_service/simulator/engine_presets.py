"""Engines of known models on known devices, for `--engine preset=MODEL@DEVICE[xN]`.

Times follow from published figures: a model's shape (its `config.json` on Hugging Face) and a
device's dense BF16 rate, memory and bandwidth (the vendor's data sheet). Two shares say how much of
a device an engine gets: 0.55 of its rate, 0.75 of its bandwidth, which is what an 8B model on one
H100 is known to reach. Communication between N devices is not counted. Measured numbers are better:
`select-sim calibrate`.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

RATE_SHARE: Final = 0.55
BANDWIDTH_SHARE: Final = 0.75
MEMORY_SHARE: Final = 0.9  # gpu_memory_utilization
ACTIVATIONS_BYTES: Final = 4e9  # per device, beside weights and KV cache
SEQUENCE_S: Final = 0.1e-3  # sampling and bookkeeping, which no data sheet has
_BYTES: Final = 2  # of BF16


class ModelShape(NamedTuple):
    """What of a model decides about times; `active` parameters compute a token."""

    parameters: float
    active: float
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    source: str


class Device(NamedTuple):
    """A device's dense BF16 rate, bandwidth and memory, per second and in bytes."""

    flops: float
    bandwidth: float
    memory: float
    source: str


def _model(
    name: str,
    parameters: float,
    layers: int,
    heads: int,
    kv_heads: int,
    active: float | None = None,
) -> ModelShape:
    source = f"https://huggingface.co/{name}/blob/main/config.json"
    shape = layers, heads, kv_heads, 128
    return ModelShape(parameters, parameters if active is None else active, *shape, source)


MODELS: Final = {
    "llama-3.1-8b": _model("meta-llama/Llama-3.1-8B-Instruct", 8.03e9, 32, 32, 8),
    "llama-3.1-70b": _model("meta-llama/Llama-3.1-70B-Instruct", 70.6e9, 80, 64, 8),
    "qwen3-8b": _model("Qwen/Qwen3-8B", 8.2e9, 36, 32, 8),
    "qwen3-32b": _model("Qwen/Qwen3-32B", 32.8e9, 64, 64, 8),
    "qwen3-30b-a3b": _model("Qwen/Qwen3-30B-A3B", 30.5e9, 48, 32, 4, active=3.3e9),
}

_NVIDIA: Final = "https://www.nvidia.com/en-us/data-center/"
DEVICES: Final = {
    "a100": Device(312e12, 2.039e12, 80e9, f"{_NVIDIA}a100/"),
    "h100": Device(989e12, 3.35e12, 80e9, f"{_NVIDIA}h100/"),
    "h200": Device(989e12, 4.8e12, 141e9, f"{_NVIDIA}h200/"),
    "l40s": Device(362e12, 0.864e12, 48e9, f"{_NVIDIA}l40s/"),
    "mi300x": Device(
        1307e12, 5.3e12, 192e9, "https://www.amd.com/en/products/accelerators/instinct/mi300.html"
    ),
}

_FORM: Final = re.compile(r"(?P<model>[^@]+)@(?P<device>[a-z0-9]+?)(?:x(?P<number>[1-9]\d?))?")


def preset_of(text: str) -> dict[str, float]:
    """Return the values of `EngineSpec` for MODEL@DEVICE or MODEL@DEVICExN.

    Raises:
        ValueError: no such model or device, or the model does not fit.
    """
    found = _FORM.fullmatch(text)
    model = MODELS.get(found["model"]) if found else None
    device = DEVICES.get(found["device"]) if found else None
    if found is None or model is None or device is None:
        raise ValueError(
            f"preset {text} should be MODEL@DEVICE or MODEL@DEVICExN, of {', '.join(MODELS)} and "
            f"{', '.join(DEVICES)}"
        )
    number = int(found["number"] or 1)
    flops = number * RATE_SHARE * device.flops
    bandwidth = number * BANDWIDTH_SHARE * device.bandwidth
    kv_heads = max(model.kv_heads, number)  # more devices than heads have copies
    kv_bytes = 2 * model.layers * kv_heads * model.head_size * _BYTES
    room = number * (MEMORY_SHARE * device.memory - ACTIVATIONS_BYTES) - _BYTES * model.parameters
    if room < kv_bytes:
        more = f"{found['model']}@{found['device']}x{2 * number if number > 1 else 4}"
        raise ValueError(f"preset {text}: the weights do not fit; more devices, as {more}")
    return {
        "kv_tokens": int(room / kv_bytes),
        # a batch reads all experts that any of its sequences needs: in a batch of some, all
        "base_s": _BYTES * model.parameters / bandwidth,
        "prefill_token_s": 2 * model.active / flops,
        # two products of each query with each key, two operations each
        "prefill_pair_s": 4 * model.layers * model.heads * model.head_size / flops,
        "sequence_s": SEQUENCE_S,
        "kv_token_s": kv_bytes / bandwidth,
    }
