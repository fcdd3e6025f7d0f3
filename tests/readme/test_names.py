"""What the documents name is there: flags and their defaults, metrics, targets of make, modules."""

from __future__ import annotations

import inspect
import re
import subprocess
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
import yaml

from select_service import client
from select_service.client import ClientError
from select_service.core.admission.policies import KEYS
from select_service.edge.discovery import objects
from select_service.edge.http.routes import ROUTES
from select_service.edge.routing import OPEN
from select_service.edge.tracing import spans
from select_service.planner import settings as planner
from select_service.settings import FLAGS
from select_service.simulator import command_options as simulator
from tests.readme import tables
from tests.readme.document import CHAPTERS, DOCS, README
from tests.wait import PATIENCE_S

ROOT = README.parent
DOCUMENTS = [README, *CHAPTERS, *(ROOT / "bench").glob("**/*.md")]
OURS: Final = "select_service", "indexer", "bench"
FOREIGN: Final = {
    "--build-arg",
    "--gpu-memory-utilization",
    "--kv-events-config",
    "--save-result",
    "--set",
    "--upgrade",
}
"""Of docker, vLLM, helm and uv."""
ABSENT: Final = {"--processes"}  # the documents say that the service has none
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?![\w-]*[-…])")
_DEFAULT = re.compile(r"`(--[a-z][a-z0-9-]*)` \((\d[\d,.]*)( %)?\)")
IDS = [str(file.relative_to(ROOT)) for file in DOCUMENTS]


def source() -> str:
    files = (file for folder in OURS for file in (ROOT / folder).glob("**/*.py"))
    return "\n".join(file.read_text("utf-8") for file in files)


@pytest.fixture(scope="module")
def parsed() -> set[str]:
    """Every flag some command of ours knows."""
    planned = {
        name
        for sections in (planner.SECTIONS, simulator.SECTIONS)
        for flags in sections.values()
        for flag in flags
        for name in (flag.name, *flag.type.aliases)
    }
    return (
        {flag.name for flag in FLAGS}
        | planned
        | set(re.findall(r'"(--[a-z][a-z0-9-]*)"', source()))
    )


@pytest.mark.parametrize("file", DOCUMENTS, ids=IDS)
def test_flags(file: Path, parsed: set[str]) -> None:
    text = _FENCED.sub("", file.read_text("utf-8"))
    named = {flag for span in re.findall(r"`([^`]+)`", text) for flag in _FLAG.findall(span)}
    assert named - FOREIGN - ABSENT <= parsed
    assert not ABSENT & {flag.name for flag in FLAGS}


@pytest.mark.parametrize("file", DOCUMENTS, ids=IDS)
def test_defaults_in_brackets(file: Path) -> None:
    defaults = {flag.name: flag.default_text for flag in FLAGS}
    for name, number, per_cent in _DEFAULT.findall(file.read_text("utf-8")):
        if name in defaults:
            said = float(number.replace(",", "")) / (100 if per_cent else 1)
            assert float(defaults[name]) == said, name


@pytest.mark.parametrize("file", DOCUMENTS, ids=IDS)
def test_metrics(file: Path) -> None:
    exposed = set(re.findall(r"^\| `(\w+)`", tables.page("metrics"), re.MULTILINE))
    text = file.read_text("utf-8")
    for name in re.findall(r"`(?:select_service_)(\w+?[a-z])[`{]", text):
        elsewhere = f'"select_service_{name}"'  # in Ray
        assert name in exposed or elsewhere in source(), name
    for name in re.findall(r"`select_planner_(\w+)", text):
        assert f'"{name.removesuffix("_total")}"' in source(), name


@pytest.mark.parametrize("file", DOCUMENTS, ids=IDS)
def test_commands(file: Path) -> None:
    text = file.read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    written = re.findall(r"(?:`|^ *)make ([a-z][a-z-]*)", text, re.MULTILINE)
    assert set(written) <= set(targets.split())
    for module in re.findall(r"python -m ((?:bench|tests)[\w.]*\w)", text):
        assert find_spec(module) is not None, module


