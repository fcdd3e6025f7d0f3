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
from select_service.simulator import command_options as simulator
from tests.readme.document import DOCS, README, REFERENCE, anchor, headings

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
FIXED = (
    (
        "select_service.edge.http.connection_guard",
        "LINGER_BYTES_MAX",
        "bytes read on after a refusal",
    ),
    (
        "select_service.edge.http.connection_guard",
        "RESERVED_MAX",
        "connections for /config, /health, /metrics",
    ),
    ("select_service.edge.http.pieces", "LINES_PER_TURN", "lines of requests parsed in one turn"),
    (
        "select_service.edge.http.request_reader",
        "PIPELINED_MAX",
        "requests read behind the one answered",
    ),
    ("select_service.edge.batch_runner", "ITEMS_MAX", "requests in one body of /select_batch"),
    (
        "select_service.compat.selection_cache",
        "ENTRIES_MAX",
        "selections that `create_reservation` finds by id, in Dynamo's place",
    ),
    ("select_service.compat.selection_cache", "BYTES_MAX", "bytes of their prompts"),
    ("select_service.edge.http.connection_guard", "LINGER_S", "seconds a refused client may pause"),
    ("select_service.edge.http.connection_guard", "LINGER_MAX_S", "seconds it may go on sending"),
    ("select_service.edge.state.store", "LOG_BYTES", "bytes of the state's log, from the start"),
    ("select_service.edge.state.journal", "BATCH_ROWS_MAX", "rows in one commit"),
    (
        "select_service.core.ledger.expired_ids",
        "LAPSED_MAX",
        "names of expired reservations remembered",
    ),
    (
        "select_service.core.ledger.freed_ids",
        "LONG_ID_CHARS",
        "longest freed id remembered in full",
    ),
    ("select_service.edge.logs", "VALUE_CHARS_MAX", "characters of a value in the log"),
    (
        "select_service.edge.tracing.span_export",
        "TEXT_CHARS_MAX",
        "characters of a span's attribute",
    ),
    (
        "select_service.edge.tracing.span_export",
        "ANSWER_BYTES_MAX",
        "bytes read of a collector's answer",
    ),
    (
        "select_service.edge.tracing.propagation",
        "STATE_BYTES_MAX",
        "bytes of a tracestate passed on",
    ),
    ("select_service.edge.app", "TRACED_SWITCH_S", "seconds the exporting thread keeps the loop"),
    ("select_service.edge.driver.housekeeping", "HOUSEKEEPING_S", "seconds an expiry may be late"),
    (
        "select_service.edge.garbage_collection",
        "QUIET_FULL_S",
        "seconds between full garbage collections",
    ),
    ("select_service.edge.garbage_collection", "LOAD", "requests after which one may come sooner"),
    ("select_service.edge.garbage_collection", "LOAD_S", "seconds between full collections then"),
    (
        "select_service.edge.garbage_collection",
        "FULL_S",
        "the same in a process that is never quiet",
    ),
    ("select_service.edge.cooperative", "SLICE_S", "seconds of the console's work in a row"),
    ("select_service.edge.console.stream", "INTERVAL_S", "seconds between messages to its pages"),
    ("select_service.edge.console.stream", "BEHIND_MAX", "messages a page may leave unread"),
    ("select_service.edge.console.history", "HISTORY_POINTS", "points of the last minutes kept"),
    ("select_service.edge.console.history", "HISTORY_STEP_S", "seconds between two of them"),
    ("select_service.edge.console.console_handlers", "LISTED_MAX", "rows of a list of the console"),
    ("select_service.edge.console.prefix", "HOLDERS_MAX", "ranks the prefix browser shows"),
    (
        "select_service.edge.lazy_imports",
        "PAUSE_S",
        "seconds before each module loaded after the start",
    ),
    (
        "select_service.edge.server",
        "LAST_WORDS_S",
        "seconds that requests on their way are waited for when the port is closed",
    ),
    (
        "select_service.edge.server",
        "GOODBYE_S",
        "seconds a client's side of TLS may take to close at the end",
    ),
    ("select_service.edge.dump_stream", "SLICE_S", "seconds of /dump between other requests"),
    (
        "select_service.core.ledger.freed_ids",
        "FREED_MEMORY_S",
        "seconds an ended id is remembered",
    ),
    ("indexer.edge.sockets", "SOCKETS_MAX", "ZMQ sockets"),
    ("indexer.edge.sockets", "REPLAY_MESSAGES_MAX", "replies libzmq queues within one replay"),
    ("indexer.edge.sockets", "SUBSCRIPTION_BYTES_MAX", "bytes a replica may send our publisher"),
    ("indexer.edge.sockets", "RECONNECT_MAX_MS", "longest pause between attempts to connect, ms"),
    ("indexer.edge.sockets", "HEARTBEAT_TIMEOUT_MS", "silence after which an engine is gone, ms"),
    ("indexer.edge.stream_sockets", "RECONNECT_AFTER_MAX_S", "longest pause after libzmq gave up"),
    (
        "indexer.edge.endpoint_follower",
        "ASK_AFTER_MAX_S",
        "longest pause before a lost name is asked for again",
    ),
    ("indexer.edge.addresses", "THREADS", "names resolved at one time"),
    ("indexer.core.budget", "TOLERATED", "of --index-bytes-max, then the largest is dropped"),
    ("select_service.core.fleet.pins", "PINS_MAX", "closed scopes whose block size is pinned"),
    ("indexer.core.registry", "SWEPT_PER_TURN", "indexes asked in a turn whether they are clean"),
    ("select_service.settings.layers", "FILE_BYTES_MAX", "bytes of the file of --config"),
    ("select_service.edge.load_topic", "APPLY_AFTER_S", "seconds workers' reports are gathered"),
    ("select_service.edge.load_topic", "RANKS_MAX", "ranks whose report is not taken in yet"),
    (
        "select_service.core.admission.partition_admission",
        "SCANNED_MAX",
        "waiting requests looked at when load goes",
    ),
    (
        "select_service.core.admission.controller",
        "DEADLINE_S",
        "seconds to wait for a full worker",
    ),
    ("indexer.edge.snapshots", "SLICE_S", "seconds of the index snapshot between other requests"),
    (
        "indexer.edge.snapshots",
        "REST_TURNS",
        "turns a rank gets to end a batch before its snapshot",
    ),
    ("indexer.edge.snapshot_file", "FRAME_BYTES_MAX", "bytes of a frame of the index snapshot"),
    ("indexer.core.progress", "DIGESTS_KEPT", "digests of a rank's last batches in the snapshot"),
    (
        "select_service.edge.replication.sync",
        "TURN_S",
        "seconds for all replicas' messages together",
    ),
    (
        "select_service.edge.replication.sync",
        "MESSAGES_PER_TURN",
        "messages of one replica in a row",
    ),
    (
        "select_service.edge.replication.pull",
        "SLICE_S",
        "seconds of a snapshot between other requests",
    ),
    ("select_service.edge.security.tokens", "TOKEN_CHARS_MIN", "shortest token that is looked at"),
    (
        "select_service.edge.security.tls",
        "LOOK_EVERY_S",
        "seconds between looks at the certificates",
    ),
    ("indexer.edge.curve", "FILE_BYTES_MAX", "bytes of a file of CURVE keys"),
    (
        "select_service.edge.http.head_memory",
        "PEERS_MAX",
        "clients by certificate, remembered apart",
    ),
    (
        "select_service.edge.replication.pull",
        "CONNECT_TIMEOUT_S",
        "seconds to reach a replica's HTTP",
    ),
    (
        "select_service.edge.replication.pull",
        "READ_TIMEOUT_S",
        "seconds without a byte of a snapshot",
    ),
    ("select_service.edge.replication.pull", "PULLS_WAITING_MAX", "fetches that wait their turn"),
    (
        "select_service.edge.replication.pull",
        "ADDRESSES_REMEMBERED",
        "addresses left alone a while",
    ),
    ("indexer.core.dump_reader", "EVENT_BYTES_MAX", "bytes of one event in a peer's dump"),
    ("indexer.core.dump_reader", "SKELETON_BYTES_MAX", "bytes of a peer's dump without its events"),
    ("select_service.edge.discovery.kubernetes", "LINE_BYTES_MAX", "bytes of an event of a watch"),
    ("select_service.edge.discovery.source", "BACKOFF_MAX_S", "longest pause after a failed look"),
    (
        "select_service.kubernetes_api",
        "RETRY_AFTER_MAX_S",
        "seconds a source is left alone, however long it asks for",
    ),
    ("select_service.edge.discovery.kubernetes", "WATCH_S", "seconds a server keeps a watch open"),
    (
        "select_service.edge.discovery.kubernetes",
        "WATCH_LATE_S",
        "seconds later a watch counts as dead",
    ),
    ("select_service.edge.discovery.kubernetes", "PAGE_TIMEOUT_S", "seconds for a page of a list"),
    (
        "select_service.edge.discovery.kubernetes",
        "RESUMES_MAX",
        "broken watches in a row until everything is listed anew",
    ),
    (
        "select_service.edge.discovery.kubernetes",
        "REFUSAL_BYTES_MAX",
        "bytes of a refusal that are read for its message",
    ),
    ("select_service.core.diagnostics.fleet_checks", "NAMED_MAX", "pods named in one finding"),
    ("indexer.core.hashing", "NAMESPACES_REMEMBERED", "adapters and salts with a cached seed"),
    ("indexer.core.progress", "NAMES_REMEMBERED", "rank names remembered of a stream"),
    (
        "indexer.core.cursor",
        "UNCONFIRMED_MAX",
        "batches only replays have brought, of which a late copy is known for one",
    ),
    ("indexer.core.writer", "GROUPS_REMEMBERED", "KV-cache groups remembered of a stream"),
    ("indexer.core.plain_walk", "NESTING_MAX", "values within each other in a KV-event message"),
    ("indexer.core.dump_reader", "DEPTH_MAX", "arrays and objects within each other in a dump"),
    (
        "select_service.core.replication.dynamo_events",
        "TEXT_CHARS_MAX",
        "characters of an id or a name that a replica sends; beyond, its message is ignored",
    ),
    ("select_service.core.ledger.leases", "LISTED_MAX", "leases in one answer of GET /leases"),
    (
        "select_service.edge.decision_report",
        "LISTED_MAX",
        "decisions in one answer of GET /decisions",
    ),
    (
        "select_service.edge.http.handlers.inspection",
        "SHADOW_SCOPES_MAX",
        "scopes in one answer of GET /shadow",
    ),
    (
        "select_service.edge.http.handlers.workers",
        "CANDIDATES_MAX",
        "workers one GET /scale_down_candidates names",
    ),
    (
        "select_service.core.fleet.cheapest_set",
        "SETS_MAX",
        "partial sets that one GET /scale_down_candidates examines before it takes the cheapest "
        "workers one by one",
    ),
    (
        "select_service.core.decisions.decision_log",
        "EXPLAINED_MAX",
        "explained reservations, for repeated requests",
    ),
    ("select_service.core.decisions.decision_log", "EXPLAINED_BYTES_MAX", "bytes of them together"),
    ("select_service.core.admission.classes", "CLASSES_MAX", "classes of an admission policy"),
    ("select_service.core.admission.classes", "NAME_CHARS_MAX", "characters of their names"),
    ("select_service.core.admission.retry_after", "LINES_MAX", "pools and tenants with promises"),
    (
        "select_service.core.admission.retry_after",
        "SAME_MAX",
        "promises to clients that look alike",
    ),
    (
        "select_service.edge.security.tls",
        "FILE_BYTES_MAX",
        "bytes of a file of certificates, or of a key",
    ),
    (
        "select_service.token_file",
        "TOKEN_BYTES_MAX",
        "bytes of --peer-token-file and the planner's files of credentials",
    ),
    ("select_service.edge.logs", "TRACE_LINES_MAX", "lines of a traceback in the log"),
    (
        "select_service.edge.state.recording_file",
        "CLOSE_S",
        "seconds the end of the process waits for a recording's disk",
    ),
    ("select_service.core.recording.encoder", "TEXT_MAX", "characters of an id in a recording"),
    ("select_service.edge.discovery.kubernetes", "PAGE_BYTES_MAX", "bytes of a page of a list"),
    (
        "select_service.planner.edge.http_answers",
        "PAGE_BYTES_MAX",
        "bytes of an answer the planner reads",
    ),
    ("select_service.edge.doctor", "SLICE_S", "seconds of an examination between other requests"),
    ("select_service.edge.doctor", "FRESH_S", "seconds findings may be old until it looks again"),
    ("select_service.edge.doctor", "APART_S", "seconds between examinations that are asked for"),
    ("select_service.edge.doctor", "LOGGED_MAX", "findings logged one by one of an examination"),
    (
        "select_service.core.diagnostics.prompt_checks",
        "SEEN_MAX",
        "first blocks of prompts remembered",
    ),
    (
        "select_service.core.diagnostics.prompt_checks",
        "OWNERS_MAX",
        "scopes and ranks with prompts judged",
    ),
    (
        "select_service.core.diagnostics.prompt_checks",
        "VERDICTS_MAX",
        "prompts judged and kept, of each",
    ),
    ("select_service.doctor.query", "ANSWER_BYTES_MAX", "bytes of an answer the command reads"),
    ("select_service.doctor.probe", "ENDPOINTS_MAX", "ports the command tries with --probe"),
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
    yield "| flag | default | |"
    yield "|---|---|---|"
    for flag in (one for one in FLAGS if one.type.is_common):
        yield f"| `{flag.name}` | {flag.default_text} | {_cell(flag.help)} |"


def first_metrics() -> Iterable[str]:
    """The ten metrics that tell whether all is well."""
    rows = {name: (labels, text) for name, _, labels, text in _families()}
    yield f"| {PREFIX}… | labels | |"
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
    """Every flag; limits with the metric that tells how near they are, or how often reached."""
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
        heading = importlib.import_module(f"select_service.settings.table.{section}").__doc__
        words = section.replace("_", " ").capitalize().replace("Kv", "KV")
        yield from ("", f"## {words}", "", str(heading), "")
        yield "| flag | default | | watch |"
        yield "|---|---|---|---|"
        yield from map(_flag, flags_in_it)
    yield from ("", "## Environment", "")
    yield from ("An unreadable value keeps the default and is logged by name.", "")
    yield "| variable | |"
    yield "|---|---|"
    for variable in ENVIRONMENT:
        yield f"| `{variable.name}` | {_cell(variable.help)} |"


def _flag(flag: Flag) -> str:
    watch = f"`{flag.type.watch}`" if flag.type.watch else ""
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
        yield "| flag | default | |"
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

| limit | value | |
|---|---|---|
""")
    values = limit_values(Settings())
    for name, text in TURN_BUDGETS.items():
        yield f"| `{name}` | {values[name]:g} | {_cell(text)} |"
    yield from _lines("""

## Bounds of memory and waits

The source gives the reason beside each.

| constant | value | |
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

| {PREFIX}… | type | labels | |
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

| code | status | |
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

| code | | cause | remedy |
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
