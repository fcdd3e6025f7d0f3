"""What load generators measured of an engine: JSON of vLLM's bench, guidellm and AIPerf.

Each result becomes points: mean lengths, requests at the engine at a time, time to the first token
and between tokens. The number of requests follows from Little's law where it is not told.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Point", "read_points"]


class Point(NamedTuple):
    """Means of one run of a load generator; times in seconds, lengths in tokens."""

    isl: float
    osl: float
    concurrency: float
    ttft_s: float
    itl_s: float
    cached: float = 0.0  # tokens of the prompt that are not computed

    @property
    def computed(self) -> tuple[float, float]:
        """Tokens of the prompt to compute, and pairs of them with themselves and those before."""
        new = self.isl - self.cached
        return new, new * (self.cached + new / 2)

    def check(self) -> None:
        """Refuse what no engine can do.

        Raises:
            ValueError: naming it.
        """
        for name, value in self._asdict().items():
            if name != "cached" and not 0.0 < value < math.inf:
                raise ValueError(f"{name} is {value:g}: it must be above 0, and finite")
        if self.osl < 2.0:  # noqa: PLR2004 - one token has no time between
            raise ValueError("answers of a single token have no time between tokens")


def read_points(path: str) -> list[Point]:
    """Read a file, whose format its members tell.

    Raises:
        OSError: it cannot be read.
        ValueError: naming the file and what is wrong.
    """
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Any])
        points = list(_points(found))
        for one in points:
            one.check()
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: {error!r}: a member is missing or has another type") from None
    return points


def _points(found: Mapping[str, Any]) -> Iterator[Point]:
    if "mean_ttft_ms" in found:
        yield _of_vllm(found)
    elif found.get("benchmarks"):
        yield from map(_of_guidellm, found["benchmarks"])
    elif "time_to_first_token" in found or "records" in found:
        yield _of_aiperf(found.get("records", found))
    else:
        raise ValueError(
            "neither of vLLM's bench (mean_ttft_ms), nor of guidellm (benchmarks), nor of AIPerf "
            "(time_to_first_token)"
        )


def _of_vllm(found: Mapping[str, Any]) -> Point:
    """`vllm bench serve --save-result`; one run a file."""
    completed = found["completed"]
    osl = found["total_output_tokens"] / completed
    ttft_s, itl_s = found["mean_ttft_ms"] / 1e3, found["mean_tpot_ms"] / 1e3
    return Point(
        isl=found["total_input_tokens"] / completed,
        osl=osl,
        concurrency=completed / found["duration"] * (ttft_s + itl_s * (osl - 1.0)),
        ttft_s=ttft_s,
        itl_s=itl_s,
    )


def _of_guidellm(found: Mapping[str, Any]) -> Point:
    """One of the `benchmarks` of guidellm's output; only successful requests."""
    metrics = found["metrics"]

    def mean(name: str) -> float:
        value: float = metrics[name]["successful"]["mean"]
        return value

    return Point(
        isl=mean("prompt_token_count"),
        osl=mean("output_token_count"),
        concurrency=mean("request_concurrency"),
        ttft_s=mean("time_to_first_token_ms") / 1e3,
        itl_s=mean("inter_token_latency_ms") / 1e3,
    )


_SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def _of_aiperf(found: Mapping[str, Any]) -> Point:
    """`profile_export_aiperf.json`; one run a file."""

    def mean(name: str) -> float:
        return float(found[name]["avg"])

    def mean_s(name: str) -> float:
        return mean(name) * _SECONDS[found[name].get("unit", "ms")]

    return Point(
        isl=mean("input_sequence_length"),
        osl=mean("output_sequence_length"),
        concurrency=mean("request_throughput") * mean_s("request_latency"),
        ttft_s=mean_s("time_to_first_token"),
        itl_s=mean_s("inter_token_latency"),
    )
