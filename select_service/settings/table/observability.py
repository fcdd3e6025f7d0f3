"""What the service says of itself: decisions, findings, metrics, console, logs, traces."""

from typing import Annotated, Final

from select_service.settings.row import HITS
from select_service.settings.table.durability import DurabilitySettings
from select_service.settings.value_types import (
    SAMPLERS,
    LogFormat,
    TracesTo,
    choice,
    count,
    http_url,
    number,
    seconds,
    size,
    switch,
    whole,
)
from select_service.types import CoreLimits
from select_service.types.doctor import DoctorLimits

_CORE: Final = CoreLimits()
_DOCTOR: Final = DoctorLimits()


class ObservabilitySettings(DurabilitySettings, frozen=True, kw_only=True):
    """What the service says of itself: decisions, findings, metrics, console, logs, traces."""

    decision_ring: Annotated[
        int, whole(0, 8192).watched("decision_records"), "decisions kept for /decisions; 0 = none"
    ] = _CORE.decision_ring
    decision_ring_bytes: Annotated[
        int, size(0).watched("decision_bytes"), "memory they may take together; 0 = none are kept"
    ] = _CORE.decision_ring_bytes
    doctor_interval_s: Annotated[
        float,
        seconds(zero=True).watched("doctor_examinations_total"),
        "how often to check whether something is wired wrong; 0: only when asked",
    ] = _DOCTOR.interval_s
    doctor_samples_max: Annotated[
        int,
        count(0).watched("doctor_examinations_total"),
        "prompts looked at between two examinations, the first ones; 0: none",
    ] = _DOCTOR.samples_max
    doctor_findings_max: Annotated[
        int,
        count().watched(HITS),
        "findings listed by /ready?verbose=true, some of each kind; the metric counts all",
    ] = _DOCTOR.findings_max
    doctor_probe_workers: Annotated[
        bool,
        switch(),
        "send each new worker a few short prompts of made-up tokens, and say what its events tell "
        "otherwise than expected; no other request ever goes from here to an engine's model",
    ] = _DOCTOR.probe_workers
    metrics_rank_series_max: Annotated[
        int,
        count(0).watched("ranks_unlisted"),
        "ranks with series of their own in /metrics; the rest is only counted",
    ] = 512  # some 25 ms per scrape, in slices
    metrics_scope_series_max: Annotated[
        int,
        count(0).watched("scopes_unlisted"),
        "scopes with series of their own in /metrics; the rest is summed up under `other`",
    ] = 64  # of some 30 series each
    console_clients_max: Annotated[
        int,
        count().watched("console_clients"),
        "pages of the console that are kept up to date at a time",
    ] = 16  # each costs a socket and a few seconds of unread messages
    console_grafana_url: Annotated[
        str | None, http_url(), "your Grafana dashboard, linked from the console; off: no link"
    ] = None
    log_level: Annotated[
        str, choice("debug", "info", "warning", "error"), "least important record to log"
    ] = "info"
    log_format: Annotated[LogFormat, choice("json", "text"), "form of the log on stderr"] = "text"
    tracing: Annotated[
        TracesTo,
        choice("none", "otlp").watched(env="OTEL_TRACES_EXPORTER"),
        "trace requests and export them by OTLP over HTTP; takes the extra otel",
    ] = "none"
    trace_sampler: Annotated[
        str,
        choice(*SAMPLERS, metavar="NAME").watched(
            "traced_requests_total", env="OTEL_TRACES_SAMPLER"
        ),
        "which requests are traced, by OpenTelemetry's names",
    ] = "parentbased_traceidratio"
    trace_sample_ratio: Annotated[
        float,
        number(0.0, 1.0, metavar="SHARE").watched(
            "traced_requests_total", env="OTEL_TRACES_SAMPLER_ARG", limit=False
        ),
        "share of requests without a parent span that are traced, where the sampler uses a ratio",
    ] = 1.0
    trace_queue_spans_max: Annotated[
        int,
        count().watched('trace_spans_total{outcome="dropped"}', env="OTEL_BSP_MAX_QUEUE_SIZE"),
        "spans that wait to be exported; more are dropped",
    ] = 2048  # the defaults of OpenTelemetry's SDK
    trace_batch_spans_max: Annotated[
        int,
        count().watched("trace_queue_spans", env="OTEL_BSP_MAX_EXPORT_BATCH_SIZE"),
        "spans exported at once",
    ] = 512
    trace_interval_ms: Annotated[
        int,
        count(metavar="MS").watched("trace_queue_spans", env="OTEL_BSP_SCHEDULE_DELAY"),
        "how long spans wait to be exported together",
    ] = 5000
    trace_shutdown_s: Annotated[
        float,
        seconds(zero=True).watched('trace_spans_total{outcome="dropped"}'),
        "how long exporting the last spans may take when the process ends",
    ] = 2.0
    no_console: Annotated[
        bool, switch(), "serve no console at /console, and no page of the API at /docs"
    ] = False
    access_log: Annotated[bool, switch(), "log every request"] = False
