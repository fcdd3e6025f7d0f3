"""Every finding of the doctor: it appears, its remedy is carried out as written, and it goes.

`REMEDIES` has a row for each; a finding without one fails. Those that need other processes or a
cluster have theirs where these are, and are named.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Final

import pytest

from select_service.core.diagnostics.causes import CAUSES, OF_THE_COMMAND
from tests.live.ports import free_port
from tests.select_service.doctor import (  # noqa: F401 - they fill the table
    remedies_of_prompts,
    remedies_of_records,
    remedies_of_streams,
)
from tests.select_service.doctor.remedies import REMEDIES, Context, Remedy
from tests.select_service.doctor.ward import Ward, play

ELSEWHERE: Final = {
    "discovery-stale": (
        "tests.select_service.edge.discovery.test_shared_ids",
        "test_a_source_that_cannot_be_read_is_a_finding",
    ),
    "worker-id-shared": (
        "tests.select_service.edge.discovery.test_shared_ids",
        "test_a_finding_and_a_metric_tell",
    ),
    "replica-refuses-us": ("tests.e2e.test_doctor_refused", "test_replicas_that_refuse_us"),
    "unreachable-from-here": ("tests.select_service.doctor.test_cli", "test_ports_seen_from_here"),
    "kernels-missing": ("tests.indexer.test_compiled", "test_a_kernel_may_be_missing"),
    "canary-refused": ("tests.select_service.doctor.test_canary", "test_an_engine_that_refuses"),
    "canary-not-found": ("tests.select_service.doctor.test_canary", "test_no_events"),
    "template-mismatch": ("tests.select_service.doctor.test_canary", "test_another_template"),
}
"""By code: the module and the test that finds it, carries out its remedy and sees it go."""


def test_every_finding_has_its_remedy_carried_out() -> None:
    codes = {cause.code for cause in (*CAUSES, *OF_THE_COMMAND)}
    assert REMEDIES.keys() | ELSEWHERE.keys() == codes
    assert not REMEDIES.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("code", ELSEWHERE)
def test_those_elsewhere_are_there(code: str) -> None:
    module, name = ELSEWHERE[code]
    assert code in inspect.getsource(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("code", "row"), [(code, row) for code, rows in REMEDIES.items() for row in rows]
)
def test_a_remedy_makes_its_finding_go(code: str, row: Remedy, context: Context) -> None:
    async def scenario(ward: Ward) -> None:
        appeared = False

        async def found(*texts: str, **subject: Any) -> None:
            nonlocal appeared
            findings = await ward.examine()
            assert {one.code for one in findings} == {code}, findings
            last = findings[-1]
            assert all(word in last.what for word in texts), last.what
            assert {name: getattr(last.subject, name) for name in subject} == subject
            appeared = True

        await row.scenario(ward, found)
        assert appeared
        await ward.pass_time(20)
        left = await ward.examine()
        assert all(one.code != code and one.severity == "info" for one in left), left

    settings = dict(row.settings)
    if "replica_sync_port" in settings:
        settings["replica_sync_port"] = free_port()
    play(context, scenario, **settings)
