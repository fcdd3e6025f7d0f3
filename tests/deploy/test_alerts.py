"""Every alert fires when it should and is silent when it should not, by Debian's promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.everything import RULES, alerts
from tests.wait import PATIENCE_S

PROMTOOL = shutil.which("promtool")
NEEDS_PROMTOOL = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool: install Debian's package prometheus (make promtool)"
)
BAD = {"job": "select-service", "instance": "bad"}
FIRING_AT = "55m"


@dataclass(frozen=True)
class Case:
    """Series with which an alert fires, and the same where it must not."""

    bad: dict[str, str]
    good: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)  # of the alert, besides whose it is
    whose: dict[str, str] = field(default_factory=lambda: BAD)


RANK = {"worker_id": "1", "dp_rank": "0", "model_name": "m", "tenant_id": "t"}
SCOPE = {"model_name": "m", "tenant_id": "t"}
R = 'worker_id="1",dp_rank="0",model_name="m",tenant_id="t"'
S = 'model_name="m",tenant_id="t"'
GROWS, STANDS, ZERO = "0+10x60", "7+0x60", "0+0x60"


def _counter(series: str, labels: str = "", **of: str) -> Case:
    """An alert on anything that is counted."""
    return Case({f"{series}{{{labels}}}": GROWS}, {f"{series}{{{labels}}}": STANDS}, of)


def _gauge(metric: str, bad: float, good: float, labels: str = "", **of: str) -> Case:
    series = f"{metric}{{{labels}}}"
    return Case({series: f"{bad}+0x60"}, {series: f"{good}+0x60"}, of)


P = "select_service_"
BUCKET = P + 'http_request_duration_seconds_bucket{route="/select",method="POST",le="%s"}'
EVENTS = P + 'reservation_events_total{event="%s"}'
SNAPSHOT = P + "index_snapshot_written_timestamp_seconds{}"
FAILURES = P + 'discovery_failures_total{source="dns",kind="timeout"}'
SILENT = P + f'kv_listener_state{{{R},state="silent"}}'
REQUESTS = P + f"rank_requests{{{R}}}"
LAG = P + f"kv_listener_lag_seconds{{{R}}}"
CASES = {
    "SelectServiceDown": _gauge("up", 0, 1),
    "SelectServiceNotReady": _gauge(P + "waiting_for", 1, 0, 'name="state"', name="state"),
    "SelectServiceRequestsCrash": _counter(P + "http_crashes_total"),
    "SelectServiceHousekeepingFails": _counter(P + "housekeeping_faults_total"),
    "SelectServiceSlow": Case(
        {BUCKET % "0.1": ZERO, BUCKET % "1": GROWS, BUCKET % "+Inf": GROWS},
        {BUCKET % "0.1": GROWS, BUCKET % "1": GROWS, BUCKET % "+Inf": GROWS},
    ),
    "SelectServiceConnectionsNearLimit": Case(
        {P + "http_connections{}": "81+0x60", P + 'limit{name="connections_max"}': "100+0x60"},
        {P + "http_connections{}": "79+0x60", P + 'limit{name="connections_max"}': "100+0x60"},
    ),
    "SelectServiceFileDescriptors": Case(
        {"process_open_fds{}": "81+0x60", "process_max_fds{}": "100+0x60"},
        {"process_open_fds{}": "79+0x60", "process_max_fds{}": "100+0x60"},
    ),
    "SelectServiceLimitReached": Case(
        {P + 'limit_hits_total{name="leases_max"}': GROWS},
        {P + 'limit_hits_total{name="reservation_ttl_s"}': GROWS},
        {"name": "leases_max"},
    ),
    "SelectServiceTenantAtItsBound": Case(
        {P + 'tenant_bound_refused_total{bound="leases_max",tenant_id="acme"}': GROWS},
        {P + 'tenant_bound_held{bound="leases_max",tenant_id="acme"}': GROWS},
        {"bound": "leases_max", "tenant_id": "acme"},
    ),
    "SelectServiceSpansLost": Case(
        {P + 'trace_spans_total{outcome="dropped"}': GROWS},
        {P + 'trace_spans_total{outcome="exported"}': GROWS},
        {"outcome": "dropped"},
    ),
    "SelectServiceAbsent": Case(
        {"up{}": "1+0x20 _x40"}, {"up{}": "1+0x30 _x30"}, whose={"job": "select-service"}
    ),
    "SelectServiceNoWorkers": Case(
        {P + 'workers{lifecycle="schedulable"}': "2+0x20 0+0x40"},
        {P + 'workers{lifecycle="schedulable"}': "0+0x20 2+0x40"},
        {"lifecycle": "schedulable"},
    ),
    "SelectServiceStillNoWorkers": _gauge(
        P + "workers", 0, 1, 'lifecycle="schedulable"', lifecycle="schedulable"
    ),
    "SelectServiceMiswired": Case(
        {P + 'doctor_findings{code="no-events",severity="error"}': "2+0x60"},
        {
            P + 'doctor_findings{code="no-events",severity="error"}': "0 1 0 0 2 0 " * 10,
            P + 'doctor_findings{code="no-workers",severity="warning"}': "1+0x60",
        },
        {"code": "no-events"},
    ),
    "SelectServiceWorkersIncomplete": Case(
        {P + 'workers{lifecycle="incomplete"}': STANDS},
        {P + 'workers{lifecycle="draining"}': STANDS},
        {"lifecycle": "incomplete"},
    ),
    "SelectServiceRefusals": Case(
        {P + "selections_total{}": "0+90x60", P + 'selections_failed_total{code="x"}': GROWS},
        {P + "selections_total{}": "0+900x60", P + 'selections_failed_total{code="x"}': GROWS},
    ),
    "SelectServiceQueueStands": Case(
        {P + f"pending_requests{{{S}}}": "3+0x60"},
        {P + f"pending_requests{{{S}}}": "0 5 0 4 0 3 " * 10},
        SCOPE,
    ),
    "SelectServiceSaturated": _gauge(P + "admission_saturation", 1, 0.9, S, **SCOPE),
    "SelectServiceReservationsForgotten": Case(
        {EVENTS % "booked": "0+90x60", EVENTS % "expired": GROWS},
        {EVENTS % "booked": "0+900x60", EVENTS % "expired": GROWS},
    ),
    "SelectServicePromisesBroken": Case(
        {P + 'admission_promises_ended_total{end="broken"}': GROWS},
        {P + 'admission_promises_ended_total{end="kept"}': GROWS},
        {"end": "broken"},
    ),
    "SelectServiceSeriesUnlisted": Case(
        {P + "ranks_unlisted{}": "1+0x60", P + "scopes_unlisted{}": ZERO},
        {P + "ranks_unlisted{}": ZERO, P + "scopes_unlisted{}": ZERO},
    ),
    "SelectServiceWorkerMute": Case(
        {
            SILENT: "1+0x60",
            REQUESTS: "0 2 " * 30,
        },
        {
            SILENT: "1+0x60",
            REQUESTS: ZERO,
        },
        {**RANK, "state": "silent"},
    ),
    "SelectServiceEventsUncertain": Case(
        {P + f'kv_listener_state{{{R},state="uncertain"}}': "1+0x60"},
        {P + f'kv_listener_state{{{R},state="current"}}': "1+0x60"},
        {**RANK, "state": "uncertain"},
    ),
    "SelectServiceEventsStalled": Case(
        {
            LAG: "0+60x60",
            REQUESTS: "0 2 " * 30,
        },
        {LAG: "0+60x60", REQUESTS: ZERO},
        RANK,
    ),
    "SelectServiceIndexDistrusted": _gauge(P + "trust_factor", 0.8, 1.0, R, **RANK),
    "SelectServiceEventsLost": _counter(P + "kv_lost_batches_total", S, **SCOPE),
    "SelectServiceEventGaps": _counter(P + "kv_gaps_total", S, **SCOPE),
    "SelectServiceBadEvents": _counter(P + "kv_bad_messages_total", S + ',reason="x"', **SCOPE),
    "SelectServiceReplicaSilent": _gauge(
        P + "replica_heard_age_seconds", 31, 1, 'peer="tcp://p"', peer="tcp://p"
    ),
    "SelectServiceReplicaBehind": Case(
        {P + "replica_statements_missing{}": "2+0x60"},
        {P + "replica_statements_missing{}": "0 2 0 0 3 0 " * 10},
    ),
    "SelectServiceReplicasDiffer": _counter(P + "replica_digests_differed_total"),
    "SelectServiceDiskRefuses": _gauge(P + "state_writable", 0, 1),
    "SelectServiceStateDamaged": _gauge(P + "state_damage", 1, 0),
    "SelectServiceCommitsSlow": Case(
        {P + "state_commit_seconds_total{}": "0+2x60", P + "state_commits_total{}": GROWS},
        {P + "state_commit_seconds_total{}": "0+0.1x60", P + "state_commits_total{}": GROWS},
    ),
    "SelectServiceSnapshotOld": Case(
        {SNAPSHOT: "60+0x60", P + 'limit{name="index_snapshot_interval_s"}': "60+0x60"},
        {SNAPSHOT: "0+60x60", P + 'limit{name="index_snapshot_interval_s"}': "60+0x60"},
    ),
    "SelectServiceDiscoveryStale": Case(
        {P + 'discovery_age_seconds{source="kubernetes"}': GROWS},
        {P + 'discovery_age_seconds{source="kubernetes"}': "0+0x60"},
        {"source": "kubernetes"},
    ),
    "SelectServiceDiscoveryFails": Case(
        {FAILURES: GROWS, P + 'discovery_updates_total{source="dns"}': STANDS},
        {FAILURES: GROWS, P + 'discovery_updates_total{source="dns"}': GROWS},
        {"source": "dns"},
    ),
}
"""By alert."""


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == {alert["alert"] for alert in alerts()}


def test_cases_differ() -> None:
    assert all(case.bad != case.good for case in CASES.values())


@pytest.mark.heavy
@NEEDS_PROMTOOL
def test_the_rules_are_rules() -> None:
    done = _promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("prometheus.yaml", "compose.yaml"):
        done = _promtool("check", "config", str(RULES.with_name(name)))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.heavy
@NEEDS_PROMTOOL
def test_alerts_fire_and_are_silent(tmp_path: Path) -> None:
    tests = [_test(alert, CASES[alert["alert"]]) for alert in alerts()]
    file = tmp_path / "rules_test.yaml"
    said = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(said), "utf-8")
    done = _promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.heavy
@NEEDS_PROMTOOL
def test_an_alert_that_does_not_fire_is_noticed(tmp_path: Path) -> None:
    one = next(alert for alert in alerts() if alert["alert"] == "SelectServiceDown")
    test = _test(one, CASES["SelectServiceNoWorkers"])
    file = tmp_path / "rules_test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": [test]}), "utf-8")
    assert _promtool("test", "rules", str(file)).returncode == 1


HEALTHY: dict[str, dict[str, str]] = {
    "restarted": {  # by a new image: a scrape finds nobody, counters begin anew
        "up{}": "1+0x18 0 1+0x41",
        P + 'workers{lifecycle="schedulable"}': "4+0x18 _ _ 0 4+0x39",
        P + 'waiting_for{name="discovery"}': "0+0x18 _ _ 1 0+0x39",
        P + "selections_total{}": "0+900x18 _ _ 0+900x40",
        P + 'selections_failed_total{code="no_workers"}': "2+0x18 _ _ 0+0x40",
        P + "http_crashes_total{}": "0+0x18 _ _ 0+0x40",
        P + 'reservation_events_total{event="booked"}': "0+900x18 _ _ 0+900x40",
        P + 'reservation_events_total{event="expired"}': "9+0x18 _ _ 0+0x40",
        SILENT: "0+0x18 _ _ 1 1 1 0+0x37",
        REQUESTS: "3+0x18 _ _ 3+0x40",
        P + 'replica_heard_age_seconds{peer="tcp://p"}': "1+0x18 _ _ 1+0x40",
        SNAPSHOT: "0+60x18 _ _ _ _ 1320+60x38",
        P + 'limit{name="index_snapshot_interval_s"}': "60+0x18 _ _ 60+0x40",
        P + "index_snapshot_writes_total{}": "0+1x18 _ _ 0+1x40",
    },
    "from-zero": {  # no worker for ten minutes, and nobody asks; then engines have loaded
        "up{}": "1+0x60",
        P + 'workers{lifecycle="schedulable"}': "0+0x10 1+0x3 4+0x46",
        P + 'workers{lifecycle="incomplete"}': "0+0x60",
        P + "selections_total{}": "0+0x10 0+900x50",
        SILENT: "_x10 1+0x3 0+0x46",
        REQUESTS: "_x10 0+0x3 3+0x46",
    },
    "old": {  # a replica that is replaced by `new`
        "up{}": "1+0x30 0 stale",
        P + 'workers{lifecycle="schedulable"}': "4+0x30 stale",
        P + 'replica_heard_age_seconds{peer="tcp://new"}': "_x27 1+0x3 stale",
        P + "selections_total{}": "0+900x30 stale",
    },
    "new": {
        "up{}": "_x26 0 1+0x33",
        P + 'workers{lifecycle="schedulable"}': "_x27 0 0 4+0x31",
        P + 'waiting_for{name="index_recovery"}': "_x27 1 1 0+0x31",
        P + 'replica_heard_age_seconds{peer="tcp://old"}': "_x27 0 1 1 10 70 stale",
        P + "selections_total{}": "_x27 0 0 0+900x31",
        SILENT: "_x27 1+0x3 0+0x30",
        REQUESTS: "_x27 3+0x33",
    },
}
"""Series by instance of an hour in which nobody should be woken."""


@pytest.mark.heavy
@NEEDS_PROMTOOL
def test_nothing_fires_in_a_healthy_hour(tmp_path: Path) -> None:
    series = [
        {"series": _with(name, instance), "values": values}
        for instance, some in HEALTHY.items()
        for name, values in some.items()
    ]
    times = [f"{minute}m" for minute in range(0, 61, 2)]
    _promise(tmp_path, series, {alert["alert"]: dict.fromkeys(times) for alert in alerts()})


@pytest.mark.heavy
@NEEDS_PROMTOOL
def test_workers_that_are_lost_wake_and_those_yet_to_come_do_not(tmp_path: Path) -> None:
    """Somebody is woken for a fleet that was there, and for requests nobody can take."""
    workers, failed = (
        P + 'workers{lifecycle="schedulable"}',
        P + 'selections_failed_total{code="x"}',
    )
    series = [
        {"series": _with(name, instance), "values": values}
        for instance, name, values in (
            ("lost", workers, "4+0x20 0+0x40"),
            ("asked", workers, "0+0x60"),
            ("asked", failed, "0+0x30 0+5x30"),
            ("to-come", workers, "0+0x60"),
        )
    ]
    _promise(
        tmp_path,
        series,
        {
            "SelectServiceNoWorkers": {"10m": None, "24m": ["lost"], "40m": ["asked", "lost"]},
            "SelectServiceStillNoWorkers": {"10m": None, "35m": ["asked", "to-come"]},
        },
    )


@pytest.mark.heavy
@NEEDS_PROMTOOL
def test_a_fleet_at_zero_on_purpose_wakes_nobody(tmp_path: Path) -> None:
    """Its planner wants nobody at 20m; at 40m it is asked again, and engines start or do not."""
    workers = P + 'workers{lifecycle="schedulable",namespace="%s"}'
    asked = P + 'demand_requests_total{namespace="%s",model_name="%s",tenant_id="t",outcome="%s"}'
    failed = P + 'selections_failed_total{code="x",namespace="%s"}'
    desired = (
        'select_planner_replicas_desired{namespace="%s",model_name="m",tenant_id="t",role="%s"}'
    )
    series = []
    for name, served, back in (
        ("wanted", ("m",), "0+0x5 4+0x54"),  # back within five minutes
        ("stuck", ("m",), "0+0x59"),  # its engines never come
        ("misnamed", ("m",), "0+0x59"),  # nor here; somebody asks for what never was
        ("shared", ("m", "n"), "0+0x59"),  # n is of no planner, and lost
        ("alone", (), "0+0x59"),  # what it was for nobody knows
    ):
        values = {
            workers % name: f"4+0x20 0+0x19 {back}",
            failed % name: "0+0x40 0+9x4 36+0x55" if name == "wanted" else "0+0x40 0+9x59",
        }
        for model in served:
            values[asked % (name, model, "placed")] = "0+9x20 stale"
            values[asked % (name, model, "unserved")] = "_x40 1+9x59"
        if name == "misnamed":
            values[asked % (name, "made up", "unserved")] = "_x10 1+1x89"
        series += [{"series": _with(one, name), "values": points} for one, points in values.items()]
        if name != "alone":
            for role in ("prefill", "decode"):
                series.append({"series": desired % (name, role), "values": "2+0x19 0+0x20 2+0x60"})
    _promise(
        tmp_path,
        series,
        {
            "SelectServiceNoWorkers": {
                "19m": None,
                "30m": ["alone", "shared"],
                "44m": ["alone", "shared"],
                "50m": ["alone", "shared"],
                "60m": ["alone", "misnamed", "shared", "stuck"],
            },
            "SelectServiceStillNoWorkers": {
                "39m": ["alone"],
                "54m": ["alone"],
                "60m": ["alone", "misnamed", "shared", "stuck"],
            },
        },
        namespace=True,
    )


@pytest.mark.heavy
@NEEDS_PROMTOOL
def test_a_snapshot_that_was_never_written_is_missed(tmp_path: Path) -> None:
    failures = P + 'index_snapshot_failures_total{kind="disk"}'
    writes = P + "index_snapshot_writes_total{}"
    series = [
        {"series": _with(name, instance), "values": values}
        for instance, name, values in (
            ("never", failures, "_ _ 1+1x58"),
            ("never", writes, ZERO),
            ("once", failures, "_ _ _ _ 1+0x56"),
            ("once", writes, "0+1x60"),
        )
    ]
    _promise(tmp_path, series, {"SelectServiceSnapshotOld": {"55m": ["never"]}})


def _promise(
    directory: Path,
    series: list[dict[str, str]],
    expected: dict[str, dict[str, list[str] | None]],
    *,
    namespace: bool = False,
) -> None:
    """Have promtool say of which instances each alert fires, by the times it is looked at.

    With `namespace` each instance is in one of its own name.
    """
    rules = {alert["alert"]: alert for alert in alerts()}
    extra = {"SelectServiceNoWorkers": {"lifecycle": "schedulable"}}
    extra["SelectServiceStillNoWorkers"] = extra["SelectServiceNoWorkers"]
    tests = []
    for name, times in expected.items():
        for at, instances in times.items():
            fires = []
            for instance in instances or ():
                labels = {"job": "select-service", "instance": instance, **extra.get(name, {})}
                labels |= {"namespace": instance} if namespace else {}
                fires.append(_fires(rules[name], labels))
            tests.append({"eval_time": at, "alertname": name, "exp_alerts": fires})
    test = {"interval": "1m", "input_series": series, "alert_rule_test": tests}
    said = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
    file = directory / "rules_test.yaml"
    file.write_text(yaml.safe_dump(said), "utf-8")
    done = _promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def _promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run(
        [PROMTOOL, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def _test(alert: dict[str, Any], case: Case) -> dict[str, Any]:
    """Two instances, one as it should be; the alert is to name the other, and only in time."""
    series = [
        {"series": _with(name, instance), "values": values}
        for instance, some in (("bad", case.bad), ("good", case.good))
        for name, values in some.items()
    ]
    fires = _fires(alert, case.whose | case.labels)
    return {
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [
            {"eval_time": FIRING_AT, "alertname": alert["alert"], "exp_alerts": [fires]},
            {"eval_time": "0m", "alertname": alert["alert"], "exp_alerts": _at_once(alert, fires)},
        ],
    }


def _fires(alert: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    annotations = {
        name: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
        for name, text in alert["annotations"].items()
    }
    return {"exp_labels": labels | alert["labels"], "exp_annotations": annotations}


def _at_once(alert: dict[str, Any], fires: dict[str, Any]) -> list[dict[str, Any]]:
    """What fires with the first sample: who waits for nothing, and looks at no past."""
    return [] if "for" in alert or "increase" in alert["expr"] else [fires]


def _with(series: str, instance: str) -> str:
    name, _, labels = series.partition("{")
    said = f'job="select-service",instance="{instance}"'
    return f"{name}{{{said}{',' if labels != '}' else ''}{labels}"
