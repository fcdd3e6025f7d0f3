"""Files of settings: read as the command line is, refused in the same words, all or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from select_service import cli
from select_service.settings import FLAGS, ConfigError, FieldValidation, Settings
from select_service.settings.layers import FILE_BYTES_MAX, Layers, plain, read_file, read_values


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "c.yaml",
            "port: 1\nfield-validation: strict\nreplay_timeout_s: 2.5\naccess-log: true\n"
            "connect-allow:\n  - 10.0.0.0/8\n  - a.example\nadmission-config: {capacity: 5}\n",
        ),
        (
            "c.toml",
            'port = 1\nfield-validation = "strict"\nreplay_timeout_s = 2.5\naccess-log = true\n'
            'connect-allow = "10.0.0.0/8,a.example"\nadmission-config = {capacity = 5}\n',
        ),
    ],
)
def test_files(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert read_file(str(file)) == {
        "port": 1,
        "field_validation": FieldValidation.STRICT,
        "replay_timeout_s": 2.5,
        "access_log": True,
        "connect_allow": ("10.0.0.0/8", "a.example"),
        "admission_config": {"capacity": 5},
    }


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("c.yaml", "port: 99999", "port: 99999 is not in"),
        ("c.yaml", "- port", "no list of settings"),
        ("c.yaml", "1: 2", "no name"),
        ("c.yaml", "nonsense: 1", "'nonsense' is no setting$"),
        ("c.yaml", "prot: 1", r"'prot' is no setting \(is port meant\?\)"),
        ("c.yaml", "port 1", "such as `port: 8092`"),
        ("c.yaml", "config: c.yaml", "no setting"),
        ("c.yaml", "port: 1\nport: 2", "comes twice"),
        ("c.yaml", "scopes-max: 1\nscopes_max: 2", "comes twice"),
        ("c.yaml", "port: [", "line"),
        ("c.yaml", "!!python/object/apply:os.system ['true']", "could not determine"),
        ("c.yaml", "uds-mode: 0660", "put it in quotes"),
        ("c.yaml", "access-log: 1", "true or false"),
        ("c.yaml", "port: 2020-01-01", "flag could say"),
        ("c.yaml", "port: true", "flag could say"),
        ("c.yaml", "port: null", "flag could say"),
        ("c.yaml", "connect-allow: ['a,b']", "flag could say"),
        ("c.yaml", "connect-deny: [10.0.0.1/8]", "neither a host nor a network"),
        ("c.yaml", "connect-schemes: [http]", "none of"),
        ("c.yaml", "a: &a [1]\nport: [*a, *a]", "aliases"),
        ("c.yaml", "port: !!bool x", "what its tag says"),
        ("c.yaml", 'port: !!int ""', "what its tag says"),
        ("c.yaml", "port: !!timestamp foo", "what its tag says"),
        ("c.yaml", "[" * 5000, "c.yaml"),
        ("c.yaml", "#" * (FILE_BYTES_MAX + 1), "longer than"),
        ("c.yaml", "\x00", "c.yaml"),
        ("c.toml", "port: 1", "c.toml"),
        ("c.toml", "[table]\nport = 1", "no setting"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, name: str, text: str, why: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_file(str(file))


def test_files_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", "a\0b"):
        with pytest.raises(ConfigError, match="cannot read"):
            read_file(str(path))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ConfigError):
        read_file(str(tmp_path / "bytes.yaml"))
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_file(str(tmp_path / "empty.yaml")) == {}


def test_what_is_shown_can_be_read() -> None:
    """GET /config and a file speak alike, for every setting."""
    settings = Settings()
    for flag in FLAGS:
        value = getattr(settings, flag.field)
        if value is not None and flag.field != "config":
            assert read_values({flag.field: plain(value)}) == {flag.field: value}, flag.name


def test_flags_win_over_variables_over_files(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("max-queued-default: 1\nmax-inflight-default: 1\noverload-status-code: 501\n")
    argv = ["--config", str(file), "--max-queued-default", "3"]
    environ = {"DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "2", "DYN_ENGINE_REQUEST_LIMIT": "2"}
    settings, layers = cli.read(argv, environ)
    found = settings.max_queued_default, settings.max_inflight_default, settings.threads
    assert found == (3, 2, 4)
    assert settings.overload_status_code == 501
    names = ("max_queued_default", "max_inflight_default", "overload_status_code", "threads")
    assert [layers.source_of(name) for name in names] == ["flag", "env", "file", "default"]


def test_a_file_that_makes_no_sense_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    for text in ("port: x", "lease-ttl-min-s: 9\nlease-ttl-max-s: 8", "replica-sync-peers: [a]"):
        file.write_text(text)
        with pytest.raises(SystemExit) as ended:
            cli.parse(["--config", str(file)], {})
        assert ended.value.code == 2
        assert "error" in capsys.readouterr().err


def test_a_unix_socket_in_the_file_turns_tcp_off_unless_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("uds: /tmp/s\n")
    assert cli.parse(["--config", str(file)], {}).port is None
    assert cli.parse(["--config", str(file), "--port", "5"], {}).port == 5


def test_settings_of_a_caller_come_back_as_they_were() -> None:
    settings = Settings(port=None, workers_max=3, connect_allow=("10.0.0.0/8",))
    assert Layers.of(settings).settings() == settings
