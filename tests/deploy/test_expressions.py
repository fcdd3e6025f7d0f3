"""Dashboard and rules use what is exported, by its type, and nothing else."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest

from select_service.planner.edge.planner_metrics import PlannerMetrics
from tests.deploy.dashboard import BOARD, DOCS, GRAFANA, REFERENCE, every_panel, written
from tests.deploy.everything import EVERYONE, Family, alerts, exported, expressions, rules
from tests.deploy.expressions import OF_COUNTERS, Matcher, Use, read
from tests.select_service.planner.edge.loops import loop_of

SCRAPED = {"up": Family("gauge", set())}
OPEN = {"code", "status", "outcome", "end", "route"}
"""Labels whose values come as they happen; of others every value is there from the start."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    return SCRAPED | planned() | exported(tmp_path_factory.mktemp("service"))


def planned() -> dict[str, Family]:
    """Gauges of the planner."""
    gauges = (one for one in PlannerMetrics(loop_of()).collect() if one.type == "gauge")
    return {one.name: Family("gauge", set(getattr(one, "_labelnames", ()))) for one in gauges}


@cache
def recorded() -> dict[str, Family]:
    """What the rules make, with the labels they keep."""
    return {
        rule["record"]: Family("gauge", set(read(rule["expr"]).grouped) - {"le"})
        for rule in rules()
        if "record" in rule
    }


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=lambda text: text[:40])
def test_an_expression(where: str, expression: str, families: dict[str, Family]) -> None:
    known = families | recorded()
    reading = read(expression)
    assert reading.uses, "a panel without a series"
    labels = {*EVERYONE, "namespace"}  # which discovery in Kubernetes adds, and nobody else has
    for use in reading.uses:
        assert use.metric in known, f"{where}: there is no {use.metric}"
        family = known[use.metric]
        labels |= family.labels
        for matcher in use.matchers:
            _check_matcher(matcher, family, use)
        _check_use(use, family)
    assert reading.grouped <= labels, f"{where}: nobody has {reading.grouped - labels}"


def _check_matcher(matcher: Matcher, family: Family, use: Use) -> None:
    if matcher.value.startswith("$"):
        matcher = Matcher(matcher.label, "=", "")
    assert matcher.label in family.labels | EVERYONE, f"{use.metric} has no label {matcher.label}"
    values = family.values.get(matcher.label)
    if not matcher.value or values is None or matcher.label in EVERYONE:
        return
    alternatives = matcher.value.split("|") if "~" in matcher.operator else [matcher.value]
    for one in alternatives:
        fits = any(re.fullmatch(one, value) for value in values)
        assert fits or matcher.label in OPEN, f"{use.metric} has no {matcher.label}={one}"


def _check_use(use: Use, family: Family) -> None:
    """Counters go through rate or increase, gauges do not, quantiles are of buckets."""
    innermost = use.inside[0] if use.inside else ""
    if family.kind in ("counter", "histogram"):
        sums_up = innermost in OF_COUNTERS and use.has_range
        shown_as_it_is = use.metric == "select_service_index_snapshot_recalled_ranks_total"
        was_there = innermost == "last_over_time" and use.has_range  # whatever its value
        assert sums_up or shown_as_it_is or was_there, f"{use.metric} is a counter"
    else:
        assert innermost not in OF_COUNTERS, f"{use.metric} is a {family.kind}"
        assert use.has_range is innermost.endswith("_over_time")
    is_bucket = use.metric.endswith("_bucket")
    assert ("histogram_quantile" in use.inside) <= (is_bucket or ":" in use.metric)


def test_the_dashboard_is_what_its_source_says() -> None:
    assert BOARD.read_text("utf-8") == written(), "make dashboard"


def test_the_dashboard_opens_with_a_few_panels_and_links_to_what_explains_them() -> None:
    shown = json.loads(BOARD.read_text("utf-8"))
    panels = every_panel(shown)
    in_sight = [one for one in shown["panels"] if one["type"] != "row"]
    assert 0 < len(in_sight) < len(panels) / 4, "the other rows are folded"
    rows = [one for one in shown["panels"] if one["type"] == "row"]
    ids = [one["id"] for one in (*rows, *panels)]
    assert len(set(ids)) == len(ids)
    links = [link["url"] for one in (shown, *panels) for link in one["links"]]
    assert len(links) > len(panels)
    for url in set(links):
        page, _, anchor = url.removeprefix(DOCS).removeprefix(REFERENCE).partition("#")
        folder = GRAFANA.parent / "docs" if url.startswith(DOCS) else GRAFANA.parent / "reference"
        heads = re.findall(r"^#+ (.+)$", (folder / page).read_text("utf-8"), re.MULTILINE)
        names = [re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads]
        assert not anchor or anchor in names, url


def test_alerts_say_what_to_do() -> None:
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names)
    for alert in alerts():
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert alert["annotations"].keys() == {"summary", "description", "runbook"}


@pytest.mark.parametrize(
    "wrong",
    [
        "select_service_nonsense",
        "rate(select_service_workers[5m])",
        "select_service_selections_total",
        'select_service_workers{lifecycle="drunk"}',
        'select_service_workers{colour="red"}',
        "sum by (colour) (select_service_workers)",
        "histogram_quantile(0.9, rate(select_service_http_request_duration_seconds_count[5m]))",
        "1 + 1",
    ],
)
def test_what_is_wrong_is_found(wrong: str, families: dict[str, Family]) -> None:
    with pytest.raises(AssertionError):
        test_an_expression("here", wrong, families)
