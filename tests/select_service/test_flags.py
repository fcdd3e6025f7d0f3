"""Flags become Settings, or exit 2."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from select_service import cli
from select_service.settings import (
    FLAGS,
    FieldValidation,
    Settings,
)
from select_service.types import TrustSettings


def test_no_flags_give_the_defaults() -> None:
    assert cli.parse([], {}) == Settings()


def test_every_setting_has_a_flag_and_every_flag_a_setting() -> None:
    fields = {field.name for field in msgspec.structs.fields(Settings)} - {"router"}
    assert {flag.field for flag in FLAGS} == fields
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)


def test_flags() -> None:
    settings = cli.parse(
        [
            *("--port", "1", "--host", "::1", "--threads", "0", "--field-validation", "strict"),
            *("--on-event-loss", "drop", "--reservation-ttl-s", "0", "--log-format", "json"),
            *("--kv-poll-interval-s", "0", "--replay-timeout-s", "2.5", "--access-log"),
            *("--max-body-bytes", "1000", "--replica-sync-port", "7"),
        ],
        {"DYN_ROUTER_TEMPERATURE": "0.5"},
    )
    assert settings.field_validation is FieldValidation.STRICT
    assert (settings.host, settings.port, settings.threads) == ("::1", 1, 0)
    assert (settings.reservation_ttl_s, settings.max_body_bytes) == (0.0, 1000)
    assert settings.access_log
    assert settings.stream_limits.poll_after_s == 0
    assert settings.stream_limits.replay_deadline_s == 2.5
    assert settings.router.config.temperature == 0.5


@pytest.mark.parametrize(
    "args",
    [
        ["--bogus"],
        ["extra"],
        ["--por", "1"],
        ["--port", "65536"],
        ["--port", "-1"],
        ["--port", "x"],
        ["--port"],
        ["--replica-sync-port", "0"],
        ["--field-validation", "maybe"],
        ["--on-event-loss", "shrug"],
        ["--reservation-ttl-s", "-1"],
        ["--replay-timeout-s", "0"],
        ["--kv-poll-interval-s", "nan"],
        ["--log-format", "xml"],
        ["--max-body-bytes", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(args, {})
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("usage: select-service")
    assert len(errors.splitlines()) <= 3  # the error is not buried under two hundred flags


def test_admission_from_flags_and_their_variables(tmp_path: Path) -> None:
    config = tmp_path / "policy.json"
    config.write_text('{"capacity": 5}', "utf-8")
    settings = cli.parse(
        [
            *("--admission-control", "token-capacity", "--active-decode-blocks-threshold", "0.85"),
            *("--admission-policy", "token-bucket", "--admission-config", f"@{config}"),
            *("--active-prefill-tokens-threshold-frac", "None"),
        ],
        {
            "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.5",
            "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": "100",
            "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC": "2.5",
            "DYN_ENGINE_REQUEST_LIMIT": "8",
            "DYN_HTTP_OVERLOAD_STATUS_CODE": "529",
        },
    )
    admission = settings.admission
    assert (admission.mode, admission.max_inflight, admission.overload_status) == (
        "token-capacity",
        8,
        529,
    )
    assert admission.active_decode_blocks_threshold == 0.85, "the flag wins"
    assert admission.active_prefill_tokens_threshold == 100
    assert admission.active_prefill_tokens_threshold_frac is None, "None is off"
    assert (admission.policy, admission.policy_config) == ("token-bucket", {"capacity": 5})
    assert settings.router.warnings == ()


def test_variables_that_cannot_be_read_and_thresholds_without_effect_leave_one_warning() -> None:
    settings = cli.parse(
        ["--active-prefill-tokens-threshold", "1"], {"DYN_HTTP_OVERLOAD_STATUS_CODE": "1000"}
    )
    assert settings.overload_status_code == 503
    assert [text.partition(":")[0] for text in settings.router.warnings] == [
        "DYN_HTTP_OVERLOAD_STATUS_CODE",
        "busy thresholds have no effect while --admission-control is none",
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ("--active-decode-blocks-threshold", "1.5"),
        ("--active-prefill-tokens-threshold", "-1"),
        ("--active-prefill-tokens-threshold-frac", "nan"),
        ("--overload-status-code", "199"),
        ("--overload-status-code", "204"),
        ("--global-cache-hit-threshold", "1.1"),
        ("--admission-policy", "nonsense"),
        ("--admission-config", "[]"),
        ("--admission-config", "@/nowhere"),
        ("--admission-policy", "token-bucket", "--admission-config", '{"capacity": 0}'),
        ("--slo-class-max", "nonsense"),
        ("--max-inflight-default", "0"),
    ],
)
def test_admission_that_makes_no_sense_is_wrong_usage(flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse([*flags], {})
    assert ended.value.code == 2


def test_trust_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--trust-samples", "8", "--trust-error-max", "0.5", "--no-freshness-weighting"]
    trust = cli.parse(flags, {}).trust
    assert (trust.samples, trust.error_max, trust.weigh_freshness) == (8, 0.5, False)
    assert cli.parse([], {}).trust == TrustSettings()
    with pytest.raises(SystemExit):
        cli.parse(["--trust-error-max", "0.1"], {})
    assert "error_clear must be above 0 and at most error_max" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "environ", "port"),
    [
        ([], {}, 8092),
        (["--uds", "s"], {}, None),
        (["--uds=s", "--port=0"], {}, 0),
        (["--uds", "s", "--port", "8092", "--host", "::1"], {}, 8092),
        ([], {"SELECT_SERVICE_UDS": "s"}, None),
        (["--port", "1"], {"SELECT_SERVICE_UDS": "s"}, 1),
        (["--uds", "s", "--replica-sync-port", "7", "--port", "1"], {}, 1),
        (["--uds", "s", "--replica-sync-port", "7", "--side-port", "1"], {}, None),
    ],
)
def test_with_a_unix_socket_there_is_tcp_when_it_is_asked_for(
    args: list[str], environ: dict[str, str], port: int | None
) -> None:
    settings = cli.parse(args, environ)
    assert settings.port == port
    assert (settings.uds is None) == (not args and not environ)


@pytest.mark.parametrize(
    "args",
    [
        ["--uds", ""],
        ["--uds", "s", "--uds-mode", "999"],
        ["--uds", "s", "--uds-mode", "0o660"],
        ["--uds", "s", "--host", "::1"],
        ["--uds", "s", "--replica-sync-port", "7"],
        ["--port", "1", "--side-port", "1"],
        ["--side-host", "h"],
    ],
)
def test_what_a_unix_socket_cannot_be(args: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.parse(args, {})
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://proxy", "not an http:// or https:// URL"),
        ("http://proxy/?token=secret", "has a query"),
        ("http://proxy/#part", "has a fragment"),
        ("http://name:secret@proxy", "a user's name"),
        ("http://name:se/secret@proxy", "a user's name"),
        ("http://pro xy", "must be escaped"),
        ("http://", "names no host"),
        ("http://:80", "names no host"),
        ("http://proxy:0", "no port of it"),
        ("http://proxy:99999", "no URL"),
        ("http://[::1", "no URL"),
    ],
)
@pytest.mark.parametrize("flag", ["--advertise-url", "--kubernetes-api"])
def test_a_url_that_no_path_can_be_put_behind(
    flag: str, url: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.parse([flag, url], {})
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert flag in said
    assert why in " ".join(said.split())
    assert "secret" not in said


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://peer/?token=secret", "has a query"),
        ("http://peer/any#", "has a fragment"),
        ("http://name:secret@peer", "a user's name"),
    ],
)
def test_a_peer_that_would_be_asked_for_anything_else_than_a_dump(
    url: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.parse(["--indexer-peers", f"http://good,{url}"], {})
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "--indexer-peers" in said
    assert why in " ".join(said.split())
    assert "secret" not in said


@pytest.mark.parametrize("url", ["peer:8092", "http://", "ftp://peer", "http://[::1"])
def test_a_peer_that_nobody_can_be_asked_by_is_none(url: str) -> None:
    assert cli.parse(["--indexer-peers", url], {}).indexer_peers == (url,)


def test_replicas_may_reach_it_through_a_proxy() -> None:
    args = ["--uds", "s", "--replica-sync-port", "7", "--advertise-url", "http://proxy"]
    assert cli.parse(args, {}).port is None


@pytest.mark.parametrize(
    ("idle", "switch"),
    [
        (("--sessions-max", "5"), ("--session-ttl-s", "60")),
        (("--session-gap-factor", "3"), ("--session-ttl-s", "60")),
        (("--kv-pull-costs", "set"), ("--kv-pull",)),
    ],
)
def test_what_another_flag_switches_on_is_not_ignored_silently(
    idle: tuple[str, ...], switch: tuple[str, ...]
) -> None:
    (warning,) = cli.parse([*idle], {}).router.warnings
    field, without = (one[0].removeprefix("--").replace("-", "_") for one in (idle, switch))
    assert warning == f"{field} has no effect without {without}"
    assert cli.parse([*idle, *switch], {}).router.warnings == ()
