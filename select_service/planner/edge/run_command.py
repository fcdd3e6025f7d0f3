"""`select-planner run`: turns flags into a loop and a server, until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import ssl
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import uvicorn
from typing_extensions import override

from indexer.followed_trust import FollowedTrust
from indexer.http_client import ProxyUnusable, http_client
from indexer.redaction import redact
from select_service.kubernetes_api import KubernetesApi
from select_service.planner.core.demand import intervals_of
from select_service.planner.core.engine_speed import SpeedSettings
from select_service.planner.edge.connectors.connector import DryRun
from select_service.planner.edge.connectors.virtual import VirtualConnector
from select_service.planner.edge.engine_drain import EngineDrain
from select_service.planner.edge.http_server import create_app
from select_service.planner.edge.kube import Kube
from select_service.planner.edge.leases.file_lease import FileLease, model_locks
from select_service.planner.edge.leases.kubernetes_lease import KubeLease
from select_service.planner.edge.leases.lease import duration_of
from select_service.planner.edge.leases.ray_lease import RayLease
from select_service.planner.edge.loop import Loop
from select_service.planner.edge.predictors import predictor_settings
from select_service.planner.edge.ray_cluster import joined
from select_service.planner.edge.run_settings import (
    ModelSettings,
    PoolTarget,
    build_fleet,
    read_targets,
    resources_of,
)
from select_service.planner.edge.selector_addresses import SelectorAddresses
from select_service.planner.edge.selectors import SelectorFleet
from select_service.planner.edge.sources.prometheus import TIMEOUT_S as PROMETHEUS_TIMEOUT_S
from select_service.planner.edge.sources.prometheus import PrometheusSource
from select_service.planner.edge.sources.selector import SelectorSource
from select_service.planner.edge.sources.series_names import read_names
from select_service.planner.edge.sources.trace import TraceSource, read_trace
from select_service.planner.edge.state_file import Memory, StateFile
from select_service.planner.errors import LeaseHeld, SettingsError
from select_service.planner.types import PoolState
from select_service.tcp_listener import bind_tcp, close_all
from select_service.token_file import TokenUnreadable, basic_header, bearer_header, read_token

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

    from select_service.planner.core.engine_speed import SpeedSource
    from select_service.planner.core.fleet_plan import FleetPlan
    from select_service.planner.edge.connectors.connector import Connector
    from select_service.planner.edge.leases.lease import LeaderLease
    from select_service.planner.edge.sources.source import TrafficSource
    from select_service.planner.settings import RunSettings
    from select_service.planner.types import PoolKey, Role

_NO_SPEED: Final = (
    "this source does not report what selectors measured; --metrics-source selector does, and "
    "--prometheus-names selector, or a file with prefill_moments and itl_moments"
)
_LEAVE_S: Final = 5
"""Seconds for pending responses at shutdown; the successor waits for the lease."""


def run(settings: RunSettings) -> int:
    """Run until SIGINT or SIGTERM; returns the exit code.

    Raises:
        PlannerError: it could not start.
    """
    settings.expect_used()
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(_run(settings))
    return 0


class _Lines(logging.Formatter):
    """Lines of the log, without secrets."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


