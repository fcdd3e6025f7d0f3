"""The words that some settings take."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal

LogFormat = Literal["json", "text"]
TracesTo = Literal["none", "otlp"]
KubernetesKind = Literal["pods", "endpointslices"]
SAMPLERS: Final = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
"""The samplers, by OpenTelemetry's names."""


class Durability(Enum):
    """When a change may be acknowledged."""

    STRICT = "strict"  # once it is on disk
    RELAXED = "relaxed"  # at once; on disk within --durability-window-s


class FieldValidation(Enum):
    """What happens to an unknown top-level field."""

    STRICT = "strict"  # 422
    WARN = "warn"  # accepted, with a Warning header
    IGNORE = "ignore"
