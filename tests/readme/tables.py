"""The tables of README.md that the program knows better: settings and metrics.

`python -m tests.readme.tables` (or `make readme`) writes them between their markers;
`test_tables.py` fails when they differ.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable

from select_service.config import ENVIRONMENT, Settings
from select_service.config.flags import ROOMS
from select_service.core.doctor.causes import CAUSES, UNREACHABLE_FROM_HERE
from select_service.edge.app import create_driver
from select_service.edge.http.traffic import Traffic
from select_service.edge.metrics.exposition import Metrics
from select_service.edge.metrics.families import PREFIX
from select_service.edge.metrics.limits import TURN_BUDGETS, limit_values
from tests.readme.document import README, anchor, headings

COMMAND = "make readme"
CHAPTER = 2  # the level of its headings
FIXED = (
    ("select_service.edge.http.protocol", "LINGER_BYTES_MAX", "bytes read on after a refusal"),
    (
        "select_service.edge.http.protocol",
        "RESERVED_MAX",
        "connections for /config, /health, /metrics",
    ),
    ("select_service.edge.http.pieces", "LINES_PER_TURN", "lines of requests parsed in one turn"),
    ("select_service.edge.http.protocol", "PIPELINED_MAX", "requests read behind the one answered"),
    ("select_service.edge.waves", "ITEMS_MAX", "requests in one body of /select_batch"),
    ("select_service.edge.http.protocol", "LINGER_S", "seconds a refused client may go on sending"),
    ("select_service.edge.state.store", "LOG_BYTES", "bytes of the state's log, from the start"),
    ("select_service.edge.state.journal", "BATCH_ROWS_MAX", "rows in one commit"),
    ("select_service.core.books.bookings", "LONG_ID_CHARS", "longest freed id remembered in full"),
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
        "select_service.edge.tracing.trace_context",
        "STATE_BYTES_MAX",
        "bytes of a tracestate passed on",
    ),
    ("select_service.edge.app", "TRACED_SWITCH_S", "seconds the exporting thread keeps the loop"),
    ("select_service.edge.driving.housekeeping", "HOUSEKEEPING_S", "seconds an expiry may be late"),
    ("select_service.edge.garbage", "QUIET_FULL_S", "seconds between full garbage collections"),
    ("select_service.edge.garbage", "LOAD", "requests, after which it may be sooner"),
    ("select_service.edge.garbage", "LOAD_S", "seconds between them then"),
    ("select_service.edge.garbage", "FULL_S", "the same in a process that is never quiet"),
    ("select_service.edge.console.slices", "SLICE_S", "seconds of the console's look in a row"),
    ("select_service.edge.console.stream", "INTERVAL_S", "seconds between messages to its pages"),
    ("select_service.edge.console.stream", "BEHIND_MAX", "messages a page may leave unread"),
    ("select_service.edge.console.history", "HISTORY_POINTS", "points of the last minutes kept"),
    ("select_service.edge.console.history", "HISTORY_STEP_S", "seconds between two of them"),
    ("select_service.edge.console.console", "LISTED_MAX", "rows of a list of the console"),
    ("select_service.edge.console.prefix", "HOLDERS_MAX", "ranks the prefix browser shows"),
    ("select_service.edge.late", "PAUSE_S", "seconds before each module loaded after the start"),
    ("select_service.edge.dumping", "SLICE_S", "seconds of /dump between other requests"),
    ("select_service.core.books.bookings", "FREED_MEMORY_S", "seconds an ended id is remembered"),
    ("indexer.edge.sockets", "SOCKETS_MAX", "ZMQ sockets"),
    ("indexer.edge.sockets", "REPLAY_MESSAGES_MAX", "replies libzmq queues within one replay"),
    ("indexer.edge.sockets", "SUBSCRIPTION_BYTES_MAX", "bytes a replica may send our publisher"),
    ("indexer.edge.sockets", "RECONNECT_MAX_MS", "longest pause between attempts to connect, ms"),
    ("indexer.edge.sockets", "HEARTBEAT_TIMEOUT_MS", "silence after which an engine is gone, ms"),
    ("indexer.edge.feed", "RECONNECT_AFTER_MAX_S", "longest pause after libzmq gave up"),
    (
        "indexer.edge.guide",
        "ASK_AFTER_MAX_S",
        "longest pause before a lost name is asked for again",
    ),
    ("indexer.edge.addresses", "THREADS", "names looked up at one time"),
    ("indexer.core.budget", "TOLERATED", "of --index-bytes-max, before the largest is forgotten"),
    ("select_service.core.fleet.pins", "PINS_MAX", "scopes given up whose block size is pinned"),
    ("select_service.core.service", "SCOPES_EVERY_S", "seconds between looks for empty scopes"),
    ("select_service.config.layers", "FILE_BYTES_MAX", "bytes of the file of --config"),
    ("select_service.edge.load_topic", "APPLY_AFTER_S", "seconds workers' reports are gathered"),
    ("select_service.edge.load_topic", "RANKS_MAX", "ranks whose report is not taken in yet"),
    (
        "select_service.core.admission.gatekeeping",
        "SCANNED_MAX",
        "of who waits, looked at when load goes",
    ),
    (
        "select_service.core.admission.admitting",
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
    ("select_service.edge.replicas.sync", "TURN_S", "seconds for all replicas' messages together"),
    ("select_service.edge.replicas.sync", "MESSAGES_PER_TURN", "messages of one replica in a row"),
    (
        "select_service.edge.replicas.pull",
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
    ("select_service.edge.http.fast_lane", "PEERS_MAX", "clients by certificate, remembered apart"),
    ("select_service.edge.replicas.pull", "CONNECT_TIMEOUT_S", "seconds to reach a replica's HTTP"),
    ("select_service.edge.replicas.pull", "READ_TIMEOUT_S", "seconds without a byte of a snapshot"),
    ("select_service.edge.replicas.pull", "PULLS_WAITING_MAX", "fetches that wait their turn"),
    ("select_service.edge.replicas.pull", "ADDRESSES_REMEMBERED", "addresses left alone a while"),
    ("indexer.core.dump_reader", "EVENT_BYTES_MAX", "bytes of one event in a peer's dump"),
    ("indexer.core.dump_reader", "SKELETON_BYTES_MAX", "bytes of a peer's dump without its events"),
    ("select_service.edge.discovery.kubernetes", "LINE_BYTES_MAX", "bytes of an event of a watch"),
    ("select_service.edge.discovery.source", "BACKOFF_MAX_S", "longest pause after a failed look"),
    ("indexer.core.hashing", "NAMESPACES_REMEMBERED", "adapters and salts with a cached seed"),
    ("indexer.core.progress", "NAMES_REMEMBERED", "rank names remembered of a stream"),
    ("indexer.core.writer", "GROUPS_REMEMBERED", "KV-cache groups remembered of a stream"),
    ("indexer.core.plain_walk", "NESTING_MAX", "values within each other in a KV-event message"),
    ("indexer.core.dump_reader", "DEPTH_MAX", "arrays and objects within each other in a dump"),
    (
        "select_service.core.replicas.events",
        "TEXT_CHARS_MAX",
        "characters of an id or a name that a replica sends; beyond, its message says nothing",
    ),
    ("select_service.core.books.leases", "LISTED_MAX", "leases in one answer of GET /leases"),
    ("select_service.edge.telling", "LISTED_MAX", "decisions in one answer of GET /decisions"),
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
        "select_service.core.decisions.keeping",
        "EXPLAINED_MAX",
        "explained bookings, for who repeats one",
    ),
    ("select_service.core.decisions.keeping", "EXPLAINED_BYTES_MAX", "bytes of them together"),
    ("select_service.core.admission.classes", "CLASSES_MAX", "classes of an admission policy"),
    ("select_service.core.admission.classes", "NAME_CHARS_MAX", "characters of their names"),
    ("select_service.core.admission.returns", "LINES_MAX", "pools and tenants with promises"),
    ("select_service.core.admission.returns", "SAME_MAX", "promises to who cannot be told apart"),
    (
        "select_service.edge.security.tls",
        "FILE_BYTES_MAX",
        "bytes of a file of certificates, or of a key",
    ),
    ("select_service.edge.security.passport", "TOKEN_BYTES_MAX", "bytes of --peer-token-file"),
    ("select_service.edge.logs", "TRACE_LINES_MAX", "lines of a traceback in the log"),
    ("select_service.core.tape.packing", "TEXT_MAX", "characters of an id in a recording"),
    ("select_service.edge.discovery.kubernetes", "PAGE_BYTES_MAX", "bytes of a page of a list"),
    ("select_service.edge.doctor", "SLICE_S", "seconds of an examination between other requests"),
    ("select_service.edge.doctor", "FRESH_S", "seconds findings may be old until it looks again"),
    ("select_service.edge.doctor", "LOGGED_MAX", "findings logged one by one of an examination"),
    ("select_service.core.doctor.prompts", "SEEN_MAX", "first blocks of prompts remembered"),
    ("select_service.core.doctor.prompts", "OWNERS_MAX", "scopes and ranks with prompts judged"),
    ("select_service.core.doctor.prompts", "VERDICTS_MAX", "prompts judged and kept, of each"),
    ("select_service.doctor.asking", "ANSWER_BYTES_MAX", "bytes of an answer the command reads"),
    ("select_service.doctor.probing", "ENDPOINTS_MAX", "ports the command tries with --probe"),
)


def flags() -> Iterable[str]:
    """Every flag; limits with the metric that tells how near they are, or how often reached."""
    yield "| flag | default | | watch |"
    yield "|---|---|---|---|"
    for room, flags_in_it in ROOMS.items():
        heading = importlib.import_module(f"select_service.config.flags.{room}").__doc__
        yield f"| **{room}** | | **{heading}** | |"
        for flag in flags_in_it:
            watch = f"`{flag.watch}`" if flag.watch else ""
            text = f"{flag.help} (`{flag.env}`)" if flag.env else flag.help
            if flag.reloads:
                text += " ↻"
            yield f"| `{flag.name}` | {flag.default_text} | {_cell(text)} | {_cell(watch)} |"


def environment() -> Iterable[str]:
    """Every variable of the environment."""
    yield "| variable | |"
    yield "|---|---|"
    for variable in ENVIRONMENT:
        yield f"| `{variable.name}` | {_cell(variable.help)} |"


def turn_budgets() -> Iterable[str]:
    """What has no flag."""
    values = limit_values(Settings())
    yield "| limit | value | |"
    yield "|---|---|---|"
    for name, text in TURN_BUDGETS.items():
        yield f"| `{name}` | {values[name]:g} | {_cell(text)} |"


def fixed_bounds() -> Iterable[str]:
    """Bounds of memory and waits that nobody needed to move so far."""
    yield "| constant | value | |"
    yield "|---|---|---|"
    for room, name, text in FIXED:
        value = getattr(importlib.import_module(room), name)
        said = f"{value:g}" if isinstance(value, float) else str(value)
        yield f"| `{room}.{name}` | {said} | {_cell(text)} |"


def findings() -> Iterable[str]:
    """What the doctor can find, and what to do about it."""
    yield "| code | | cause | remedy |"
    yield "|---|---|---|---|"
    for cause in (*CAUSES, UNREACHABLE_FROM_HERE):
        why, remedy = _cell(cause.why), _cell(cause.remedy)
        yield f"| `{cause.code}` | {cause.severity} | {why} | {remedy} |"


def metrics() -> Iterable[str]:
    """Every family of series that a service exposes, those without series yet included."""
    service = create_driver(Settings())
    yield f"| {PREFIX}… | type | labels | |"
    yield "|---|---|---|---|"
    for family in Metrics(service, Traffic(), Settings()).families():
        if not family.name.startswith(PREFIX):
            continue  # the process and its garbage collector: prometheus-client's own
        name = family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
        labels = ", ".join(family._labelnames)  # type: ignore[attr-defined]
        yield f"| `{name}` | {family.type} | {labels} | {_cell(family.documentation)} |"


def contents() -> Iterable[str]:
    """The chapters, each with its parts."""
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


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "flags": flags,
    "environment": environment,
    "turn-budgets": turn_budgets,
    "fixed-bounds": fixed_bounds,
    "metrics": metrics,
    "findings": findings,
    "contents": contents,
}


def shown(name: str, document: str) -> str:
    """What stands between the markers of a table."""
    found = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", document, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"README.md has {len(found)} places for the table {name}")
    return str(found[0])


def written(name: str) -> str:
    """What should stand there."""
    return "".join(f"{line}\n" for line in TABLES[name]())


def main() -> None:
    """Write every table into README.md."""
    document = README.read_text("utf-8")
    for name in TABLES:
        pair = (f"<!-- {name} -->\n", f"<!-- /{name} -->")
        document = document.replace(shown(name, document).join(pair), written(name).join(pair))
    README.write_text(document, "utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