def test_make_alone_lists_targets_and_starts_nothing() -> None:
    lines = subprocess.run(
        ["make", "--no-print-directory"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    ).stdout.splitlines()
    (targets,) = re.findall(
        r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE
    )
    listed = [line.split()[1] for line in lines]
    assert listed[:2] == ["run", "demo"]
    assert set(listed) <= set(targets.split())
    assert {"test", "test-full", "bench", "docs", "clean"} <= set(listed)
    assert all(len(line.split()) > 3 for line in lines), "each says what it does"


def test_every_annotation_is_documented() -> None:
    pattern = r'\b\w+\(annotations, "([a-z-]+)"|annotations\.get\(["\']([a-z-]+)'
    read = re.findall(pattern, inspect.getsource(objects))
    assert len(read) > 10
    text = (DOCS / "discovery.md").read_text("utf-8")
    for name in ("".join(one) for one in read):
        assert f"`{name}`" in text, name


def test_every_attribute_of_a_span_is_documented() -> None:
    text = (DOCS / "operating.md").read_text("utf-8")
    for name in spans._Facts.__struct_fields__:
        assert f"`{name}`" in text, name


def test_every_error_of_the_client_is_documented() -> None:
    text = (DOCS / "client.md").read_text("utf-8")
    for name in client.__all__:
        one = getattr(client, name)
        if isinstance(one, type) and issubclass(one, ClientError):
            assert f"`{name}" in text, name


def test_every_key_of_a_policy_is_documented() -> None:
    text = (DOCS / "admission.md").read_text("utf-8")
    for policy, keys in KEYS.items():
        (row,) = re.findall(rf"^\| `{policy}` .*$", text, re.MULTILINE) if keys else [""]
        for key in keys:
            assert f"`{key}`" in row, f"{policy}: {key}"


def test_what_may_be_looked_at_with_read() -> None:
    others = {one.pattern for one in ROUTES if one.method == "GET" and one.scope == "admin"}
    text = (DOCS / "security.md").read_text("utf-8")
    (row,) = re.findall(r"^\| `read` \| (.*) \|$", text, re.MULTILINE)
    assert set(re.findall(r"`(.*?)`", row)) == others


def test_routes_are_documented_by_scope() -> None:
    text = (DOCS / "security.md").read_text("utf-8")
    rows = dict(
        re.findall(r"^\| `(catalog|select|lifecycle|admin)` \| (.*) \|$", text, re.MULTILINE)
    )
    named = {scope: set(re.findall(r"`(/.*?)`", row)) for scope, row in rows.items()}
    unused = {name for names in named.values() for name in names}
    (open_to_all,) = re.findall(r"^\* \*\*Without a token\*\*: (.*?)\.", text, re.MULTILINE)
    assert {one.pattern for one in ROUTES if one.scope == OPEN} == set(
        re.findall(r"`(/.*?)`", open_to_all)
    )
    for route in ROUTES:
        matching = {
            scope: [name for name in names if fnmatch(route.pattern, name)]
            for scope, names in named.items()
        }
        unused -= {name for names in matching.values() for name in names}
        scopes = {scope for scope, names in matching.items() if names}
        if route.method != "GET":
            assert scopes == {route.scope}, route.pattern
        elif route.scope == "admin":
            assert scopes == {"admin"}, route.pattern
    assert not unused


def test_routes_that_refuse_bound_tokens_are_documented() -> None:
    text = (DOCS / "security.md").read_text("utf-8")
    (text,) = re.findall(r"^\* \*\*Process-wide routes\*\*.*?:((?:.|\n  )*)", text, re.MULTILINE)
    names = set(re.findall(r"`(/.*?)`", text)) - {"/console"}  # a page, not an operation
    for route in ROUTES:
        assert route.of_process is any(fnmatch(route.pattern, name) for name in names), route
    for name in names:
        assert any(fnmatch(route.pattern, name) for route in ROUTES), name


def test_alerts_that_wake_people_are_documented() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text("utf-8"))
    critical = {
        rule["alert"]
        for group in rules["groups"]
        for rule in group["rules"]
        if rule.get("labels", {}).get("severity") == "critical"
    }
    text = (DOCS / "operating.md").read_text("utf-8")
    assert set(re.findall(r"`(SelectService\w+)`", text)) == critical
