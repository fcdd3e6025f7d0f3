"""Settings that change while the process runs: all or nothing, by request and by file."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from select_service import cli
from select_service.edge.app import create_application, create_driver
from select_service.edge.config_reload import (
    BOUND_ID_LENGTH_MIN,
    ConfigChange,
    ConfigReload,
    check_settings,
)
from select_service.edge.driver.driver import Driver
from select_service.edge.metrics.limit_metrics import limit_values
from select_service.edge.tenancy.tenant_ids import prefix_of
from select_service.errors import InvalidField, NeedsRestart
from select_service.settings import FLAGS, ConfigError, Settings
from tests.coroutines import within
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.select_service.edge.serving import (
    PROMPT,
    SETTINGS,
    add_worker,
    app_client,
    listening,
    worker,
)
from tests.wait import until

BY_FIELD = {flag.field: flag for flag in FLAGS}
RELOADABLE = [flag.field for flag in FLAGS if flag.reloads]


def started(*argv: str) -> tuple[Driver, ConfigReload]:
    """A service from a command line, which is not started."""
    settings, layers = cli.read(argv, {})
    service = create_driver(settings)
    return service, create_application(service, settings, layers)[0].reloading


@functools.cache
def shared() -> tuple[Driver, ConfigReload]:
    return started()


def put(reloading: ConfigReload, **settings: Any) -> None:
    reloading.put(ConfigChange(settings=settings))


def another(field: str) -> object:
    """A value that a setting does not have by default, and that is none out of bounds."""
    flag = BY_FIELD[field]
    value: object = flag.default
    if field == "admission_control":
        return "token-capacity"
    if field == "cache_hit_scope":
        return "gpu"
    if field == "load_report_stale_as":
        return "unknown"
    if field == "cache_hit_basis":
        return "cacheable"
    if field == "shadow_weights":
        return {"temperature": 0.5}
    if field.startswith(("active_decode", "global_cache", "shadow_")):
        return 0.5
    if field == "tenant_share":
        return 0.25
    if value is None:
        return 7
    assert isinstance(value, int | float)
    return value - 1 if field.endswith("lease_ttl_min_s") or value > 1 else value + 1


@pytest.mark.parametrize("field", RELOADABLE)
def test_whatever_reloads_reaches_what_reads_it(field: str) -> None:
    """The objects everybody reads their limits from say the same as fresh ones would."""
    service, reloading = started()
    value = 0.5 if field == "lease_ttl_min_s" else another(field)
    put(reloading, **{field: value})
    settings = reloading.settings
    assert getattr(settings, field) == value
    assert service.core.limits == settings.core_limits
    assert service.core.registry.limits == settings.stream_limits
    assert service._limits.replicas == settings.replica_limits
    assert service.core.admission_controller.settings == settings.admission
    shadow = service.core.selection.filters.shadow
    assert (None if shadow is None else shadow.settings) == settings.shadow
    status = reloading.describe().settings[field]
    assert (status.value, status.source, status.reloads) == (value, "put", True)
    put(reloading, **{field: None})
    assert reloading.settings == Settings()
    assert reloading.describe().settings[field].source == "default"


def test_nothing_but_what_reloads_differs_after_a_change() -> None:
    changed = {field: another(field) for field in RELOADABLE} | {"lease_ttl_min_s": 0.5}
    fresh = replace(Settings(), **changed)
    for name in ("recovery_limits", "snapshot_limits", "egress", "router_config"):
        assert getattr(fresh, name) == getattr(Settings(), name), name


@pytest.mark.parametrize(
    ("settings", "field", "why"),
    [
        ({"max_body_bytes": 0}, "settings.max_body_bytes", "not in 128.."),
        ({"max_body_bytes": "many"}, "settings.max_body_bytes", "whole number"),
        ({"max_body_bytes": 1.0}, "settings.max_body_bytes", "whole number"),
        ({"max_body_bytes": True}, "settings.max_body_bytes", "flag could say"),
        ({"max_body_bytes": [1]}, "settings.max_body_bytes", "flag could say"),
        ({"header_timeout_s": -1}, "settings.header_timeout_s", "seconds"),
        ({"header_timeout_s": "nan"}, "settings.header_timeout_s", "seconds"),
        ({"nonsense": 1}, "settings.nonsense", "no setting"),
        ({"lease_ttl_min_s": 10, "lease_ttl_max_s": 5}, "settings.lease_ttl_min_s", "more than"),
        ({"queue_deadline_max_s": 1}, "settings.queue_deadline_min_s", "more than"),
        ({"cache_hit_scope": "all"}, "settings.cache_hit_scope", "none of"),
        ({"shadow_sample": 0}, "settings.shadow_sample", "0.0001..1"),
        ({"shadow_cost_max": 1.5}, "settings.shadow_cost_max", "0.0001..1"),
        ({"shadow_weights": {"warmth": 1}}, "settings.shadow_weights", "'warmth' is no weight"),
        ({"shadow_weights": {"temperature": -1}}, "settings.shadow_weights", "temperature must"),
        ({"shadow_weights": "temperature"}, "settings.shadow_weights", "name=value"),
        ({"shadow_weights": 1}, "settings.shadow_weights", "name=value"),
        ({"shadow_weights": ["a=1,b"]}, "settings.shadow_weights", "flag could say"),
        ({"leases-max": 1, "leases_max": 2}, None, "twice"),
    ],
)
def test_a_bad_value_changes_nothing_and_says_why(
    settings: dict[str, Any], field: str | None, why: str
) -> None:
    service, reloading = started()
    for order in (settings, dict(reversed(settings.items()))):
        with pytest.raises(InvalidField, match=why) as caught:
            put(reloading, **({"workers_max": 5} | order))
        assert caught.value.field == field
    assert reloading.settings == Settings()
    assert service.core.limits == Settings().core_limits
    assert reloading.counts == {("put", "refused"): 2}


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from(sorted(BY_FIELD)) | st.text(),
        ANYTHING | st.sampled_from([1, 0, 5, 0.5, "7", "gpu", "none"]),
        max_size=4,
    )
)
def test_whatever_is_put_is_in_force_or_changes_nothing(settings: dict[str, Any]) -> None:
    service, reloading = shared()
    before = reloading.settings, dict(service.core.overrides.values)
    refusal = None
    try:
        put(reloading, **settings)
    except (InvalidField, NeedsRestart) as error:
        refusal = error
    if refusal is not None:
        assert len(str(refusal)) < 1000
        assert before == (reloading.settings, service.core.overrides.values)
    else:
        for name, value in settings.items():
            source = reloading.describe().settings[name.replace("-", "_")].source
            assert source == ("default" if value is None else "put")
    assert service.core.limits == reloading.settings.core_limits
    assert service.core.registry.limits == reloading.settings.stream_limits


@within(app_client)
async def test_over_http(client: httpx.AsyncClient, service: Driver) -> None:
    add_worker(service)
    before = (await client.get("/config")).json()
    assert before["settings"].keys() == BY_FIELD.keys()
    shown = before["settings"]["tokens_per_request_max"]
    assert shown == {"value": 1 << 21, "source": "default", "default": 1 << 21, "reloads": True}
    body: Any = {"settings": {"tokens-per-request-max": 16, "max_body_bytes": 200}}
    answer = await client.put("/config", json=body)
    assert answer.status_code == 200
    assert answer.json()["settings"]["tokens_per_request_max"]["value"] == 16
    refused = await client.post("/select", json=PROMPT)
    assert (refused.status_code, refused.json()["code"]) == (422, "too_many_tokens")
    assert (await client.post("/select", json=PROMPT | {"lora": "x" * 300})).status_code == 413
    text = (await client.get("/metrics")).text
    assert 'select_service_limit{name="max_body_bytes"} 200.0' in text
    assert 'config_reloads_total{by="put",outcome="applied"} 1.0' in text
    for body, status, code in (
        ({"settings": {"max_body_bytes": 0}}, 422, "invalid_field"),
        ({"settings": {"port": 0}}, 409, "needs_restart"),
        ({"settings": []}, 422, "invalid_field"),
        ({}, 422, "invalid_field"),
    ):
        answer = await client.put("/config", json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
    back = {"settings": {"tokens_per_request_max": None, "max_body_bytes": None}}
    assert (await client.put("/config", json=back)).status_code == 200
    assert (await client.post("/select", json=PROMPT)).status_code == 200


@within(app_client)
async def test_no_limit_locks_out_who_would_take_it_back(client: httpx.AsyncClient) -> None:
    """What was put wins over the file and outlives the process: there would be no other way."""
    for field in ("max_body_bytes", "head_bytes_max", "body_timeout_s", "header_timeout_s"):
        for value in (0, 1e-300, 1, 128, 1024):
            await client.put("/config", json={"settings": {field: value}})
            back = await client.put("/config", json={"settings": {field: None}})
            assert back.status_code == 200, (field, value, back.text)


async def test_connections_that_are_open_follow() -> None:
    async with listening() as (_, _, server):
        put(server._application.reloading, header_timeout_s=0.25, connections_max=3)
        limits = server.config.http.limits  # type: ignore[union-attr]
        assert (limits.header_timeout_s, limits.connections_max) == (0.25, 3)


@within(app_client)
async def test_thresholds_hold_at_once_and_let_in_who_waits(
    client: httpx.AsyncClient, service: Driver
) -> None:
    add_worker(service, total_kv_blocks=100)
    assert (await client.post("/select_and_reserve", json=PROMPT)).status_code == 200
    body: Any = {"settings": {"max_inflight_default": 1, "max_queued_default": 1}}
    assert (await client.put("/config", json=body)).status_code == 200
    waits = asyncio.ensure_future(client.post("/select_and_reserve", json=PROMPT))
    await until(lambda: service.core.queries.loads()[0].pending_count)
    assert (await client.post("/select_and_reserve", json=PROMPT)).status_code == 503
    await client.put("/config", json={"settings": {"max_inflight_default": 2}})
    assert (await waits).status_code == 200
    body = {
        "settings": {
            "max_inflight_default": None,
            "admission_control": "token-capacity",
            "active_prefill_tokens_threshold": 0,
        }
    }
    assert (await client.put("/config", json=body)).status_code == 200
    refused = await client.post("/select", json=PROMPT)
    assert (refused.status_code, refused.json()["gate"]) == (503, "busy")
    assert (await client.get("/busy_threshold")).json()["thresholds"][0] == {
        "model": "default",
        "active_decode_blocks_threshold": None,
        "active_prefill_tokens_threshold": 0,
        "active_prefill_tokens_threshold_frac": None,
    }
    await client.put("/config", json={"settings": {"active_prefill_tokens_threshold": None}})
    assert (await client.post("/select", json=PROMPT)).status_code == 200
    await client.put("/config", json={"settings": {"global_cache_hit_threshold": 0.5}})
    answer = (await client.post("/select", json=PROMPT)).json()
    assert answer["finish_reason"] == "cache_threshold"
    service.core.check()


# -- the file ------------------------------------------------------------------------------------


def test_a_file_is_read_again_on_sighup(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("workers-max: 5\nleases_max: 6\nconnect-allow: [10.0.0.0/8, a.example]\n")
    service, reloading = started("--config", str(file), "--leases-max", "7")

    def said(field: str) -> tuple[object, str]:
        one = reloading.describe().settings[field]
        return one.value, one.source

    assert said("workers_max") == (5, "file")
    assert said("leases_max") == (7, "flag"), "the flag wins"
    assert said("connect_allow") == (["10.0.0.0/8", "a.example"], "file")
    put(reloading, scopes_max=9)

    file.write_text("workers-max: 0\nleases_max: 6\n")
    with caplog.at_level(logging.INFO, "select_service"):
        asyncio.run(reloading.read_again())
    assert said("workers_max") == (5, "file")
    assert "workers_max: 0 is not in" in caplog.text

    file.write_text("workers-max: 8\nport: 1\n")
    with caplog.at_level(logging.INFO, "select_service"):
        asyncio.run(reloading.read_again())
    assert said("workers_max") == (8, "file")
    assert said("scopes_max") == (9, "put"), "what was put stays"
    assert said("port") == (8092, "default")
    assert reloading.describe().settings["port"].after_restart == 1
    assert "only a restart can change connect_allow, port" in caplog.text
    assert service.core.limits.workers_max == 8

    caplog.clear()
    with caplog.at_level(logging.INFO, "select_service"):
        asyncio.run(reloading.read_again())
    assert "settings changed" not in caplog.text
    file.unlink()
    asyncio.run(reloading.read_again())
    assert said("workers_max") == (8, "file")
    assert reloading.counts == {
        ("put", "applied"): 1,
        ("sighup", "refused"): 2,
        ("sighup", "applied"): 1,
        ("sighup", "unchanged"): 1,
    }


def test_files_are_taken_over_together_or_not_at_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, tokens = tmp_path / "config.yaml", TokenFile(tmp_path / "tokens")
    config.write_text("workers-max: 5\n")
    tokens.add("a", "read")
    service, reloading = started("--config", str(config), "--token-file", str(tokens.path))
    assert service.security is not None
    authority = service.security.authority
    assert authority is not None

    def in_force() -> tuple[int, int]:
        asyncio.run(reloading.read_again())
        return reloading.settings.workers_max, len(authority.book)

    tokens.add("b", "read")
    config.write_text("workers-max: 0\n")
    assert in_force() == (5, 1), "tokens were good, and wait for the settings"
    assert authority.reloads["refused"] == 0, "which were at fault"
    config.write_text("workers-max: 6\n")
    good = tokens.path.read_text()
    tokens.path.write_text("nonsense\n")
    assert in_force() == (5, 1), "and the other way round"
    assert "everything stays as it is" in caplog.text
    assert "line 1: no JSON object" in caplog.text
    assert authority.reloads["refused"] == 1
    tokens.path.write_text(good)
    assert in_force() == (6, 2)
    assert reloading.counts == {("sighup", "refused"): 2, ("sighup", "applied"): 1}
    assert service.security.reloads == {"done": 1, "refused": 2}


def test_sighup_without_a_file_is_for_tokens_alone(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    tokens.add("a", "read")
    service, reloading = started("--token-file", str(tokens.path))
    tokens.add("b", "read")
    asyncio.run(reloading.read_again())
    assert service.security is not None
    assert service.security.reloads == {"done": 1, "refused": 0}


def test_a_fifo_in_the_place_of_a_file_holds_nothing_up(tmp_path: Path) -> None:
    """Opening one waits for ever: the end of the process would, and no reload came after it."""
    file, tokens = tmp_path / "config.yaml", TokenFile(tmp_path / "tokens")
    tokens.add("a", "read")
    file.write_text("workers-max: 5")
    _, reloading = started("--config", str(file), "--token-file", str(tokens.path))
    for path in (file, tokens.path):
        kept = path.rename(tmp_path / "kept")
        os.mkfifo(path)
        asyncio.run(reloading.read_again())
        path.unlink()
        kept.rename(path)
    assert reloading.counts == {("sighup", "refused"): 2}


async def test_who_hangs_up_twice_is_heard_to_the_end(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("workers-max = 5\n")
    _, reloading = started("--config", str(file))
    reloading.hang_up()
    await asyncio.sleep(0)
    file.write_text("workers-max = 6\n")
    reloading.hang_up()
    assert reloading._reading is not None
    await reloading._reading
    assert reloading.settings.workers_max == 6


def test_what_was_put_outlives_the_process(tmp_path: Path) -> None:
    async def life(argv: tuple[str, ...], change: dict[str, Any]) -> dict[str, float]:
        settings, layers = cli.read(("--state-dir", str(tmp_path), *argv), {})
        service = create_driver(settings)
        reloading = create_application(service, settings, layers)[0].reloading
        await service.start()
        try:
            reloading.restore()
            if change:
                put(reloading, **change)
                await service.settle()
            return limit_values(reloading.settings)
        finally:
            await service.close()

    asyncio.run(life((), {"workers_max": 5, "replay_backoff_s": 50, "max_inflight_default": 3}))
    values = asyncio.run(life((), {}))
    assert (values["workers_max"], values["replay_backoff_s"]) == (5, 50)
    values = asyncio.run(life(("--replay-backoff-max-s", "10"), {}))
    assert (values["workers_max"], values["replay_backoff_s"]) == (5, 5), "the rest is dropped"
    asyncio.run(life((), {"workers_max": None, "replay_backoff_s": None}))
    assert asyncio.run(life((), {}))["workers_max"] == Settings().workers_max


def test_an_app_in_somebody_elses_process_has_it_too() -> None:
    settings = replace(SETTINGS, workers_max=1)
    service = create_driver(settings)
    reloading = create_application(service, settings)[0].reloading
    assert reloading.describe().settings["workers_max"].source == "flag"
    put(reloading, workers_max=2)
    add_worker(service, 1)
    add_worker(service, 2)
    assert worker(3)


def test_ids_must_have_room_behind_the_name_of_their_tenant() -> None:
    for name in ("id_length_max", "lease_name_length_max"):
        settings = replace(Settings(), **{name: BOUND_ID_LENGTH_MIN - 1})
        check_settings(settings)
        with pytest.raises(ConfigError, match=f"{name} must be {BOUND_ID_LENGTH_MIN}"):
            check_settings(replace(settings, token_file="tokens"))
    assert max(len(prefix_of(tenant)) for tenant in ("a", "\N{SNOWMAN}" * 99, "b" * 32)) <= 35
