"""What the service tells of itself: decisions, the doctor, metrics, the console, logs, traces."""

from __future__ import annotations

from typing import Final

from select_service.settings.defaults import SAMPLERS
from select_service.settings.flags import values
from select_service.settings.flags.flag import Flag

TELLING: Final = (
    Flag(
        "--decision-ring",
        values.whole(0, 8192),
        "N",
        "decisions kept for /decisions; 0 = none",
        watch="decision_records",
    ),
    Flag(
        "--decision-ring-bytes",
        values.whole(0, values.BYTES_MAX),
        "N",
        "memory they may take together; 0 = none are kept",
        watch="decision_bytes",
    ),
    Flag(
        "--doctor-interval-s",
        values.seconds(zero=True),
        "S",
        "how often to check whether something is wired wrong; 0: only when asked",
        watch="doctor_examinations_total",
    ),
    Flag(
        "--doctor-samples-max",
        values.whole(0, values.COUNT_MAX),
        "N",
        "prompts looked at between two examinations, the first ones; 0: none",
        watch="doctor_examinations_total",
    ),
    Flag(
        "--doctor-findings-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "findings told by /ready?verbose=true, of each kind some; the metric counts all",
        watch='limit_hits_total{name="doctor_findings_max"}',
    ),
    Flag(
        "--metrics-rank-series-max",
        values.whole(0, values.COUNT_MAX),
        "N",
        "ranks with series of their own in /metrics; the rest is only counted",
        watch="ranks_unlisted",
    ),
    Flag(
        "--metrics-scope-series-max",
        values.whole(0, values.COUNT_MAX),
        "N",
        "scopes with series of their own in /metrics; the rest is summed up under `other`",
        watch="scopes_unlisted",
    ),
    Flag(
        "--console-clients-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "pages of the console that are kept up to date at a time",
        watch="console_clients",
    ),
    Flag(
        "--log-level",
        values.choice("debug", "info", "warning", "error"),
        "debug|info|warning|error",
        "least important record to log",
    ),
    Flag("--log-format", values.choice("json", "text"), "json|text", "form of the log on stderr"),
    Flag(
        "--tracing",
        values.choice("none", "otlp"),
        "none|otlp",
        "trace requests and export them by OTLP over HTTP; takes the extra otel",
        env="OTEL_TRACES_EXPORTER",
    ),
    Flag(
        "--trace-sampler",
        values.choice(*SAMPLERS),
        "NAME",
        "which requests are traced, by OpenTelemetry's names",
        watch="traced_requests_total",
        env="OTEL_TRACES_SAMPLER",
    ),
    Flag(
        "--trace-sample-ratio",
        values.number(0.0, 1.0),
        "SHARE",
        "share of requests without a parent span that are traced, where the sampler uses a ratio",
        watch="traced_requests_total",
        env="OTEL_TRACES_SAMPLER_ARG",
    ),
    Flag(
        "--trace-queue-spans-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "spans that wait to be exported; more are dropped",
        watch='trace_spans_total{outcome="dropped"}',
        env="OTEL_BSP_MAX_QUEUE_SIZE",
    ),
    Flag(
        "--trace-batch-spans-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "spans exported at once",
        watch="trace_queue_spans",
        env="OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    ),
    Flag(
        "--trace-interval-ms",
        values.whole(1, values.COUNT_MAX),
        "MS",
        "how long spans wait for company",
        watch="trace_queue_spans",
        env="OTEL_BSP_SCHEDULE_DELAY",
    ),
    Flag(
        "--trace-shutdown-s",
        values.seconds(zero=True),
        "S",
        "how long the last spans may take at the end",
        watch='trace_spans_total{outcome="dropped"}',
    ),
    Flag("--no-console", None, "", "serve no console at /console"),
    Flag("--access-log", None, "", "log every request"),
)
