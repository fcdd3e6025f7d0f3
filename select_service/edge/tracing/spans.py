"""Traced requests: which ones are, when they began, what came of them.

`request_tracer.py` reports their begin and end, `core/instrumentation/marks.py` the steps in
between; `span_export.py` makes spans of them. Ids are random, times are read here, and nothing of a
prompt is kept: neither tokens nor hashes.
"""

from __future__ import annotations

import random
import re
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from select_service.core.instrumentation.marks import MarkRecorder, Marks
from select_service.edge.tracing.span_export import (
    FinishedRequest,
    SpanExport,
    TracingUnavailableError,
    brief,
    otlp_exporter,
)
from select_service.types import CacheThreshold, PairSelection, Selection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

    from select_service.core.admission.queue import Ticket
    from select_service.core.pricing.placement import Placement
    from select_service.settings import Settings
    from select_service.types import Answer

__all__ = ["HERE", "Span", "Tracing", "TracingUnavailableError", "create_tracing", "log_ids"]

_LOW_BITS: Final = 64
_REFUSED: Final = 400
_REFUSAL_BYTES_MAX: Final = 4096
_PREFIX: Final = "select."
_PATH_FACTS: Final = {
    "{worker_id}": "worker_id",
    "{reservation_id}": "reservation_id",
    "{lease_id}": "lease_id",
}


class _Here:
    """The request being worked on, as long as no other code can run on the loop."""

    __slots__ = ("ids", "thread")

    def __init__(self) -> None:
        self.ids: Mapping[str, str] | None = None
        self.thread = 0  # the loop's; records from other threads are about no request

    def get(self) -> Mapping[str, str] | None:
        ids = self.ids
        return ids if ids is not None and threading.get_ident() == self.thread else None


HERE: Final = _Here()
"""The ids of the request that a log record is about. Not a context variable: timers and tasks that
a request happens to start would inherit it."""


class Span:
    """A traced request under way."""

    __slots__ = (
        "began_ns",
        "log_ids",
        "marks",
        "method",
        "params",
        "parent",
        "pattern",
        "span_id",
        "trace_id",
    )

    def __init__(self, trace_id: int, span_id: int, parent: SpanContext | None) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent = parent
        self.log_ids = log_ids(trace_id, span_id)
        self.marks = Marks(time.perf_counter_ns, self.log_ids)
        self.marks.enter("")  # marks the beginning
        self.began_ns = time.time_ns()
        self.method = self.pattern = ""
        self.params: tuple[str, ...] = ()


def log_ids(trace_id: int, span_id: int | None = None) -> dict[str, str]:
    """Return the ids in log records about a request; `span_id` if it is traced."""
    ids = {"trace_id": f"{trace_id:032x}"}
    return ids if span_id is None else {**ids, "span_id": f"{span_id:016x}"}


class Tracing:
    """Decides which requests are traced, and exports their facts once they are answered."""

    def __init__(self, sampler: TraceSampler, export: SpanExport, *, shutdown_s: float) -> None:
        """Trace requests.

        Args:
            sampler: decides which ones.
            export: takes the finished ones.
            shutdown_s: time limit of `close`.
        """
        self.recorder = MarkRecorder()
        self.export = export
        self.sampled = 0
        self.sampler = sampler
        self._shutdown_s = shutdown_s
        seed = random.SystemRandom().getrandbits(256)
        self._random = random.Random(seed).getrandbits

    def begin(self, parent: SpanContext | None) -> Span | None:
        """Begin a span if the request is sampled."""
        if parent is None:
            low = self._random(_LOW_BITS)
            if low >= self.sampler.below:
                return None
            trace_id = (self._random(_LOW_BITS) or 1) << _LOW_BITS | low
        elif self.sampler.takes(parent):
            trace_id = parent.trace_id
        else:
            return None
        self.sampled += 1
        return Span(trace_id, self._random(_LOW_BITS) or 1, parent)

    def finish(self, span: Span, status: int, body: bytes = b"") -> None:
        """Export an answered request; `body` if that is a refusal."""
        marks = span.marks
        ended_ns = time.perf_counter_ns()
        self.recorder.forget(marks)
        refused = status >= _REFUSED and len(body) <= _REFUSAL_BYTES_MAX
        self.export.put(
            FinishedRequest(
                f"{span.method} {span.pattern}",
                span.trace_id,
                span.span_id,
                span.parent,
                span.began_ns,
                marks.steps[0][1],
                ended_ns,
                marks.steps[1:],
                status,
                body if refused else b"",
                _facts(span, status),
            )
        )

    @contextmanager
    def about(self, ticket: Ticket) -> Iterator[None]:
        """Attribute log records to the request of a ticket, whichever one is being worked on."""
        before, marks = HERE.ids, self.recorder.of(ticket)
        HERE.ids = None if marks is None else marks.ids
        try:
            yield
        finally:
            HERE.ids = before

    def start(self) -> None:
        """Attribute log records of this thread to requests. Called by the one that serves."""
        HERE.thread = threading.get_ident()

    def close(self) -> None:
        """Export what is left, within the time limit. Blocks."""
        self.export.close(self._shutdown_s)


def create_tracing(settings: Settings, exporter: SpanExporter | None = None) -> Tracing | None:
    """Return the configured tracing; None: it is off.

    Raises:
        TracingUnavailableError: as `otlp_exporter`.
    """
    if settings.tracing == "none":
        return None
    if exporter is None:
        exporter = otlp_exporter(proxy_from_environment=settings.proxy_from_environment)
    export = SpanExport(
        exporter,
        queue_max=settings.trace_queue_spans_max,
        batch_max=settings.trace_batch_spans_max,
        interval_s=settings.trace_interval_ms / 1e3,
    )
    chosen = sampler(settings.trace_sampler, settings.trace_sample_ratio)
    return Tracing(chosen, export, shutdown_s=settings.trace_shutdown_s)


