"""deploy/grafana/select-service.json out of panels.yaml beside it: `make dashboard` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
BOARD = GRAFANA / "select-service.json"
INSTANCES = 'job=~"$job",instance=~"$instance"'
SCOPES = INSTANCES + ',model_name=~"$model",tenant_id=~"$tenant"'
DOCS = "https://github.com/select-service/select-service/blob/main/deploy/docs/"
REFERENCE = "https://github.com/select-service/select-service/blob/main/deploy/reference/"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, STAT_HEIGHT = 8, 8, 4
KINDS = {"stat": "stat", "table": "table", "heatmap": "heatmap"}
VARIABLES = (
    ("job", "Job", "label_values(select_service_build_info, job)"),
    ("instance", "Instance", 'label_values(select_service_build_info{job=~"$job"}, instance)'),
    ("model", "Model", f"label_values(select_service_reservations{{{INSTANCES}}}, model_name)"),
    ("tenant", "Tenant", f"label_values(select_service_reservations{{{INSTANCES}}}, tenant_id)"),
)


def board() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = number = 0
    for row in yaml.safe_load((GRAFANA / "panels.yaml").read_text("utf-8")):
        placed, height = _placed(row, top + 1)
        is_open = row.get("open", False)
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        head: dict[str, Any] = {"type": "row", "title": row["row"], "gridPos": place}
        head |= {"collapsed": not is_open, "panels": [] if is_open else placed}
        panels += [head, *placed] if is_open else [head]
        top += 1 + height * is_open
        for panel in (head, *placed):
            number += 1
            panel["id"] = number
    return {
        "uid": "select-service",
        "title": "select-service",
        "tags": ["llm", "routing"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), *(_variable(*one) for one in VARIABLES)]},
        "annotations": {"list": []},
        "links": [
            _link("Documentation", DOCS + "operating.md#dashboard-and-alerts", type="link"),
            _link("Metrics", REFERENCE + "metrics.md", type="link"),
        ],
        "panels": panels,
    }


def every_panel(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Panels that show something, those of folded rows included."""
    rows = [*board["panels"], *(one for row in board["panels"] for one in row.get("panels", ()))]
    return [one for one in rows if one["type"] != "row"]


def written() -> str:
    """What should stand in the file."""
    return json.dumps(board(), indent=1) + "\n"


def main() -> None:
    """Write it."""
    BOARD.write_text(written(), "utf-8")


def _placed(row: dict[str, Any], top: int) -> tuple[list[dict[str, Any]], int]:
    """The panels of a row from there on, and how high they stand together."""
    panels, first = [], top
    left = height = 0
    for one in row["panels"]:
        panel = _panel(one)
        panel["links"] = [_link("What it means", DOCS + row["page"])]
        grid = panel["gridPos"]
        if left + grid["w"] > 24:
            top, left, height = top + height, 0, 0
        grid |= {"x": left, "y": top}
        left, height = left + grid["w"], max(height, grid["h"])
        panels.append(panel)
    return panels, top + height - first


def _link(title: str, url: str, **more: str) -> dict[str, Any]:
    return {"title": title, "url": url, "targetBlank": True, **more}


def _panel(one: dict[str, Any]) -> dict[str, Any]:
    kind = KINDS.get(one.get("kind", ""), "timeseries")
    is_stat = kind == "stat"
    targets = []
    for number, query in enumerate(one["of"]):
        expression, legend = (query, "") if isinstance(query, str) else query
        targets.append(
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": expression.replace("@m", SCOPES).replace("@i", INSTANCES),
                "legendFormat": legend,
                "instant": kind == "table",
                "format": {"table": "table", "heatmap": "heatmap"}.get(kind, "time_series"),
            }
        )
    return {
        "type": kind,
        "title": one["title"],
        "description": one.get("help", ""),
        "datasource": SOURCE,
        "gridPos": {"w": one.get("width", WIDTH), "h": STAT_HEIGHT if is_stat else HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": one.get("unit", "short"),
                "min": 0,
                "links": [_link(**one["link"])] if "link" in one else [],
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}}
        if not is_stat
        else {},
        "targets": targets,
    }


def _source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


if __name__ == "__main__":
    main()
