"""One who takes part in the comparison: a policy as it is configured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = ["TARGET_TTFT_S", "Contender"]

TARGET_TTFT_S = 1.0
"""Prompt tokens booked on a rank should be computed within that: half of critical's target."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A line of the table."""

    name: str
    policy: str
    config: dict[str, Any]

    def in_model_time(self, time_scale: float) -> dict[str, Any]:
        """Its configuration where a second of the play takes a second."""
        config = dict(self.config)
        if "refill_rate" in config:
            config["refill_rate"] *= time_scale
        if "targets_ms" in config:
            config["targets_ms"] = {
                name: ms / time_scale for name, ms in config["targets_ms"].items()
            }
        return config

    def flags(self, time_scale: float) -> tuple[str, ...]:
        """As the service is started."""
        return (
            "--admission-policy",
            self.policy,
            "--admission-config",
            msgspec.json.encode(self.config).decode(),
            "--slo-target-ttft-s",
            str(TARGET_TTFT_S * time_scale),
        )
