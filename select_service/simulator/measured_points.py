"""What load generators measured of an engine: JSON of vLLM's bench, guidellm and AIPerf.

Each result becomes points: mean lengths, requests at the engine at a time, time to the first token
and between tokens. The number of requests follows from Little's law where it is not given.
"""

import math
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec

from select_service.simulator.trace_lines import fault

_Above0: TypeAlias = Annotated[float, msgspec.Meta(gt=0.0)]


class BadResult(ValueError):
    """A result that cannot be read; the text names its file."""


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


class _Vllm(msgspec.Struct, frozen=True):
    """`vllm bench serve --save-result`; one run a file."""

    completed: _Above0
    duration: _Above0  # s
    total_input_tokens: float
    total_output_tokens: float
    mean_ttft_ms: float
    mean_tpot_ms: float

    @property
    def point(self) -> Point:
        osl = self.total_output_tokens / self.completed
        ttft_s, itl_s = self.mean_ttft_ms / 1e3, self.mean_tpot_ms / 1e3
        return Point(
            isl=self.total_input_tokens / self.completed,
            osl=osl,
            concurrency=self.completed / self.duration * (ttft_s + itl_s * (osl - 1.0)),
            ttft_s=ttft_s,
            itl_s=itl_s,
        )


class _Mean(msgspec.Struct, frozen=True):
    mean: float


class _Successful(msgspec.Struct, frozen=True):
    successful: _Mean


class _GuidellmMetrics(msgspec.Struct, frozen=True):
    prompt_token_count: _Successful
    output_token_count: _Successful
    request_concurrency: _Successful
    time_to_first_token_ms: _Successful
    inter_token_latency_ms: _Successful


class _GuidellmRun(msgspec.Struct, frozen=True):
    metrics: _GuidellmMetrics

    @property
    def point(self) -> Point:
        metrics = self.metrics
        return Point(
            isl=metrics.prompt_token_count.successful.mean,
            osl=metrics.output_token_count.successful.mean,
            concurrency=metrics.request_concurrency.successful.mean,
            ttft_s=metrics.time_to_first_token_ms.successful.mean / 1e3,
            itl_s=metrics.inter_token_latency_ms.successful.mean / 1e3,
        )


class _Guidellm(msgspec.Struct, frozen=True):
    """Output of guidellm; of each run only successful requests."""

    benchmarks: list[_GuidellmRun]


class _Amount(msgspec.Struct, frozen=True):
    avg: float


class _Time(msgspec.Struct, frozen=True):
    avg: float
    unit: Literal["s", "sec", "ms", "us", "ns"] = "ms"

    @property
    def seconds(self) -> float:
        return self.avg * _SECONDS[self.unit]


_SECONDS: Final = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class _Aiperf(msgspec.Struct, frozen=True):
    """`profile_export_aiperf.json`; one run a file."""

    input_sequence_length: _Amount
    output_sequence_length: _Amount
    request_throughput: _Amount
    request_latency: _Time
    time_to_first_token: _Time
    inter_token_latency: _Time

    @property
    def point(self) -> Point:
        return Point(
            isl=self.input_sequence_length.avg,
            osl=self.output_sequence_length.avg,
            concurrency=self.request_throughput.avg * self.request_latency.seconds,
            ttft_s=self.time_to_first_token.seconds,
            itl_s=self.inter_token_latency.seconds,
        )


class _AiperfRecords(msgspec.Struct, frozen=True):
    records: _Aiperf


def read_points(path: str) -> list[Point]:
    """Read a file, whose format its members show.

    Raises:
        OSError: it cannot be read.
        BadResult: naming the file, the member and what is wrong.
    """
    try:
        points = [one.point for one in _runs(Path(path).read_bytes().removeprefix(BOM_UTF8))]
        for one in points:
            one.check()
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise BadResult(fault(error, path)) from None
    return points


def _runs(text: bytes) -> Sequence[_Vllm | _GuidellmRun | _Aiperf]:
    members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if "mean_ttft_ms" in members:
        return [msgspec.json.decode(text, type=_Vllm)]
    if "benchmarks" in members:
        runs = msgspec.json.decode(text, type=_Guidellm).benchmarks
        if runs:
            return runs
    if "records" in members:
        return [msgspec.json.decode(text, type=_AiperfRecords).records]
    if "time_to_first_token" in members:
        return [msgspec.json.decode(text, type=_Aiperf)]
    raise ValueError(
        "neither of vLLM's bench (mean_ttft_ms), nor of guidellm (benchmarks), nor of AIPerf "
        "(time_to_first_token)"
    )
