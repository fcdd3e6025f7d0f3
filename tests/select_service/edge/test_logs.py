"""One record, one line, whoever wrote it and whatever a client put into it."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterator

import pytest

from select_service.edge import logs
from select_service.settings import LogFormat


@pytest.fixture(autouse=True)
def _untouched_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    access = logging.getLogger("select_service.access")
    yield
    root.handlers[:], root.level = handlers, level
    access.disabled = False


def test_json_lines() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", access_log=False, stream=stream)
    logging.getLogger("a.b").info("hello %s", "you", extra={"worker_id": 2**64 - 1, "odd": {1}})
    logging.getLogger("a.b").debug("unseen")
    logging.getLogger("uvicorn.error").info("unseen")
    logging.getLogger("select_service.access").info("unseen")
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert record.pop("timestamp").endswith("Z")
    assert record["event"] == "hello you"
    assert record["worker_id"] == 2**64 - 1
    assert (record["level"], record["logger"]) == ("info", "a.b")


def test_text_lines() -> None:
    stream = io.StringIO()
    logs.configure("text", "info", access_log=False, stream=stream)
    extra = {"worker_id": 2**64 - 1, "odd": [1], "said": "two words", "plain": "one"}
    logging.getLogger("a.b").warning("hello %s", "you", extra=extra)
    logging.getLogger("a").info("a sentence of more than thirty characters")
    first, second = stream.getvalue().splitlines()
    time, _, rest = first.partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", time)
    assert rest == (
        "[warning  ] hello you                      [a.b] "
        "odd=[1] plain=one said='two words' worker_id=18446744073709551615"
    )
    assert second.endswith(" [info     ] a sentence of more than thirty characters [a]")


def test_another_configuration_lets_go_of_what_the_one_before_held() -> None:
    reads, writes = os.pipe()
    with os.fdopen(writes, "w") as stream:
        logs.configure("text", "info", access_log=False, stream=stream)
        before = os.listdir("/proc/self/fd")
        logs.configure("json", "info", access_log=False, stream=stream)
        assert len(os.listdir("/proc/self/fd")) == len(before)
    logs.configure("json", "info", access_log=False, stream=io.StringIO())
    assert os.read(reads, 1) == b"", "the end of it is written"
    os.close(reads)


def test_what_json_cannot_say_is_spelt_out() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", access_log=False, stream=stream)
    logging.getLogger("a").info("x", extra={"odd": object, "fine": 1})
    record = json.loads(stream.getvalue())
    assert record["fine"] == 1
    assert "object" in record["odd"]


def test_wide_numbers_and_odd_keys_cost_no_line() -> None:
    stream = io.StringIO()
    logs.configure("json", "info", access_log=False, stream=stream)
    fields = {"wide": 2**64, "low": -(2**70), "id": 2**63 - 1, "keys": {1: 2}, "odd": {(1,): 2}}
    logging.getLogger("a").info("x", extra=fields)
    record = json.loads(stream.getvalue())
    assert (record["wide"], record["low"]) == (str(2**64), str(-(2**70)))
    assert record["id"] == 2**63 - 1
    assert (record["keys"], record["odd"]) == ("{1: 2}", "{(1,): 2}")


@pytest.mark.parametrize("form", ["json", "text"])
def test_clients_write_no_log_lines(form: LogFormat) -> None:
    stream = io.StringIO()
    logs.configure(form, "info", access_log=True, stream=stream)
    evil = "r1\n2026 [critical] all is lost\x1b[31m" + "x" * 10**6
    logging.getLogger("select_service.access").info("request", extra={"path": evil})
    logging.getLogger("a").warning("reservation %s not found", evil)
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert "\x1b" not in text
    assert len(text) < 2000


@pytest.mark.parametrize("form", ["json", "text"])
def test_tracebacks_are_kept(form: LogFormat) -> None:
    stream = io.StringIO()
    logs.configure(form, "error", access_log=False, stream=stream)
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        logging.getLogger("a").exception("failed")
    assert "ZeroDivisionError: division by zero" in stream.getvalue()
    assert "test_tracebacks_are_kept" in stream.getvalue()


def test_tracebacks_have_an_end() -> None:
    stream = io.StringIO()
    logs.configure("text", "error", access_log=False, stream=stream)
    error = ValueError("x\n" * 10_000 + "y" * 10_000)
    logging.getLogger("a").error("failed", exc_info=error)
    *_, last = lines = stream.getvalue().splitlines()
    assert len(lines) == 2 + logs.TRACE_LINES_MAX
    assert len(last) < 300
    assert lines[1].startswith("    ValueError: x")


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_line_has_a_secret(form: LogFormat) -> None:
    """Whoever wrote it: an error of a library may quote the address that it could not use."""
    stream = io.StringIO()
    logs.configure(form, "info", access_log=False, stream=stream)
    url = "http://me:s3cret@host"
    try:
        int(url)
    except ValueError:
        logging.getLogger("a").exception("asked %s", url, extra={"peer": url, "of": [url]})
    logging.getLogger("a").info("%s", "x" * 240 + "http://me:s3cret" + "y" * 99 + "@host")
    logging.getLogger("a").info("shown: Authorization: Bearer s3cret")
    said = stream.getvalue()
    assert said.count("http://***@host") >= 4
    assert "s3cret" not in said
