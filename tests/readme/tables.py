"""What the program knows better than a writer: tables of documents, and deploy/reference.

`python -m tests.readme.tables` (or `make readme`) writes both; `test_tables.py` fails when they
differ. deploy/reference/api.md is made by `api.py`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import select_service.errors
from indexer.errors import EndpointRefused, IndexerError, InvalidEndpoint
from select_service.core.diagnostics.causes import CAUSES, OF_THE_COMMAND
from select_service.edge.app import create_driver
from select_service.edge.http.traffic import Traffic
from select_service.edge.metrics.exposition import Metrics
from select_service.edge.metrics.limit_metrics import TURN_BUDGETS, limit_values
from select_service.errors import ServiceError
from select_service.metric_rows import PREFIX
from select_service.planner import settings as planner
from select_service.settings import ENVIRONMENT, FLAGS, SECTIONS, Flag, Settings
from select_service.settings.table import SECTION_CLASSES
from select_service.simulator import command_options as simulator
from tests.readme.document import DOCS, README, REFERENCE, anchor, headings
from tests.readme.fixed_limits import FIXED

COMMAND = "make readme"
CHAPTER = 2  # the level of its headings
_CONTRACT = re.compile(r" \((contract |D)\d[^)]*\)")
FIRST_METRICS: Final = (
    "http_requests_total",
    "http_request_duration_seconds",
    "workers",
    "pending_requests",
    "selections_failed_total",
    "selections_total",
    "selected_isl_tokens_total",
    "selected_prefill_tokens_total",
    "kv_lost_batches_total",
    "doctor_findings",
)


# -- in documents --------------------------------------------------------------------------------


def contents() -> Iterable[str]:
    """The chapters of README.md, each with its parts."""
    chapter: list[str] = []
    for level, title in headings(README.read_text("utf-8")):
        link = f"[{title}](#{anchor(title)})"
        if level == CHAPTER:
            if chapter:
                yield _chapter(chapter)
            chapter = []
        if level in (CHAPTER, CHAPTER + 1):
            chapter.append(link)
    yield _chapter(chapter)


def _chapter(links: list[str]) -> str:
    first, *parts = links
    return f"* {first}: {' · '.join(parts)}" if parts else f"* {first}"


def first_flags() -> Iterable[str]:
    """The ten flags that most installations turn."""
    yield "| flag | default | meaning |"
    yield "|---|---|---|"
    for flag in (one for one in FLAGS if one.type.is_common):
        yield f"| `{flag.name}` | {flag.default_text} | {_cell(flag.help)} |"


def first_metrics() -> Iterable[str]:
    """The ten metrics that show whether all is well."""
    rows = {name: (labels, text) for name, _, labels, text in _families()}
    yield f"| {PREFIX}… | labels | meaning |"
    yield "|---|---|---|"
    for name in FIRST_METRICS:
        labels, text = rows[name]
        yield f"| `{name}` | {labels} | {text} |"


TABLES: dict[str, tuple[Path, Callable[[], Iterable[str]]]] = {
    "contents": (README, contents),
    "first-flags": (DOCS / "operating.md", first_flags),
    "first-metrics": (DOCS / "operating.md", first_metrics),
}
"""Each with the document that shows it, between markers with its name."""


# -- in deploy/reference -------------------------------------------------------------------------


def flags() -> Iterator[str]:
    """Every flag; limits with the metric that shows how near they are, or how often reached."""
    yield from _lines("""
# Flags

