"""Every expression there is in deploy/, and what a service with everything on exports."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from select_service.edge.driver.driver import Driver
from select_service.edge.http.traffic import Traffic
from select_service.edge.metrics.exposition import Metrics
from tests.deploy.dashboard import BOARD, every_panel
from tests.live.ports import free_port
from tests.select_service.edge.serving import PROMPT, SETTINGS, Wire, add_worker, on_a_port

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yaml"
EVERYONE = frozenset(("job", "instance"))


def panels() -> list[tuple[str, str]]:
    """(where, expression) of every query of the dashboard."""
    board = json.loads(BOARD.read_text("utf-8"))
    return [
        (f"{panel['title']} {target['refId']}", target["expr"])
        for panel in every_panel(board)
        for target in panel["targets"]
    ]


def rules() -> list[dict[str, Any]]:
    """Every rule."""
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def expressions() -> list[tuple[str, str]]:
    """(where, expression) of all of them."""
    of_rules = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    return [*panels(), *of_rules]


@dataclass
class Family:
    """One family of series as it is exported."""

    kind: str
    labels: set[str]
    values: dict[str, set[str]] = field(default_factory=dict)  # by label, as far as seen


def exported(directory: Path) -> dict[str, Family]:
    """Every series by its name, of a service with everything on that has served a little."""
    found: dict[str, Family] = {}
    workers = directory / "workers.json"
    workers.write_text("[]", "utf-8")
    settings: dict[str, Any] = {
        "state_dir": str(directory / "state"),
        "replica_sync_port": free_port(),
        "replica_sync_peers": (),
        "workers_file": str(workers),
        "indexer_peers": ("http://127.0.0.1:1",),
        "admission_control": "token-capacity",
        "admission_policy": "slo-shed",
        "active_prefill_tokens_threshold": 1000,
        "global_cache_hit_threshold": 0.5,
        "max_inflight_default": 4,
        "tracing": "otlp",
    }

    async def use(port: int, service: Driver, _: object) -> None:
        add_worker(service)
        wire = await Wire.to(port)
        for path, body in (
            ("/select", PROMPT),
            ("/select_and_reserve", {**PROMPT, "cache_hit_threshold": 0.0}),
            ("/select", {**PROMPT, "allowed_worker_ids": [9]}),
            ("/select_pair", {**PROMPT, "cache_hit_threshold": 0.0}),
        ):
            wire.ask("POST", path, body)
            await wire.answer()
        wire.ask("GET", "/metrics")
        text = (await wire.answer())[2].decode()
        _add_text(found, text)
        _add_labels(found, Metrics(service, Traffic(), SETTINGS))

    on_a_port(use, **settings)
    states = found["select_service_kv_listeners"].values  # all of them, whoever is in which
    found["select_service_kv_listener_state"].values |= states
    return found


def _add_text(found: dict[str, Family], text: str) -> None:
    for family in text_string_to_metric_families(text):
        for name in _names(family.name, family.type):
            found[name] = Family(family.type, set())
        for sample in family.samples:
            one = found.get(sample.name, Family("", set()))
            one.labels |= sample.labels.keys()
            for label, value in sample.labels.items():
                one.values.setdefault(label, set()).add(value)


def _add_labels(found: dict[str, Family], metrics: Metrics) -> None:
    """Those of families without samples, too."""
    for family in metrics.families():
        for name in _names(family.name, family.type):
            found[name].labels |= set(getattr(family, "_labelnames", ()))
            if name.endswith("_bucket"):
                found[name].labels.add("le")


def _names(name: str, kind: str) -> list[str]:
    if kind == "counter":
        return [f"{name}_total"]
    if kind == "histogram":
        return [f"{name}_bucket", f"{name}_sum", f"{name}_count"]
    return [name]
