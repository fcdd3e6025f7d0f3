"""A policy in the comparison, as it is configured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from select_service.core.admission.pool_load import DEFAULT_TARGET_TTFT_S

__all__ = ["Contender"]


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
        flags: tuple[str, ...] = ("--admission-policy", self.policy, "--admission-config")
        flags += (msgspec.json.encode(self.config).decode(),)
        if self.policy == "slo-shed":  # it follows its targets, which are scaled already
            return flags
        return (*flags, "--slo-target-ttft-s", str(DEFAULT_TARGET_TTFT_S * time_scale))