async def _run(settings: RunSettings) -> None:
    models = _models(settings)
    _expect_distinguishable(settings, models)
    _expect_speeds(settings, models)
    fleet = build_fleet(
        models,
        predictor_settings(settings.load_predictor, settings),
        settings.max_gpu_budget,
        correct=not settings.no_correction,
        is_watched=settings.fast_s is not None,
        likens=not settings.no_likeness,
        give_up_s=settings.decision_timeout,
        speeds=SpeedSettings(
            cast("SpeedSource", settings.engine_speed),
            settings.learnt_speed_max_age,
            settings.learnt_load_factor,
        ),
    )
    _warm_up(fleet, settings)
    state, memory = _state(fleet, settings)
    kube = _kube(settings)
    lease = _lease(settings, models, kube)
    if isinstance(lease, FileLease) and not await lease.held():
        holder = lease.holder or "which one is not known"
        raise LeaseHeld(f"another planner is here ({holder}): it has locked {lease.taken}")
    connector = _connector(settings, fleet, resources_of(models), kube, memory)
    loop = Loop(
        fleet,
        _source(settings),
        connector,
        lease,
        clock=time.monotonic,
        wall=_wall,
        fast_s=settings.fast_s,
        state=state,
        first_id=memory.decision_id,
        retiring=_retiring(settings, connector),
    )
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(loop),
            log_level="warning",
            log_config=None,  # its lines go where ours go
            timeout_graceful_shutdown=_LEAVE_S,
        )
    )
    try:
        listeners = _listeners(settings.host, settings.port)
        try:
            logging.getLogger("select_planner").info("%s", _begins(settings, listeners))
            await _until_ended(loop, server, listeners)
        finally:
            close_all(listeners)
    finally:
        await loop.close()
    logging.getLogger("select_planner").info("stopped")


def _begins(settings: RunSettings, listeners: list[socket.socket]) -> str:
    """Return what comes next and when: nothing is to be seen until the first interval is over."""
    port = listeners[0].getsockname()[1]
    text = f"listening on {settings.host} port {port}"
    text += f"; the first plan comes in {settings.adjustment_interval:g} s"
    if settings.fast_s is not None:
        text += f", and the load is looked at every {settings.fast_s:g} s"
    if settings.connector == "dry-run":
        text += "; --connector dry-run changes nothing, it only says what it would do"
    return text


def _listeners(host: str, port: int) -> list[socket.socket]:
    """Bind the port before anything is decided.

    Raises:
        SettingsError: it is in use, or there is no such address.
    """
    try:
        return bind_tcp(host, port)
    except OSError as error:
        raise SettingsError(f"--host {host} --port {port}: {error.strerror or error}") from error


