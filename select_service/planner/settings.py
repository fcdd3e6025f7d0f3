"""The planner's part of the table of settings: a class per command, a row per flag.

Rows are those of `select_service.settings.table`; one that several commands have is named first.
Names are those of the reference planner where the meaning is the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct

from indexer.redaction import redact
from select_service.planner.core.engine_speed import SPEEDS
from select_service.planner.core.recurrence import RECURRING
from select_service.planner.errors import SettingsError
from select_service.settings.row import ValueType, flags_of
from select_service.settings.value_types import (
    any_number,
    any_whole,
    between,
    choice,
    count,
    file,
    number,
    optional,
    repeated,
    seconds,
    switch,
    tcp_port,
    text,
)

PREDICTORS: Final = ("constant", "kalman", "ets", RECURRING, "arima", "prophet", "auto")
POLICIES: Final = ("slo", "compatible", "reactive", "static", "oracle")
_SHORTEST_S: Final = 0.01
"""Between two looks or plans; below it nothing else would be done."""
_FACTOR_MAX: Final = 100.0
_VARIANCE_MAX: Final = 1e12
"""Of counts in the millions; the squares of much larger ones are no numbers."""


def _url(*, with_user: bool = False) -> ValueType:
    """Read an address that can be asked; one that cannot would be asked in vain for ever.

    Args:
        with_user: whether it may contain NAME:PASSWORD@; tokens have a file of their own.
    """

    def parse(text: str) -> str:
        try:
            parts = urlsplit(text)
            _ = parts.port
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or not text.isprintable():
            redacted = redact(text)
            raise ValueError(f"{redacted!r} is not http://HOST:PORT or https://HOST:PORT")
        if "@" in text and not with_user:
            raise ValueError(f"{redact(text)!r} contains a user's name, which would not be sent")
        return text

    return ValueType(parse, "URL")


def _interval() -> ValueType:
    return number(_SHORTEST_S, metavar="S")


_PROFILE: Final = (
    "directory with the measured TTFT and ITL of an engine, as the profiler writes them"
)
_NO_LIKENESS: Final = "do not let slo forecast from times in the past that were like this one"

Ttft: TypeAlias = Annotated[float, any_number("MS").common(), "target for the time to first token"]
Itl: TypeAlias = Annotated[float, any_number("MS").common(), "target for the time between tokens"]
Attainment: TypeAlias = Annotated[
    float | None,
    between(0.0, 1.0, "SHARE").also("--slo-attainment").common(),
    "share of requests for which both targets hold, e.g. 0.99; off: they hold on average",
]
AdjustmentInterval: TypeAlias = Annotated[float, _interval(), "time between two plans"]
MaxGpuBudget: TypeAlias = Annotated[
    int, any_whole("GPUS").common(), "GPUs that all engines together never exceed"
]
MinEndpoint: TypeAlias = Annotated[int, count(0), "least replicas of each role"]
EngineGpus: TypeAlias = Annotated[int, count(metavar="GPUS"), "GPUs of one engine of that role"]
LoadInterval: TypeAlias = Annotated[float, _interval(), "time between two looks of the fast loop"]
SpeedSource: TypeAlias = Annotated[
    str,
    choice(*SPEEDS),
    "how fast engines are taken to be: as profiled, as measured (learnt), or as profiled unless "
    "that is wrong by more than a factor of two or there is no profile (auto)",
]
Mode: TypeAlias = Annotated[
    str,
    choice("compatible", "slo").common(),
    "compatible: the formulas of Dynamo's planner; slo: ours",
]


class PlanSettings(Struct, frozen=True, kw_only=True):
    """What `plan` is asked."""

    profile_results_dir: Annotated[Path, file("DIR"), _PROFILE]
    num_req: Annotated[float, any_number("N"), "number of requests in one interval"]
    isl: Annotated[float, any_number("TOKENS"), "mean length of prompts"]
    osl: Annotated[float, any_number("TOKENS"), "mean length of answers"]
    p_correction: Annotated[float, any_number(), "measured TTFT divided by the profiled one"] = 1.0
    d_correction: Annotated[float, any_number(), "measured ITL divided by the profiled one"] = 1.0
    ttft: Ttft = 500.0
    itl: Itl = 50.0
    attainment: Attainment = None
    adjustment_interval: AdjustmentInterval = 180.0
    max_gpu_budget: MaxGpuBudget = 8
    min_endpoint: MinEndpoint = 1
    prefill_engine_num_gpu: EngineGpus = 1
    decode_engine_num_gpu: EngineGpus = 1
    mode: Annotated[
        str | None,
        optional(choice("compatible", "slo")).common(),
        "compatible: the formulas of Dynamo's planner, which need scipy (the extra planner); slo: "
        "ours; where it is not given: compatible if scipy is installed, else slo",
    ] = None
    pooled: Annotated[
        bool,
        switch(),
        "with --mode slo: no prompt waits while an engine is free, instead of a queue per engine",
    ] = False
    json: Annotated[bool, switch(), "print the answer as JSON"] = False


class TuningSettings(Struct, frozen=True, kw_only=True):
    """How predictors are tuned."""

    adjustment_interval: AdjustmentInterval = 180.0
    log1p: Annotated[
        bool,
        switch().also("--load-predictor-log1p"),
        "forecast logarithms of counts: peaks count for less",
    ] = False
    kalman_q_level: Annotated[
        float, number(0.0, _VARIANCE_MAX, "X"), "kalman: variance of the level gains per step"
    ] = 1.0
    kalman_q_trend: Annotated[
        float, number(0.0, _VARIANCE_MAX, "X"), "kalman: variance of the trend gains per step"
    ] = 0.1
    kalman_r: Annotated[
        float,
        between(0.0, _VARIANCE_MAX, "X"),
        "kalman: variance of a measurement; more smooths more",
    ] = 10.0
    kalman_min_points: Annotated[int, count(), "kalman: intervals before it forecasts"] = 5
    prophet_window_size: Annotated[int, count(), "prophet: intervals it is fitted to"] = 50
    load_predictor_fit_deadline: Annotated[
        float,
        seconds().also("--fit-deadline"),
        "longest time that a decision waits for a library to fit its model; then the last model is "
        "used",
    ] = 10.0


class PredictSettings(TuningSettings, frozen=True, kw_only=True):
    """Which predictor `predict` runs."""

    predictor: Annotated[str, choice(*PREDICTORS), "how the series is forecast"]
    mode: Mode = "compatible"
    json: Annotated[bool, switch(), "print JSON: the only format there is, and the default"] = False


class ReplayedSettings(TuningSettings, frozen=True, kw_only=True):
    """What `replay` is asked."""

    trace: Annotated[Path, file("FILE"), "file of requests, as JSON lines"]
    profile_results_dir: Annotated[Path, file("DIR"), _PROFILE]
    policy: Annotated[
        tuple[str, ...],
        repeated(choice(*POLICIES)).common(),
        "policy to replay; repeat it for several; off: all (compatible where scipy is installed)",
    ] = ()
    load_predictor: Annotated[
        tuple[str, ...],
        repeated(choice(*PREDICTORS)).common(),
        "forecast of slo and compatible; repeat it for several; off: auto",
    ] = ()
    ttft: Ttft = 500.0
    itl: Itl = 50.0
    attainment: Attainment = 0.99
    load_predictor_warmup_trace: Annotated[
        Path | None, file("FILE"), "earlier requests, from which slo and compatible have learnt"
    ] = None
    adjustment_interval: AdjustmentInterval = 60.0
    load_interval: LoadInterval = 5.0
    no_likeness: Annotated[bool, switch(), _NO_LIKENESS] = False
    engine_speed: SpeedSource = "profile"
    startup: Annotated[float, seconds(), "time that an engine takes to start"] = 60.0
    max_gpu_budget: MaxGpuBudget = 64
    prefill_engine_num_gpu: EngineGpus = 1
    decode_engine_num_gpu: EngineGpus = 1
    start_prefill: Annotated[
        int | None,
        optional(count()),
        "prefill replicas at the start; off: those of the best fixed fleet",
    ] = None
    start_decode: Annotated[
        int | None,
        optional(count()),
        "decode replicas at the start; off: those of the best fixed fleet",
    ] = None
    seed: Annotated[int, any_whole(), "seed of what is drawn at random"] = 1
    search_requests: Annotated[
        int,
        count(),
        "requests that may be simulated, some 13,000 a second: what playing each policy leaves, a "
        "quarter at least, finds the best fixed fleet, the frontier and the oracle's plan; of a "
        "longer trace the busiest part is searched first",
    ] = 5_000_000
    out: Annotated[Path | None, file("HTML").common(), "page to write the charts to"] = None
    quiet: Annotated[bool, switch(), "show no progress bar"] = False
    json: Annotated[bool, switch(), "print the answer as JSON"] = False


class InspectSettings(Struct, frozen=True, kw_only=True):
    """What becomes of the profiling results that `profile inspect DIR` checks."""

    out: Annotated[Path | None, file("HTML"), "page to write the charts to"] = None


class RunSettings(TuningSettings, frozen=True, kw_only=True):
    """The settings of `run`."""

    targets: Annotated[
        Path | None, file("FILE").common(), "file of several models, instead of the flags of one"
    ] = None
    model_name: Annotated[str | None, text("NAME").common(), "model whose engines are planned"] = (
        None
    )
    tenant_id: Annotated[str, text("NAME"), "tenant whose engines are planned"] = "default"
    profile_results_dir: Annotated[Path | None, file("DIR").common(), _PROFILE] = None
    prefill_resource: Annotated[str, text("R").common(), "resource that is scaled for prefill"] = ""
    decode_resource: Annotated[str, text("R").common(), "resource that is scaled for decode"] = ""
    ttft: Ttft = 500.0
    itl: Itl = 50.0
    attainment: Attainment = None
    max_gpu_budget: MaxGpuBudget = 8
    min_endpoint: MinEndpoint = 1
    prefill_engine_num_gpu: EngineGpus = 1
    decode_engine_num_gpu: EngineGpus = 1
    no_correction: Annotated[bool, switch(), "do not correct profiles by what is measured"] = False
    engine_speed: SpeedSource = "auto"
    learnt_speed_max_age: Annotated[
        float, seconds(), "age at which what selectors measured counts no more"
    ] = 86_400.0
    learnt_load_factor: Annotated[
        float,
        number(1.0, _FACTOR_MAX, "X"),
        "an engine is planned for at most so many times the context it was measured with",
    ] = 4.0
    load_predictor: Annotated[str, choice(*PREDICTORS).common(), "how demand is forecast"] = "auto"
    load_predictor_warmup_trace: Annotated[
        Path | None, file("FILE"), "earlier requests, from which it has learnt"
    ] = None
    metrics_source: Annotated[
        str, choice("prometheus", "selector", "trace").common(), "where demand is read"
    ] = "prometheus"
    prometheus_url: Annotated[str, _url(with_user=True).common(), "URL of Prometheus"] = (
        "http://127.0.0.1:9090"
    )
    prometheus_token_file: Annotated[
        Path | None,
        file("FILE"),
        "file with a bearer token for Prometheus; read again for each query",
    ] = None
    prometheus_basic_auth_file: Annotated[
        Path | None,
        file("FILE"),
        "file with NAME:PASSWORD for Prometheus; read again for each query",
    ] = None
    prometheus_ca: Annotated[
        Path | None,
        file("FILE"),
        "authorities that sign the certificate of Prometheus, PEM; off: the system's",
    ] = None
    prometheus_names: Annotated[
        str, text("NAMES"), "names of metrics: dynamo, selector, or a YAML file of names"
    ] = "dynamo"
    selector: Annotated[
        tuple[str, ...],
        repeated(_url()).common(),
        "URL of a selector, or of the headless Service that leads to all: every address of a name "
        "is asked. Repeat it for several",
    ] = ()
    selector_lookup_interval: Annotated[
        float, _interval(), "time between two look-ups of the names of selectors"
    ] = 10.0
    token_file: Annotated[
        Path | None, file("FILE"), "file with the token for selectors; read again for each request"
    ] = None
    proxy_from_environment: Annotated[
        bool,
        switch(),
        "ask Prometheus, the Kubernetes API and Ray through the proxies that HTTP_PROXY, "
        "HTTPS_PROXY and ALL_PROXY name, except for NO_PROXY; credentials only inside TLS, and "
        "selectors never",
    ] = False
    trace: Annotated[Path | None, file("FILE"), "file of requests, for --metrics-source trace"] = (
        None
    )
    load_interval: LoadInterval = 5.0
    start_time: Annotated[
        float, seconds(), "time that a replica takes to start, until it was measured"
    ] = 120.0
    no_load_loop: Annotated[bool, switch(), "run no fast loop: forecasts alone decide"] = False
    no_likeness: Annotated[bool, switch(), _NO_LIKENESS] = False
    connector: Annotated[
        str,
        choice("dry-run", "kubernetes", "virtual", "ray").common(),
        "how the fleet is scaled; dry-run only says how it would be",
    ] = "dry-run"
    kubernetes_api: Annotated[str | None, _url(), "URL of the API server; off: that of the pod"] = (
        None
    )
    namespace: Annotated[
        str | None, text("NAME"), "namespace of the resources; off: that of the pod"
    ] = None
    lease: Annotated[
        str,
        choice("cluster", "machine"),
        "where the lease of the acting planner is kept: in Kubernetes or Ray, or by locks on this "
        "machine, as for the virtual connector",
    ] = "cluster"
    lease_name: Annotated[str, text("NAME"), "name of that lease"] = "select-planner"
    ray_dashboard: Annotated[str, _url(), "URL of Ray's dashboard"] = "http://127.0.0.1:8265"
    ray_token_file: Annotated[
        Path | None,
        file("FILE"),
        "file with the token of a Ray cluster that asks for one; off: the variable RAY_AUTH_TOKEN",
    ] = None
    decision_timeout: Annotated[
        float,
        seconds(),
        "longest wait for the next replica of a decision, and for a report of what became of it",
    ] = 1800.0
    drain: Annotated[
        bool,
        switch(),
        "choose and drain the engines that go, and lower a count when they are idle",
    ] = False
    drain_timeout: Annotated[float, seconds(), "longest wait for an engine to be idle"] = 300.0
    state_dir: Annotated[
        Path | None,
        file("DIR").common(),
        "directory for the lock, and for history that survives",
    ] = None
    host: Annotated[
        str, text("ADDRESS"), "address to listen on; 0.0.0.0: all, of IPv4 and IPv6"
    ] = "localhost"
    port: Annotated[int, tcp_port(0).common(), "port to listen on"] = 9085

    @property
    def fast_s(self) -> float | None:
        """Seconds between two turns of the fast loop; None: there is none."""
        return None if self.no_load_loop else self.load_interval

    @property
    def drain_s(self) -> float | None:
        """Seconds that leaving engines get to finish their work; None: they are not drained."""
        return self.drain_timeout if self.drain else None

    def expect_used(self) -> None:
        """Refuse flags that what is asked for would leave aside without a word.

        Raises:
            SettingsError: naming one.
        """
        usual = RunSettings()
        for names, what, is_used in _USES:
            for name in names:
                if getattr(self, name) != getattr(usual, name) and not is_used(self):
                    raise SettingsError(what.format("--" + name.replace("_", "-")))


def _asks_prometheus(settings: RunSettings) -> bool:
    return settings.metrics_source == "prometheus"


def _asks_selectors(settings: RunSettings) -> bool:
    return settings.metrics_source == "selector" or settings.drain


_USES: Final[tuple[tuple[tuple[str, ...], str, Callable[[RunSettings], bool]], ...]] = (
    (("selector",), "{} is of --metrics-source selector and of --drain", _asks_selectors),
    (("selector_lookup_interval",), "{} is of --selector", lambda one: bool(one.selector)),
    (
        ("token_file",),
        "{} is for the selectors of --metrics-source selector and of --drain; "
        "Prometheus has --prometheus-token-file",
        _asks_selectors,
    ),
    (
        (
            "prometheus_url",
            "prometheus_token_file",
            "prometheus_basic_auth_file",
            "prometheus_ca",
            "prometheus_names",
        ),
        "{} is of --metrics-source prometheus",
        _asks_prometheus,
    ),
    (
        ("prometheus_token_file",),
        "{} and --prometheus-basic-auth-file: one of them is shown",
        lambda one: one.prometheus_basic_auth_file is None,
    ),
    (
        ("prometheus_token_file", "prometheus_basic_auth_file"),
        "--prometheus-url contains a user's name: a file of credentials replaces it",
        lambda one: "@" not in one.prometheus_url,
    ),
    (
        ("prometheus_ca",),
        "{} is for a --prometheus-url with https://",
        lambda one: one.prometheus_url.startswith("https:"),
    ),
    (
        ("learnt_speed_max_age", "learnt_load_factor"),
        "{} is of an --engine-speed that is learnt",
        lambda one: one.engine_speed != "profile",
    ),
    (("trace",), "{} is of --metrics-source trace", lambda one: one.metrics_source == "trace"),
    (
        ("model_name", "profile_results_dir"),
        "{}: --targets names them",
        lambda one: one.targets is None,
    ),
    (
        ("kubernetes_api", "namespace"),
        "{} is of --connector kubernetes",
        lambda one: one.connector == "kubernetes",
    ),
    (
        ("ray_token_file", "ray_dashboard"),
        "{} is of --connector ray",
        lambda one: one.connector == "ray",
    ),
    (("drain_timeout",), "{} is of --drain", lambda one: one.drain),
    (
        ("load_interval",),
        "{} is of the loop that --no-load-loop leaves out",
        lambda one: not one.no_load_loop,
    ),
    (
        ("proxy_from_environment",),
        "{} is of --metrics-source prometheus, --connector kubernetes and --connector ray",
        lambda one: _asks_prometheus(one) or one.connector in {"kubernetes", "ray"},
    ),
    (
        (
            "tenant_id",
            "prefill_resource",
            "decode_resource",
            "ttft",
            "itl",
            "attainment",
            "min_endpoint",
            "start_time",
            "prefill_engine_num_gpu",
            "decode_engine_num_gpu",
        ),
        "{}: with --targets, the file says so of each model",
        lambda one: one.targets is None,
    ),
)
"""Flags, what they are of, and whether that is asked for; the first left aside is reported."""

SECTIONS: Final = {
    "run": flags_of(RunSettings, inherited=True),
    "plan": flags_of(PlanSettings),
    "predict": flags_of(PredictSettings, inherited=True),
    "replay": flags_of(ReplayedSettings, inherited=True),
    "profile inspect": flags_of(InspectSettings),
}
"""The rows by command, in the order of the reference."""
