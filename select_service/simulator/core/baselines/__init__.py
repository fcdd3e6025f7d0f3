"""Policies of other systems, to compare with: one file each, from their published description.

A new one is a class with a `name` and a `meaning` in a file of its own, and a word in `BASELINES`.
"""

from typing import Final

from select_service.simulator.core.baselines.d2lpm import D2Lpm
from select_service.simulator.core.baselines.llm_d import LlmD
from select_service.simulator.core.baselines.lmetric import LMetric
from select_service.simulator.core.baselines.oracle import BoundRouter, OracleRouter
from select_service.simulator.core.baselines.preble import PrebleE2
from select_service.simulator.core.baselines.sglang import SglangCacheAware

__all__ = ["BASELINES", "BEYOND", "IMPOSSIBLE"]

BASELINES: Final = (LMetric, PrebleE2, D2Lpm, LlmD, SglangCacheAware)

IMPOSSIBLE: Final = (OracleRouter, BoundRouter)
"""What no router can be: how much is left to win."""

BEYOND: Final = frozenset(kind.name for kind in IMPOSSIBLE)
"""Their names: they take no part where a report says which wins."""