async def _until_ended(loop: Loop, server: uvicorn.Server, listeners: list[socket.socket]) -> None:
    ended = asyncio.Event()
    running = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, ended.set)
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment,method-assign] # ours are set
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve(sockets=listeners))
        turning = group.create_task(loop.run())
        waiting = group.create_task(ended.wait())
        await asyncio.wait((serving, turning, waiting), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if isinstance(loop.connector, VirtualConnector):
            loop.connector.end()
        turning.cancel()
        waiting.cancel()


def _wall() -> float:
    return time.time()  # noqa: TID251 - shown to people and clients, nothing is decided by it


def _models(settings: RunSettings) -> list[ModelSettings]:
    if settings.targets is not None:
        return read_targets(settings.targets)
    if settings.model_name is None:
        raise SettingsError("--targets or --model-name is needed")
    roles: dict[Role, tuple[int, str]] = {
        "prefill": (settings.prefill_engine_num_gpu, settings.prefill_resource),
        "decode": (settings.decode_engine_num_gpu, settings.decode_resource),
    }
    return [
        ModelSettings(
            model_name=settings.model_name,
            tenant_id=settings.tenant_id,
            profile_results_dir=str(settings.profile_results_dir or ""),
            ttft_ms=settings.ttft,
            itl_ms=settings.itl,
            attainment=settings.attainment,
            pools=[
                PoolTarget(
                    role=role,
                    gpus=gpus,
                    replicas_min=settings.min_endpoint,
                    start_s=settings.start_time,
                    resource=resource,
                )
                for role, (gpus, resource) in roles.items()
            ],
        )
    ]


def _expect_distinguishable(settings: RunSettings, models: list[ModelSettings]) -> None:
    """Check that each model's traffic is distinguishable: counted twice is scaled twice.

    Raises:
        SettingsError: the metrics have no tenants, and models of one name.
    """
    if (
        settings.metrics_source != "prometheus"
        or read_names(settings.prometheus_names).tenant_label
    ):
        return
    names = [one.model_name.casefold() for one in models]
    if len(set(names)) < len(names) or any(one.tenant_id != "default" for one in models):
        raise SettingsError(
            "these metrics distinguish models by name, not by tenant: each of several would be "
            "taken for all of them; --prometheus-names selector, or a file with a tenant_label, "
            "distinguishes them"
        )


def _expect_speeds(settings: RunSettings, models: list[ModelSettings]) -> None:
    """Check that the speed of each model's engines can be known.

    Raises:
        SettingsError: there is no profile, and no selector that measures.
    """
    learns = settings.metrics_source == "selector"
    if settings.metrics_source == "prometheus":
        names = read_names(settings.prometheus_names)
        learns = bool(names.prefill_moments and names.itl_moments)
    if settings.engine_speed == "learnt" and not learns:
        raise SettingsError(f"--engine-speed learnt: {_NO_SPEED}")
    for one in models:
        if one.profile_results_dir or (learns and settings.engine_speed != "profile"):
            continue
        flag = "profile_results_dir" if settings.targets else "--profile-results-dir"
        why = "--engine-speed profile is asked for" if learns else _NO_SPEED
        raise SettingsError(f"{one.key}: {flag} is needed: {why}")


def _warm_up(fleet: FleetPlan, settings: RunSettings) -> None:
    if settings.load_predictor_warmup_trace is None:
        return
    history = intervals_of(
        read_trace(settings.load_predictor_warmup_trace), settings.adjustment_interval
    )
    for model in fleet.models:
        model.warm_up(history, fleet.interval_s)


def _state(fleet: FleetPlan, settings: RunSettings) -> tuple[StateFile | None, Memory]:
    if settings.state_dir is None:
        return None, Memory()
    try:
        settings.state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{settings.state_dir}: {error.strerror}") from error
    state = StateFile(settings.state_dir / "planner.json")
    memory = state.read(fleet, _wall())
    if state.damaged:
        logging.getLogger("select_planner").error(
            "%s is damaged, and is set aside as %s", state.path, state.aside.name
        )
    return state, memory


def _kube(settings: RunSettings) -> Kube | None:
    if settings.connector != "kubernetes":
        return None
    return Kube(
        KubernetesApi(
            settings.kubernetes_api,
            namespace=settings.namespace,
            proxy_from_environment=settings.proxy_from_environment,
        )
    )


def _lease(settings: RunSettings, models: list[ModelSettings], kube: Kube | None) -> LeaderLease:
    """Return the lease that keeps a second planner from acting on the same engines."""
    if settings.connector != "dry-run" and settings.state_dir is None:
        logging.getLogger("select_planner").warning("without --state-dir a restart forgets")
    identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    duration_s = duration_of(settings.fast_s or settings.adjustment_interval)
    timed = (settings.lease_name, identity, time.monotonic, duration_s)
    if settings.lease == "cluster" and kube is not None:
        return KubeLease(kube, *timed)
    if settings.lease == "cluster" and settings.connector == "ray":
        return RayLease(joined("--connector ray without --lease machine"), *timed)
    locks = [] if settings.state_dir is None else [settings.state_dir / "planner.lock"]
    if settings.connector != "dry-run":
        keys = [one.key for one in models]
        locks += model_locks(keys, settings.lease_name, state_dir=settings.state_dir)
    names = ", ".join(str(one.key) for one in models)
    identity = f"process {os.getpid()}, port {settings.port}, {names}"
    return FileLease(*locks, identity=identity)


def _source(settings: RunSettings) -> TrafficSource:
    if settings.metrics_source == "prometheus":
        return _prometheus(settings)
    if settings.metrics_source == "selector":
        if not settings.selector:
            raise SettingsError("--metrics-source selector needs --selector URL")
        return SelectorSource(
            settings.selector,
            _bearer(settings.token_file),
            addresses=SelectorAddresses(settings.selector, settings.selector_lookup_interval),
            wall=_wall,
        )
    if settings.trace is None:
        raise SettingsError("--metrics-source trace needs --trace FILE")
    return TraceSource(read_trace(settings.trace))


def _prometheus(settings: RunSettings) -> PrometheusSource:
    """Return the source that asks Prometheus, with our credentials and trust.

    Raises:
        SettingsError: a file cannot be used, or the proxy of the environment.
    """
    ca = settings.prometheus_ca
    try:
        trust = True if ca is None else FollowedTrust(ca)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"--prometheus-ca {ca}: {error.strerror or error}") from error
    credentials = _bearer(settings.prometheus_token_file)
    if settings.prometheus_basic_auth_file is not None:
        credentials = _checked(partial(basic_header, settings.prometheus_basic_auth_file))
    shows_some = credentials is not None or "@" in settings.prometheus_url
    client = _client(settings, PROMETHEUS_TIMEOUT_S, has_credentials=shows_some, tls=trust)
    names = read_names(settings.prometheus_names)
    return PrometheusSource(settings.prometheus_url, names, client, credentials)