Every flag of `select-service`, by subject. A setting comes from its flag, else its
variable, else the file given with `--config`, else its default
([operating.md](../docs/operating.md#settings)). Flags marked ↻ can
[change at run time](../docs/operating.md#settings-that-change-while-it-runs).

Every flag with a number is a limit: `select_service_limit{name="connections_max"}` shows the value
in force, and `select_service_limit_hits_total` with the same name counts how often it was reached,
for limits with a count of their own. For the others the last column names the
[metric](metrics.md) to watch. Limits without a flag are in [limits.md](limits.md).
""")
    for section, flags_in_it in SECTIONS.items():
        heading = SECTION_CLASSES[section].__doc__
        title = section.replace("_", " ").capitalize().replace("Kv", "KV")
        yield from ("", f"## {title}", "", str(heading), "")
        yield "| flag | default | meaning | watch |"
        yield "|---|---|---|---|"
        yield from map(_flag, flags_in_it)
    yield from ("", "## Environment", "")
    yield from ("An unreadable value keeps the default and is logged by name.", "")
    yield "| variable | meaning |"
    yield "|---|---|"
    for variable in ENVIRONMENT:
        yield f"| `{variable.name}` | {_cell(variable.help)} |"


def _flag(flag: Flag) -> str:
    watch = f"`{flag.watch}`" if flag.watch else ""
    text = f"{flag.help} (`{flag.type.env}`)" if flag.type.env else flag.help
    if flag.reloads:
        text += " ↻"
    return f"| `{flag.name}` | {flag.default_text} | {_cell(text)} | {_cell(watch)} |"


def planner_flags() -> Iterator[str]:
    """Every flag of the planner's commands."""
    yield from _lines("""
# Flags of select-planner

Every flag of `select-planner`, by command. They are set on the command line only;
[planner.md](../docs/planner.md) says what they are for.
""")
    yield from _commands("select-planner", planner.SECTIONS)


def simulator_flags() -> Iterator[str]:
    """Every flag of the simulator's commands."""
    yield from _lines("""
# Flags of select-sim

Every flag of `select-sim`, by command. They are set on the command line only;
[simulator.md](../docs/simulator.md) says what they are for.
""")
    yield from _commands("select-sim", simulator.SECTIONS)


def _commands(program: str, sections: Mapping[str, Iterable[Flag]]) -> Iterator[str]:
    for command, flags_of_it in sections.items():
        yield from ("", f"## {program} {command}", "")
        yield "| flag | default | meaning |"
        yield "|---|---|---|"
        for flag in flags_of_it:
            names = ", ".join(f"`{name}`" for name in (flag.name, *flag.type.aliases))
            yield f"| {names} | {flag.default_text} | {_cell(flag.help)} |"


def limits() -> Iterator[str]:
    """What has no flag: budgets of a turn, and bounds that nobody needed to move so far."""
    yield from _lines("""
# Limits without a flag

Limits that have one are among the [flags](flags.md).

## One turn of the event loop

The work of one turn is bounded, so that no turn delays requests for long. `/metrics` shows these
limits, too (`select_service_limit`).

| limit | value | meaning |
|---|---|---|
""")
    values = limit_values(Settings())
    for name, text in TURN_BUDGETS.items():
        yield f"| `{name}` | {values[name]:g} | {_cell(text)} |"
    yield from _lines("""

## Bounds of memory and waits

The source gives the reason beside each.

| constant | value | meaning |
|---|---|---|
""")
    for room, name, text in FIXED:
        value = getattr(importlib.import_module(room), name)
        said = f"{value:g}" if isinstance(value, float) else str(value)
        yield f"| `{room}.{name}` | {said} | {_cell(text)} |"


def metrics() -> Iterator[str]:
    """Every family of series that a service exposes, those without series yet included."""
    yield from _lines(f"""
# Metrics

What `GET /metrics` exports besides the series of the process and its garbage collector. Series of a
rank vanish with their worker, those of a scope with its last one. `--metrics-rank-series-max` and
`--metrics-scope-series-max` bound their number. Dashboard and alerts built on them:
[operating.md](../docs/operating.md#dashboard-and-alerts).

| {PREFIX}… | type | labels | meaning |
|---|---|---|---|
""")
    for name, kind, labels, text in _families():
        yield f"| `{name}` | {kind} | {labels} | {text} |"


def _families() -> Iterator[tuple[str, str, str, str]]:
    service = create_driver(Settings())
    for family in Metrics(service, Traffic(), Settings()).families():
        if family.name.startswith(PREFIX):  # others: prometheus-client's own
            name = family.name.removeprefix(PREFIX) + "_total" * (family.type == "counter")
            labels = ", ".join(family._labelnames)  # type: ignore[attr-defined]
            yield name, family.type, labels, _cell(family.documentation)


def errors() -> Iterator[str]:
    """Every code of a refusal, with its status and what it means."""
    yield from _lines("""
# Errors

Every answer from 400 on is `{"error": "<text for people>", "code": "<one of these>"}`, mostly with
the `field` at fault or `details` ([all members](api.md#problem)). Codes are stable, texts are for
people. 429 and 503 say in `Retry-After` when to retry, unless the same request never fits.

| code | status | meaning |
|---|---|---|
""")
    meanings: dict[tuple[str, str], list[str]] = {}
    for refusal in _refusals():
        status = refusal.status if "status" in vars(refusal) else "its cause's"
        meanings.setdefault((refusal.code, str(status)), []).append(_meaning(refusal))
    for (code, status), texts in sorted(meanings.items()):
        yield f"| `{code}` | {status} | {_cell(' '.join(texts))} |"
    yield from _lines("""

Refusals for load have their gate's `reason` as the code; `--overload-status-code` sets the status:
[admission.md](../docs/admission.md).
""")


def _refusals() -> Iterator[type[ServiceError | IndexerError]]:
    """Every kind with a code of its own; of the index's those that a client can meet."""
    yield from (InvalidEndpoint, EndpointRefused)
    kinds = [one for one in vars(select_service.errors).values() if isinstance(one, type)]
    yield from (one for one in kinds if issubclass(one, ServiceError) and "code" in vars(one))


def _meaning(refusal: type[Exception]) -> str:
    text = (inspect.getdoc(refusal) or "").partition("\n\n")[0]
    return _CONTRACT.sub("", " ".join(text.split()))


def findings() -> Iterator[str]:
    """What the doctor can find, and what to do about it."""
    yield from _lines("""
# Findings of the doctor

What `select-service doctor`, `GET /ready?verbose=true`, the console and
`select_service_doctor_findings` may name. How the doctor
works: [operating.md](../docs/operating.md#the-doctor).

| code | severity | cause | remedy |
|---|---|---|---|
""")
    for cause in (*CAUSES, *OF_THE_COMMAND):
        why, remedy = _cell(cause.why), _cell(cause.remedy)
        yield f"| `{cause.code}` | {cause.severity} | {why} | {remedy} |"


PAGES: dict[str, Callable[[], Iterable[str]]] = {
    "flags": flags,
    "planner-flags": planner_flags,
    "simulator-flags": simulator_flags,
    "limits": limits,
    "metrics": metrics,
    "errors": errors,
    "findings": findings,
}


# -- between the two -----------------------------------------------------------------------------


def shown(name: str) -> str:
    """What stands between the markers of a table."""
    file, _ = TABLES[name]
    found = re.findall(
        rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", file.read_text("utf-8"), re.DOTALL
    )
    if len(found) != 1:
        raise ValueError(f"{file.name} has {len(found)} places for the table {name}")
    return str(found[0])


def written(name: str) -> str:
    """What should stand there."""
    _, rows = TABLES[name]
    return _text(rows())


def page(name: str) -> str:
    """What should stand in that file of deploy/reference."""
    return _text(PAGES[name]())


def main() -> None:
    """Write every table into its document, and every page of deploy/reference."""
    for name, (file, _) in TABLES.items():
        pair = (f"<!-- {name} -->\n", f"<!-- /{name} -->")
        text = file.read_text("utf-8").replace(shown(name).join(pair), written(name).join(pair))
        file.write_text(text, "utf-8")
    for name in PAGES:
        (REFERENCE / f"{name}.md").write_text(page(name), "utf-8")


def _lines(text: str) -> list[str]:
    return text.removeprefix("\n").removesuffix("\n").split("\n")


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
