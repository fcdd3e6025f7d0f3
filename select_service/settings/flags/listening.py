"""Where clients come in, and how much they may send, hold open and leave unfinished."""

from __future__ import annotations

from typing import Final

from select_service.settings.defaults import FieldValidation
from select_service.settings.flags import values
from select_service.settings.flags.flag import Flag

ENTRANCE: Final = (
    Flag("--host", str, "ADDRESS", "address to listen on"),
    Flag("--port", values.whole(0, values.PORT_MAX), "N", "port to listen on; 0 picks a free one"),
    Flag(
        "--uds",
        values.path,
        "PATH",
        "listen on a Unix domain socket at this path: besides TCP if --port is given, else alone",
        watch="http_connections",
        env="SELECT_SERVICE_UDS",
    ),
    Flag(
        "--uds-mode",
        values.file_mode,
        "OCTAL",
        "permissions of that file: who may write it may connect",
        env="SELECT_SERVICE_UDS_MODE",
    ),
    Flag(
        "--side-port",
        values.whole(0, values.PORT_MAX),
        "N",
        "a second TCP port, with GET /health, /ready, /metrics and /replica_sync/snapshot alone:"
        " for probes, Prometheus and replicas where the API is on loopback or a Unix socket",
        watch="http_connections",
    ),
    Flag(
        "--side-host",
        str,
        "ADDRESS",
        "address of that; off: the one of --host, or every address where that is loopback",
    ),
    Flag(
        "--threads",
        values.whole(0, values.COUNT_MAX),
        "N",
        "accepted for compatibility; no effect, one event loop serves everything",
    ),
    Flag(
        "--field-validation",
        values.member(FieldValidation),
        "strict|warn|ignore",
        "unknown top-level fields and query parameters: refuse (422), warn in a header, or ignore",
    ),
    Flag(
        "--max-body-bytes",
        values.whole(128, values.COUNT_MAX),  # of fewer, PUT /config could not be taken back
        "N",
        "longest request body, 413 beyond",
        watch='limit_hits_total{name="max_body_bytes"}',
        reloads=True,
    ),
    Flag(
        "--head-bytes-max",
        values.whole(1024, values.COUNT_MAX),  # a token has up to 512 by default
        "N",
        "longest request line with its headers, and longest line between chunks or behind them,"
        " 431 beyond",
        watch='http_connections_cut_total{reason="malformed"}',
        reloads=True,
    ),
    Flag(
        "--header-lines-max",
        values.whole(16, values.COUNT_MAX),
        "N",
        "header lines of a request, 431 beyond",
        watch='limit_hits_total{name="header_lines_max"}',
        reloads=True,
    ),
    Flag(
        "--header-timeout-s",
        values.seconds(zero=False),
        "S",
        "a connection that has not finished a request head by then is closed (408)",
        watch='http_connections_cut_total{reason="header_timeout"}',
        reloads=True,
    ),
    Flag(
        "--body-timeout-s",
        values.seconds(zero=False),
        "S",
        "the same for a request body, and for a client that does not read its answer",
        watch='http_connections_cut_total{reason=~"(body|write)_timeout"}',
        reloads=True,
    ),
    Flag(
        "--keep-alive-timeout-s",
        values.whole(1, values.COUNT_MAX),
        "S",
        "an idle connection is closed after this long",
        watch="http_connections",
    ),
    Flag(
        "--connections-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "open connections, 503 beyond, but for 16 that ask for /config, /health or /metrics once,"
        " or show the token of a tenant that has room",
        watch="http_connections",
        reloads=True,
    ),
    Flag(
        "--connections-per-address-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "of them, those from one address; 503 beyond",
        watch='limit_hits_total{name="connections_per_address_max"}',
        reloads=True,
    ),
    Flag(
        "--descriptors-kept",
        values.whole(0, values.COUNT_MAX),
        "N",
        "open files that connections leave to others, 503 beyond, but for the 16 of"
        " --connections-max; event sources of workers leave half of them",
        watch='limit_hits_total{name="descriptors_kept"}',
        reloads=True,
    ),
    Flag(
        "--unread-bytes-max",
        values.whole(1, values.BYTES_MAX),
        "N",
        "bytes of answers, of all connections together, that clients have yet to read; beyond,"
        " those that have read nothing for longest are cut off, of tenants beyond their part",
        watch="http_unread_bytes",
        reloads=True,
    ),
    Flag(
        "--tls-handshakes-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "TLS handshakes at one time, each no longer than --header-timeout-s; closed beyond",
        watch="tls_handshakes",
        reloads=True,
    ),
    Flag(
        "--json-depth-max",
        values.whole(8, 900),
        "N",
        "arrays and objects within each other in a body, 400 beyond",
        watch='limit_hits_total{name="json_depth_max"}',
        reloads=True,
    ),
    Flag(
        "--body-parts-max",
        values.whole(64, values.COUNT_MAX),  # of fewer, PUT /config could not be taken back
        "N",
        "strings, objects and arrays in a body, or in each request of a wave, 422 beyond: they are"
        " read in one go",
        watch='limit_hits_total{name="body_parts_max"}',
        reloads=True,
    ),
    Flag(
        "--body-numbers-max",
        values.whole(64, values.COUNT_MAX),
        "N",
        "numbers of a body that are not packed (in JSON: commas), 422 beyond",
        watch='limit_hits_total{name="body_numbers_max"}',
        reloads=True,
    ),
    Flag(
        "--body-short-bytes-max",
        values.whole(128, values.COUNT_MAX),
        "N",
        "longest body of a route that takes no prompt, 413 beyond",
        watch='limit_hits_total{name="body_short_bytes_max"}',
        reloads=True,
    ),
    Flag(
        "--body-unknown-bytes-max",
        values.whole(64, values.COUNT_MAX),
        "N",
        "bytes of an unknown member, in MessagePack, unless it is text or binary; 422 beyond",
        watch='limit_hits_total{name="body_unknown_bytes_max"}',
        reloads=True,
    ),
    Flag(
        "--body-media-bytes-max",
        values.whole(64, values.COUNT_MAX),
        "N",
        "bytes of an array of objects in MessagePack, as of media items; 422 beyond",
        watch='limit_hits_total{name="body_media_bytes_max"}',
        reloads=True,
    ),
    Flag(
        "--listen-backlog",
        values.whole(1, 65535),
        "N",
        "connections the system holds until they are accepted",
        watch="http_connections_accepted_total",
    ),
    Flag(
        "--leave-notice-s",
        values.seconds(zero=True),
        "S",
        "after SIGTERM /ready is 503, but all requests are served for at least this long, while "
        "the news spreads",
        watch='waiting_for{name="leaving"}',
    ),
    Flag(
        "--leave-grace-s",
        values.seconds(zero=True),
        "S",
        "and for at most this long, while reservations made here are in flight; no wait on SIGINT",
        watch='waiting_for{name="leaving"}',
    ),
    Flag(
        "--shutdown-timeout-s",
        values.whole(1, values.COUNT_MAX),
        "S",
        "how long answers under way may take after SIGTERM or SIGINT",
        watch="http_requests_in_flight",
    ),
    Flag(
        "--config",
        values.path,
        "FILE",
        "settings in YAML or TOML (.toml), named as the flags, which win; read again on SIGHUP",
        watch="config_reloads_total",
    ),
)