def _client(settings: RunSettings, timeout_s: float, **options: Any) -> httpx.AsyncClient:
    try:
        from_environment = settings.proxy_from_environment
        return http_client(timeout_s, from_environment=from_environment, **options)
    except ProxyUnusable as error:
        raise SettingsError(f"--proxy-from-environment: {error}") from error


def _bearer(path: Path | None) -> Callable[[], dict[str, str]] | None:
    """Return what reads a token anew for each request; None: there is no file.

    Raises:
        SettingsError: there is one without a token.
    """
    return None if path is None else _checked(partial(bearer_header, path))


def _checked(read: Callable[[], dict[str, str]]) -> Callable[[], dict[str, str]]:
    try:
        read()
    except TokenUnreadable as error:
        raise SettingsError(str(error)) from error
    return read


def _connector(
    settings: RunSettings,
    fleet: FleetPlan,
    resources: dict[PoolKey, str],
    kube: Kube | None,
    memory: Memory,
) -> Connector:
    start = {}
    for model in fleet.models:
        for pool in model.pools:
            least = pool.settings.least
            start[pool.key] = memory.states.get(pool.key, PoolState(least, least))
    if settings.connector == "dry-run":
        return DryRun({pool: state.desired for pool, state in start.items()})
    if settings.connector == "virtual":
        return VirtualConnector(
            start, time.monotonic, _wall, settings.decision_timeout, memory.decision_id
        )
    if settings.connector == "ray":
        from select_service.planner.edge.connectors.ray import TIMEOUT_S as RAY_TIMEOUT_S
        from select_service.planner.edge.connectors.ray import RayConnector

        credentials = _bearer(settings.ray_token_file)
        token = os.environ.get("RAY_AUTH_TOKEN")
        if credentials is None and token:
            credentials = partial(dict, authorization=f"Bearer {token}")
        client = _client(settings, RAY_TIMEOUT_S, has_credentials=credentials is not None)
        return RayConnector(resources, settings.ray_dashboard, credentials, client)
    from select_service.planner.edge.connectors.kubernetes import (
        KubernetesConnector,
    )

    assert kube is not None, "it was made for this connector"
    return KubernetesConnector(kube, resources)


def _retiring(settings: RunSettings, connector: Connector) -> EngineDrain | None:
    """Return what drains engines before they go.

    Raises:
        SettingsError: there is no selector, or the connector cannot choose which engines go.
    """
    if settings.drain_s is None:
        return None
    from select_service.planner.edge.connectors.kubernetes import KubernetesConnector

    if not settings.selector:
        raise SettingsError("--drain needs --selector URL: they are sent which engines go")
    if not isinstance(connector, KubernetesConnector | VirtualConnector):
        raise SettingsError(f"--drain: which ones go is not ours to say with {settings.connector}")
    pods = connector.pods() if isinstance(connector, KubernetesConnector) else {}
    _bearer(settings.token_file)  # an unusable file is an error now
    file = settings.token_file
    token = None if file is None else partial(read_token, file)
    addresses = SelectorAddresses(settings.selector, settings.selector_lookup_interval)
    selectors = SelectorFleet(settings.selector, token, addresses)
    return EngineDrain(selectors, pods, time.monotonic, settings.drain_s)