def _facts(span: Span, status: int) -> dict[str, object]:
    """Return the attributes of a request.

    Strings are cut: many requests may be queued, and an id may be as long as a body.
    """
    marks = span.marks
    facts: dict[str, object] = {
        "http.request.method": span.method,
        "http.route": span.pattern,
        "http.response.status_code": status,
    }
    if span.params:
        for segment, value in zip(_braces(span.pattern), span.params, strict=True):
            facts[_PREFIX + _PATH_FACTS.get(segment, segment)] = brief(value)
    found = _found(marks)
    for name in _Facts.__struct_fields__:
        value = getattr(found, name)
        if value is not None:
            facts[_PREFIX + name] = brief(value) if isinstance(value, str) else value
    return facts


def _found(marks: Marks) -> _Facts:
    found = _Facts()
    if marks.ticket is not None:
        ticket, request = marks.ticket, marks.ticket.request
        found.model_name, found.tenant_id = ticket.partition.scope
        found.isl_tokens = ticket.prompt.isl_tokens
        found.selection_id = request.selection_id
        found.slo_class, found.lora_name = request.slo_class, request.lora_name
    if marks.booked is not None:
        booked = marks.booked
        found.model_name, found.tenant_id = booked.model_name, booked.tenant_id
        found.worker_id, found.dp_rank = str(booked.worker.worker_id), booked.dp_rank
        found.reservation_id, found.isl_tokens = booked.reservation_id, booked.isl_tokens
    if marks.placement is not None:
        _add_placement(found, marks.placement)
    answer = marks.answer
    if answer is None and marks.ticket is not None:
        given = marks.ticket.answer
        answer = given if isinstance(given, Selection | PairSelection | CacheThreshold) else None
    if answer is not None:
        _add_answer(found, answer)
    return found


class _Facts(Struct):
    """Attributes, under `select.`; None: unknown."""

    model_name: str | None = None
    tenant_id: str | None = None
    lora_name: str | None = None
    slo_class: str | None = None
    selection_id: str | None = None
    reservation_id: str | None = None
    isl_tokens: int | None = None
    worker_id: str | None = None  # may exceed OTLP's integers
    dp_rank: int | None = None
    cost: float | None = None
    overlap_tokens: int | None = None
    device_blocks: float | None = None
    host_blocks: float | None = None
    disk_blocks: float | None = None
    effective_prefill_tokens: int | None = None
    potential_decode_blocks: int | None = None
    outcome: str | None = None
    pair_reason: str | None = None
    prefill_worker_id: str | None = None
    prefill_dp_rank: int | None = None


def _add_placement(found: _Facts, placement: Placement) -> None:
    found.cost = placement.cost
    found.device_blocks, found.host_blocks, found.disk_blocks = map(float, placement.held)
    found.effective_prefill_tokens = placement.effective_prefill_tokens
    found.potential_decode_blocks = placement.potential_decode_blocks


def _add_answer(found: _Facts, answer: Answer) -> None:
    found.model_name, found.tenant_id = answer.model_name, answer.tenant_id
    if isinstance(answer.selection_id, str):
        found.selection_id = answer.selection_id
    if isinstance(answer, CacheThreshold):
        found.outcome = answer.finish_reason
        return
    if isinstance(answer.reservation_id, str):
        found.reservation_id = answer.reservation_id
    if isinstance(answer.isl_tokens, int):
        found.isl_tokens = answer.isl_tokens
    leg = answer.decode if isinstance(answer, PairSelection) else answer
    found.worker_id, found.dp_rank = str(leg.worker_id), leg.dp_rank
    found.overlap_tokens = leg.overlap.longest_matched
    found.outcome = "placed"
    if isinstance(answer, PairSelection):
        found.outcome, found.pair_reason = answer.mode, answer.reason
        if answer.prefill is not None:
            found.prefill_worker_id = str(answer.prefill.worker_id)
            found.prefill_dp_rank = answer.prefill.dp_rank


def _braces(pattern: str) -> Iterator[str]:
    return (segment for segment in pattern.split("/") if segment.startswith("{"))


_UNSAMPLED: Final = re.compile(
    rb"\r\n(?i:traceparent):[ \t]*00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][02468ace](?=\r\n|\Z)"
)
_LOW: Final = (1 << 64) - 1


class TraceSampler(NamedTuple):
    """Samples a share of the requests without a parent, the others as the parent says."""

    below: int
    """Trace ids are sampled if their lower 64 bits are below this."""
    asks_parent: bool
    """Otherwise parents are ignored."""

    def passes_over(self, lines: bytes) -> bool:
        """Return whether these lines certainly mean no trace, for a tenth of the cost of parsing.

        True of most requests if the caller samples.
        """
        return self.asks_parent and _UNSAMPLED.search(lines) is not None

    def takes(self, parent: SpanContext) -> bool:
        """Return whether the child of this parent is traced."""
        if self.asks_parent:
            return parent.trace_flags.sampled
        return parent.trace_id & _LOW < self.below


def sampler(name: str, ratio: float) -> TraceSampler:
    """Return a sampler by name; the ratio, from 0 to 1, is for those that have one."""
    kind = name.removeprefix("parentbased_")
    share = {"always_on": 1.0, "always_off": 0.0, "traceidratio": ratio}[kind]
    return TraceSampler(round(share * (_LOW + 1)), name != kind)
