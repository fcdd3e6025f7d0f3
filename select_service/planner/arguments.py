"""Flags of `select-planner`, and what they become.

Names are those of the reference planner where the meaning is the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

from select_service.planner.edge.predictors import PREDICTORS, PredictorSettings
from select_service.planner.edge.what_if import Question
from select_service.planner.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.planner.core.demand import Interval
    from select_service.planner.edge.replay_command import ReplayQuestion
    from select_service.planner.edge.run_command import RunSettings
    from select_service.planner.edge.run_settings import ModelSettings

__all__ = [
    "add_question",
    "add_replay",
    "add_run",
    "add_tuning",
    "question_of",
    "replay_of",
    "settings_of",
    "tuning_of",
]

MODES = ("compatible", "slo")
PROFILE = "measured TTFT and ITL of an engine, as the profiler writes them"
NO_LIKENESS = "what came in the past after times like this one decides nothing"
_SHORTEST_S = 0.01
"""Between two looks or plans; below it nothing else would be done."""
_PORT_MOST = 65535
N = TypeVar("N", int, float)


def add_goals(parser: argparse.ArgumentParser) -> None:
    """Targets and bounds, for `plan` and `run`."""
    told = "(default: %(default)s)"
    add = parser.add_argument
    add("--ttft", type=float, default=500.0, metavar="MS", help=f"time to first token {told}")
    add("--itl", type=float, default=50.0, metavar="MS", help=f"time between tokens {told}")
    add(
        "--attainment",
        "--slo-attainment",
        type=_share,
        metavar="SHARE",
        help="share of requests for which both hold, 0.99 for example (default: on average)",
    )
    add(
        "--adjustment-interval",
        type=_interval,
        default=180.0,
        metavar="S",
        help=f"between plans {told}",
    )
    add("--max-gpu-budget", type=int, default=8, metavar="GPUS", help=f"never more {told}")
    add("--min-endpoint", type=_count, default=1, metavar="N", help=f"replicas of a role {told}")
    _add_engines(parser)


def _add_engines(parser: argparse.ArgumentParser) -> None:
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-engine-num-gpu",
            type=_natural,
            default=1,
            metavar="GPUS",
            help="of one engine (default: %(default)s)",
        )


def add_question(parser: argparse.ArgumentParser) -> None:
    """What `plan` is asked."""
    told = "(default: %(default)s)"
    add = parser.add_argument
    add("--profile-results-dir", type=Path, required=True, metavar="DIR", help=PROFILE)
    add("--num-req", type=float, required=True, metavar="N", help="requests in one interval")
    add("--isl", type=float, required=True, metavar="TOKENS", help="mean prompt length")
    add("--osl", type=float, required=True, metavar="TOKENS", help="mean answer length")
    add("--p-correction", type=float, default=1.0, help=f"measured TTFT over profiled {told}")
    add("--d-correction", type=float, default=1.0, help=f"measured ITL over profiled {told}")
    add_goals(parser)
    add(
        "--mode",
        choices=MODES,
        default="compatible",
        help="the reference's formulas, or ours (default: %(default)s)",
    )
    add(
        "--pooled",
        action="store_true",
        help="slo: no prompt waits while an engine is free (default: a queue per engine)",
    )
    add("--json", action="store_true", help="the answer as JSON")


def question_of(arguments: argparse.Namespace) -> Question:
    """Return the question."""
    return Question(
        requests=arguments.num_req,
        isl=arguments.isl,
        osl=arguments.osl,
        p_correction=arguments.p_correction,
        d_correction=arguments.d_correction,
        ttft_ms=arguments.ttft,
        itl_ms=arguments.itl,
        interval_s=arguments.adjustment_interval,
        gpus_max=arguments.max_gpu_budget,
        endpoints_min=arguments.min_endpoint,
        prefill_gpus=arguments.prefill_engine_num_gpu,
        decode_gpus=arguments.decode_engine_num_gpu,
        attainment=arguments.attainment,
        pooled=arguments.pooled,
    )


def add_tuning(parser: argparse.ArgumentParser) -> None:
    """Which predictor `predict` runs."""
    add = parser.add_argument
    add("--predictor", choices=PREDICTORS, required=True, help="who forecasts")
    add_kalman(parser)
    add(
        "--adjustment-interval",
        type=_interval,
        default=180.0,
        metavar="S",
        help="between two numbers of the series (default: %(default)s)",
    )
    add(
        "--mode",
        choices=MODES,
        default="compatible",
        help="the reference's, with forecasts from the first point and below 0, or ours "
        "(default: %(default)s)",
    )
    add("--json", action="store_true", help="the only format there is, and the default")


def add_kalman(parser: argparse.ArgumentParser) -> None:
    """How predictors are tuned."""
    told = "(default: %(default)s)"
    add = parser.add_argument
    log = "forecast logarithms of counts: peaks count for less"
    add("--log1p", "--load-predictor-log1p", dest="log1p", action="store_true", help=log)
    level, trend = (f"kalman: variance {of} gains per step" for of in ("the level", "the trend"))
    add("--kalman-q-level", type=_at_least_0, default=1.0, metavar="X", help=f"{level} {told}")
    add("--kalman-q-trend", type=_at_least_0, default=0.1, metavar="X", help=f"{trend} {told}")
    noise = f"kalman: variance of a measurement; more smooths more {told}"
    add("--kalman-r", type=_positive, default=10.0, metavar="X", help=noise)
    fewest = f"kalman: intervals before it forecasts {told}"
    add("--kalman-min-points", type=_natural, default=5, metavar="N", help=fewest)
    window = f"prophet: intervals it is fitted to {told}"
    add("--prophet-window-size", type=_natural, default=50, metavar="N", help=window)
    add(
        "--load-predictor-fit-deadline",
        "--fit-deadline",
        dest="fit_deadline",
        type=_positive,
        default=10.0,
        metavar="S",
        help="that a decision waits for the fit of a library; then the model from before goes on "
        "(default: %(default)s)",
    )


def tuning_of(arguments: argparse.Namespace) -> PredictorSettings:
    """Return the settings of one predictor."""
    if not hasattr(arguments, "predictor"):  # as `predict` calls it
        return _tuning(arguments, arguments.load_predictor)
    compatible = arguments.mode == "compatible"
    return _tuning(arguments, arguments.predictor, compatible=compatible)


def _tuning(
    arguments: argparse.Namespace, name: str, *, compatible: bool = False
) -> PredictorSettings:
    return PredictorSettings(
        name=name,
        log1p=arguments.log1p,
        q_level=arguments.kalman_q_level,
        q_trend=arguments.kalman_q_trend,
        r=arguments.kalman_r,
        points_min=arguments.kalman_min_points,
        prophet_window=arguments.prophet_window_size,
        fit_deadline_s=arguments.fit_deadline,
        interval_s=arguments.adjustment_interval,
        compatible=compatible,
    )


def add_replay(parser: argparse.ArgumentParser) -> None:
    """What `replay` is asked."""
    told = "(default: %(default)s)"
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help="requests, as JSON lines")
    add("--profile-results-dir", type=Path, required=True, metavar="DIR", help=PROFILE)
    add(
        "--policy",
        action="append",
        choices=("slo", "compatible", "reactive", "oracle"),
        help="once per policy (default: all)",
    )
    add(
        "--load-predictor",
        action="append",
        choices=PREDICTORS,
        help="once per predictor that slo and compatible are run with (default: auto)",
    )
    add_kalman(parser)
    add("--ttft", type=float, default=500.0, metavar="MS", help=f"time to first token {told}")
    add("--itl", type=float, default=50.0, metavar="MS", help=f"time between tokens {told}")
    add(
        "--attainment",
        "--slo-attainment",
        type=_share,
        default=0.99,
        metavar="SHARE",
        help=f"share of requests that slo and oracle size for {told}",
    )
    add(
        "--load-predictor-warmup-trace",
        type=Path,
        metavar="FILE",
        help="what came before: slo and compatible have learnt it",
    )
    add(
        "--adjustment-interval",
        type=_interval,
        default=60.0,
        metavar="S",
        help=f"between plans {told}",
    )
    add("--load-interval", type=_interval, default=5.0, metavar="S", help=f"fast loop {told}")
    add("--no-likeness", action="store_true", help=f"slo: {NO_LIKENESS}")
    add("--startup", type=_positive, default=60.0, metavar="S", help=f"of an engine {told}")
    add("--max-gpu-budget", type=int, default=64, metavar="GPUS", help=f"never more {told}")
    _add_engines(parser)
    add("--start-prefill", type=_natural, default=1, metavar="N", help=f"replicas {told}")
    add("--start-decode", type=_natural, default=1, metavar="N", help=f"replicas {told}")
    add("--seed", type=int, default=1, metavar="N", help=f"of what is drawn {told}")
    add("--out", type=Path, metavar="HTML", help="where the charts go")
    add("--json", action="store_true", help="the answer as JSON")


def replay_of(arguments: argparse.Namespace) -> ReplayQuestion:
    """Return what `replay` is asked."""
    from select_service.planner.edge.replay_command import ReplayQuestion  # the simulator
    from select_service.planner.edge.trace_replay import ReplaySettings

    settings = ReplaySettings(
        interval_s=arguments.adjustment_interval,
        fast_s=min(arguments.load_interval, arguments.adjustment_interval),
        startup_s=arguments.startup,
        ttft_ms=arguments.ttft,
        itl_ms=arguments.itl,
        prefill_gpus=arguments.prefill_engine_num_gpu,
        decode_gpus=arguments.decode_engine_num_gpu,
        start=(arguments.start_prefill, arguments.start_decode),
        seed=arguments.seed,
        attainment=arguments.attainment,
        likens=not arguments.no_likeness,
        warmup=_past(arguments.load_predictor_warmup_trace, arguments.adjustment_interval),
    )
    return ReplayQuestion(
        arguments.trace,
        arguments.profile_results_dir,
        tuple(arguments.policy or ("slo", "compatible", "reactive", "oracle")),
        tuple(_tuning(arguments, name) for name in arguments.load_predictor or ("auto",)),
        settings,
        arguments.max_gpu_budget,
    )


def _past(trace: Path | None, interval_s: float) -> tuple[Interval, ...]:
    from select_service.planner.core.demand import intervals_of
    from select_service.planner.edge.sources.trace import read_trace

    return () if trace is None else tuple(intervals_of(read_trace(trace), interval_s))


def add_run(parser: argparse.ArgumentParser) -> None:
    """What `run` is told."""
    told = "(default: %(default)s)"
    add = parser.add_argument
    add("--targets", type=Path, metavar="FILE", help="several models, instead of the next flags")
    add("--model-name", metavar="NAME", help="whose engines are planned")
    add("--tenant-id", default="default", metavar="NAME", help=f"and for whom {told}")
    add("--profile-results-dir", type=Path, metavar="DIR", help=PROFILE)
    add("--prefill-resource", default="", metavar="R", help="what the connector scales")
    add("--decode-resource", default="", metavar="R", help="the same")
    add_goals(parser)
    add("--no-correction", action="store_true", help="profiles are taken as they are")
    add("--load-predictor", choices=PREDICTORS, default="auto", help=f"who forecasts {told}")
    add_kalman(parser)
    add("--load-predictor-warmup-trace", type=Path, metavar="FILE", help="it has learnt this")
    add(
        "--metrics-source",
        choices=("prometheus", "selector", "trace"),
        default="prometheus",
        help=f"where demand is read {told}",
    )
    add(
        "--prometheus-url",
        type=_url,
        default="http://127.0.0.1:9090",
        metavar="URL",
        help=f"asked {told}",
    )
    add(
        "--prometheus-names",
        default="dynamo",
        metavar="NAMES",
        help=f"whose metrics: dynamo, selector, or a YAML file of names {told}",
    )
    add(
        "--selector",
        action="append",
        type=_url,
        default=[],
        metavar="URL",
        help="once per selector, none of them behind an address they share; for --metrics-source "
        "selector and for --drain",
    )
    add("--token-file", type=Path, metavar="FILE", help="bearer token for selectors")
    add("--trace", type=Path, metavar="FILE", help="requests, for --metrics-source trace")
    add("--load-interval", type=_interval, default=5.0, metavar="S", help=f"fast loop {told}")
    add(
        "--start-time",
        type=_positive,
        default=120.0,
        metavar="S",
        help=f"of a replica, until it was measured {told}",
    )
    add("--no-load-loop", action="store_true", help="forecasts alone decide")
    add("--no-likeness", action="store_true", help=NO_LIKENESS)
    connectors = ("dry-run", "kubernetes", "virtual", "ray")
    add("--connector", choices=connectors, default="dry-run", help=f"who scales {told}")
    add("--kubernetes-api", type=_url, metavar="URL", help="API server (default: that of the pod)")
    add("--namespace", metavar="NAME", help="of the resources (default: that of the pod)")
    add(
        "--lease",
        choices=("cluster", "machine"),
        default="cluster",
        help="where it is kept who acts: in Kubernetes or Ray, or by locks on this machine, as for "
        f"the virtual connector {told}",
    )
    add("--lease-name", default="select-planner", metavar="NAME", help=f"of that {told}")
    add(
        "--ray-dashboard",
        type=_url,
        default="http://127.0.0.1:8265",
        metavar="URL",
        help=f"of Ray {told}",
    )
    add(
        "--ray-token-file",
        type=Path,
        metavar="FILE",
        help="bearer token of a Ray cluster that asks for one (default: RAY_AUTH_TOKEN)",
    )
    add(
        "--decision-timeout",
        type=_positive,
        default=1800.0,
        metavar="S",
        help="replicas that are not there are not waited for any longer than that after the last "
        f"came, nor is a report of what became of a decision {told}",
    )
    add(
        "--drain",
        action="store_true",
        help="engines that go are chosen and drained first: a count is lowered when they are idle",
    )
    add(
        "--drain-timeout",
        type=_positive,
        default=300.0,
        metavar="S",
        help=f"or after so long {told}",
    )
    add("--state-dir", type=Path, metavar="DIR", help="history that survives, and the lock")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=f"listened on {told}")
    add("--port", type=_port, default=9085, metavar="N", help=f"the same {told}")


def settings_of(arguments: argparse.Namespace) -> RunSettings:
    """Return what `run` is told."""
    from select_service.planner.edge.run_command import RunSettings  # a server

    _expect_used(arguments)
    plain = {
        name: getattr(arguments, name)
        for name in (
            "targets",
            "prometheus_url",
            "prometheus_names",
            "token_file",
            "trace",
            "connector",
            "kubernetes_api",
            "namespace",
            "lease",
            "lease_name",
            "ray_dashboard",
            "ray_token_file",
            "state_dir",
            "host",
            "port",
        )
    }
    return RunSettings(
        tuning=tuning_of(arguments),
        gpus_max=arguments.max_gpu_budget,
        model=_single(arguments),
        source=arguments.metrics_source,
        selectors=tuple(arguments.selector),
        warmup_trace=arguments.load_predictor_warmup_trace,
        decision_timeout_s=arguments.decision_timeout,
        drain_s=arguments.drain_timeout if arguments.drain else None,
        fast_s=None if arguments.no_load_loop else arguments.load_interval,
        correct=not arguments.no_correction,
        likens=not arguments.no_likeness,
        **plain,
    )


_OF_ONE_MODEL: Final = (
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
)
"""What a targets file has for each model, and flags have for a single one."""


def _expect_used(arguments: argparse.Namespace) -> None:
    """Refuse flags that what is asked for would leave aside without a word.

    Raises:
        SettingsError: naming one.
    """
    source, connector = arguments.metrics_source, arguments.connector
    for given, name, is_used in (
        (
            arguments.selector,
            "--selector is of --metrics-source selector and of --drain",
            source == "selector" or arguments.drain,
        ),
        (arguments.trace, "--trace is of --metrics-source trace", source == "trace"),
        (arguments.model_name, "--model-name: --targets names them", arguments.targets is None),
        (
            arguments.profile_results_dir,
            "--profile-results-dir: --targets names them",
            arguments.targets is None,
        ),
        (
            arguments.kubernetes_api,
            "--kubernetes-api is of --connector kubernetes",
            connector == "kubernetes",
        ),
        (arguments.ray_token_file, "--ray-token-file is of --connector ray", connector == "ray"),
    ):
        if given and not is_used:
            raise SettingsError(name)
    if arguments.targets is not None:
        usual = argparse.ArgumentParser()
        add_run(usual)
        for name in _OF_ONE_MODEL:
            if getattr(arguments, name) != usual.get_default(name):
                flag = name.replace("_", "-")
                raise SettingsError(f"--{flag}: with --targets, the file says so of each model")


def _single(arguments: argparse.Namespace) -> ModelSettings | None:
    from select_service.planner.edge.run_command import single_model

    if arguments.model_name is None or arguments.profile_results_dir is None:
        return None
    return single_model(
        arguments.model_name,
        arguments.tenant_id,
        str(arguments.profile_results_dir),
        resources=(arguments.prefill_resource, arguments.decode_resource),
        gpus=(arguments.prefill_engine_num_gpu, arguments.decode_engine_num_gpu),
        endpoints_min=arguments.min_endpoint,
        start_s=arguments.start_time,
        goals=(arguments.ttft, arguments.itl, arguments.attainment),
    )


def _positive(text: str) -> float:
    return _within(text, float, "a number above 0", lambda value: 0 < value < float("inf"))


def _at_least_0(text: str) -> float:
    return _within(text, float, "a number, at least 0", lambda value: 0 <= value < float("inf"))


def _share(text: str) -> float:
    return _within(text, float, "a share between 0 and 1", lambda value: 0 < value < 1)


def _interval(text: str) -> float:
    what = f"a number of seconds, at least {_SHORTEST_S}"
    return _within(text, float, what, lambda value: _SHORTEST_S <= value < float("inf"))


def _port(text: str) -> int:
    return _within(text, int, "a port, 0 to 65535", lambda value: 0 <= value <= _PORT_MOST)


def _url(text: str) -> str:
    """Take an address that can be asked; one that cannot would be asked in vain for ever."""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT or https://HOST:PORT")
    return text


def _natural(text: str) -> int:
    return _within(text, int, "a whole number, at least 1", lambda value: value >= 1)


def _count(text: str) -> int:
    return _within(text, int, "a whole number, at least 0", lambda value: value >= 0)


def _within(text: str, kind: type[N], what: str, is_fit: Callable[[N], bool]) -> N:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_fit(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value
