"""The command line of the service as one table; `cli.py` builds its parser from it.

A flag sets the field of Settings with its name. The README's table is compared with this one.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from indexer.config import EventLossPolicy, ReachSettings
from indexer.core.curve_key import is_curve_key
from indexer.core.endpoint import SCHEMES
from indexer.core.reach import Reach
from indexer.edge.plain_file import open_plain
from select_service.config.environment import parse_float
from select_service.config.settings import SAMPLERS, Durability, FieldValidation, Settings
from select_service.shadow_types import Weight, read_shadow_weights

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FLAGS", "Flag"]

PORT_MAX: Final = 65535
"""Of TCP."""

_FILE_BYTES_MAX: Final = 4 << 20
_FILE_MODE: Final = re.compile("0?[0-7]{3}")
_NO_LIMITS: Final = frozenset(
    {
        "port",
        "threads",
        "kv_transfer_cost_per_block",
        "overload_status_code",
        "global_cache_hit_threshold",
        "slo_target_ttft_s",
        "prefill_tokens_per_s",
        "shadow_sample",
        "trace_sample_ratio",
    }
)
_DEFAULTS: Final = Settings()
_BODILESS: Final = frozenset({204, 205, 304})


class Flag(Struct, frozen=True):
    """One command-line flag; its default is that of the field of Settings with its name."""

    name: str  # as typed, "--port"
    parse: Callable[[str], object] | None  # None: a switch
    metavar: str
    help: str
    watch: str = ""  # the metric that tells how near it is, or how often it was reached
    env: str = ""  # the variable that sets it where the flag does not
    reloads: bool = False  # whether it may change while the process runs: see `edge/reloading.py`

    @property
    def is_limit(self) -> bool:
        """Whether it bounds something: a number, and /metrics shows it as select_service_limit."""
        return self.field not in _NO_LIMITS and type(self.default) in {int, float}

    @property
    def field(self) -> str:
        """The field of Settings it sets."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def default(self) -> object:
        """What holds without the flag."""
        return getattr(_DEFAULTS, self.field)

    @property
    def default_text(self) -> str:
        """The same as one would type it."""
        value = self.default
        if isinstance(value, Enum):
            return str(value.value)
        if value is None or value is False or value in ((), {}):
            return "off"
        if isinstance(value, tuple):
            return ",".join(value)
        return f"{value:g}" if isinstance(value, float) else str(value)


def _status(text: str) -> int:
    """Read a status that an answer with a body can have; HTTP clients expect none after some."""
    status = _whole(200, 999)(text)
    if status in _BODILESS:
        raise ValueError(f"{status} has no body")
    return status


def _whole(minimum: int, maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            raise ValueError(f"{value} is not in {minimum}..{maximum}")
        return value

    return parse


def _optional(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Read `None` as the field's tools do: off."""
    return lambda text: None if text == "None" else parse(text)


def _number(minimum: float, maximum: float | None = None) -> Callable[[str], float]:
    bounds = f"at least {minimum:g}" if maximum is None else f"in {minimum:g}..{maximum:g}"

    def parse(text: str) -> float:
        value = parse_float(text)
        if value is None or value < minimum or (maximum is not None and value > maximum):
            raise ValueError(f"{text!r} is not a number {bounds}")
        return value

    return parse


def _json_object(text: str) -> dict[str, Any]:
    """Read a JSON object, or `@FILE` with one in it."""
    try:
        source = _content(text[1:]) if text.startswith("@") else text.encode()
        return msgspec.json.decode(source, type=dict[str, Any])
    except OSError as error:
        raise ValueError(f"cannot read {text[1:]}: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a JSON object: {error}") from None


def _shadow_weights(text: str) -> dict[str, Weight]:
    """Read a JSON object, `@FILE` with one in it, or name=value,..."""
    if text.startswith(("@", "{")):
        return read_shadow_weights(_json_object(text))
    said: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        name, is_said, value = part.strip().partition("=")
        if not is_said:
            raise ValueError(f"{part[:64]!r} is not name=value")
        if name in said:
            raise ValueError(f"{name} comes twice")
        switch = {"true": True, "false": False}.get(value.lower())
        number = parse_float(value) if switch is None else switch
        said[name] = value if number is None else number
    return read_shadow_weights(said)


def _content(path: str) -> bytes:
    with open_plain(path) as file:
        text = file.read(_FILE_BYTES_MAX + 1)
    if len(text) > _FILE_BYTES_MAX:
        raise ValueError(f"{path} is longer than {_FILE_BYTES_MAX} bytes")
    return text


def _seconds(*, zero: bool) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = parse_float(text)
        if value is None or value < 0 or (value == 0 and not zero):
            raise ValueError(f"{text!r} is not a number of seconds{'' if zero else ' above 0'}")
        return value

    return parse


def _weight(text: str) -> float:
    value = parse_float(text)
    if value is None or value < 0:
        raise ValueError(f"{text!r} is not a number from 0")
    return value


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def _yes_or_no(text: str) -> bool:
    return _choice("yes", "no")(text) == "yes"


def _list(text: str) -> tuple[str, ...]:
    """Split at commas; nothing is trimmed, an empty list is none."""
    return tuple(text.split(",")) if text else ()


def _schemes(text: str) -> tuple[str, ...]:
    schemes = _list(text)
    for scheme in schemes:
        _choice(*sorted(SCHEMES))(scheme)
    if not schemes:
        raise ValueError("no scheme at all")
    return schemes


def _reach_list(text: str) -> tuple[str, ...]:
    entries = _list(text)
    Reach(ReachSettings(deny=entries))  # reads them
    return entries


def _path(text: str) -> str:
    if not text:
        raise ValueError("an empty path")
    return text


def _file_mode(text: str) -> str:
    if not _FILE_MODE.fullmatch(text):
        raise ValueError(f"{text!r} is not an octal file mode")
    return text


def _curve_key(text: str) -> str:
    if not is_curve_key(text):
        raise ValueError(f"{text[:8]!r}... is not a CURVE key: 40 characters of Z85")
    return text


def _http_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is not an http:// or https:// URL")
    return text.rstrip("/")


def _host_port(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) <= PORT_MAX):
        raise ValueError(f"{text!r} is not host:port")
    return text


def _member(kind: type[Enum]) -> Callable[[str], Enum]:
    choose = _choice(*(one.value for one in kind))
    return lambda text: kind(choose(text))


_COUNT: Final = (1 << 31) - 1
_BYTES: Final = (1 << 62) - 1
_LENGTH: Final = 4096  # of ids and names: replicas take no much longer ones from each other
FLAGS: Final = (
    Flag("--host", str, "ADDRESS", "address to listen on"),
    Flag("--port", _whole(0, PORT_MAX), "N", "port to listen on; 0 picks a free one"),
    Flag(
        "--uds",
        _path,
        "PATH",
        "listen on a Unix domain socket at this path: besides TCP if --port is given, else alone",
        watch="http_connections",
        env="SELECT_SERVICE_UDS",
    ),
    Flag(
        "--uds-mode",
        _file_mode,
        "OCTAL",
        "permissions of that file: who may write it may connect",
        env="SELECT_SERVICE_UDS_MODE",
    ),
    Flag(
        "--side-port",
        _whole(0, PORT_MAX),
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
        "--token-file",
        _path,
        "FILE",
        "ask every client for a token of this file; read again on SIGHUP",
        watch="auth_refused_total",
    ),
    Flag(
        "--token-file-bytes-max",
        _whole(1, _BYTES),
        "N",
        "longest file of tokens; a longer one is not taken over, and none to start with",
        watch='auth_reloads_total{outcome="refused"}',
    ),
    Flag(
        "--token-chars-max",
        _whole(64, 16_384),
        "N",
        "longest token that is looked at, 401 beyond; it has to fit into --head-bytes-max, too",
        watch='auth_refused_total{reason="unknown"}',
    ),
    Flag(
        "--tls-cert",
        _path,
        "FILE",
        "speak TLS on the TCP port: the certificate chain, PEM; read again when it changes",
        watch="tls_reloads_total",
    ),
    Flag("--tls-key", _path, "FILE", "its private key, where that is not in the same file"),
    Flag(
        "--tls-client-ca",
        _path,
        "FILE",
        "demand a certificate of every client, signed by one of these",
    ),
    Flag(
        "--peer-token-file",
        _path,
        "FILE",
        "the token shown to --indexer-peers and to replicas whose snapshot is fetched",
    ),
    Flag(
        "--peer-ca",
        _path,
        "FILE",
        "fetch from them over TLS, and believe certificates signed by one of these",
        watch="replica_pulls_total",
    ),
    Flag(
        "--curve-key",
        _path,
        "FILE",
        "encrypt the replica plane with this key pair (`select-service keys new`), read again on"
        " SIGHUP",
        watch="curve_refused_total",
    ),
    Flag(
        "--curve-replica-keys",
        _path,
        "FILE",
        "public keys of the replicas that may listen, a line each, with their endpoints if they"
        " differ; off: those with our own key",
    ),
    Flag(
        "--curve-worker-key",
        _curve_key,
        "KEY",
        "public key of every worker's event and replay sockets; off: as each record says",
    ),
    Flag(
        "--threads",
        _whole(0, _COUNT),
        "N",
        "accepted for compatibility; no effect, one event loop serves everything",
    ),
    Flag(
        "--field-validation",
        _member(FieldValidation),
        "strict|warn|ignore",
        "unknown top-level fields and query parameters: refuse (422), warn in a header, or ignore",
    ),
    Flag(
        "--on-event-loss",
        _member(EventLossPolicy),
        "keep|drop",
        "when lost KV events cannot be replayed: keep the rank's known blocks (and mark it"
        " uncertain), or drop them",
    ),
    Flag(
        "--replica-sync-port",
        _whole(1, PORT_MAX),
        "N",
        "publish bookings to replicas on this ZMQ port; without it replica sync is off",
    ),
    Flag(
        "--replica-sync-peers",
        _list,
        "ENDPOINT,…",
        "replicas to listen to from the start, as tcp://host:port of their --replica-sync-port",
        watch="replica_peers",
    ),
    Flag(
        "--advertise-url",
        _http_url,
        "URL",
        "where replicas fetch from us; without it that is --side-port, else --port, on the host"
        " they listen to",
    ),
    Flag(
        "--replica-heartbeat-s",
        _seconds(zero=False),
        "S",
        "replicas are told this often what is owned here; also how late a lost message is noticed",
        watch="replica_events_total",
    ),
    Flag(
        "--replica-output-interval-s",
        _seconds(zero=True),
        "S",
        "replicas are told of output blocks together, this often: a stream fills several a second",
        watch="replica_events_total",
        reloads=True,
    ),
    Flag(
        "--replica-timeout-s",
        _seconds(zero=False),
        "S",
        "a replica silent for so long is gone: its reservations age, or are adopted",
        watch="replica_heard_age_seconds",
        reloads=True,
    ),
    Flag(
        "--replica-orphan-ttl-s",
        _seconds(zero=False),
        "S",
        "of a replica that is gone, what has no lease or ttl_s ends so long after its last call",
        watch='replica_reservations_total{event="orphan_expired"}',
        reloads=True,
    ),
    Flag(
        "--replica-gap-grace-s",
        _seconds(zero=True),
        "S",
        "a lost message may be late by so much before the replica's snapshot is fetched",
        watch="replica_gaps_total",
        reloads=True,
    ),
    Flag(
        "--replica-pull-retry-s",
        _seconds(zero=False),
        "S",
        "shortest time between two fetches from one replica",
        watch="replica_pulls_total",
        reloads=True,
    ),
    Flag(
        "--replica-claims-max",
        _whole(1, _COUNT),
        "N",
        "reservations remembered of one replica",
        watch='replica_refused_total{reason="claims"}',
        reloads=True,
    ),
    Flag(
        "--replica-ended-max",
        _whole(1, _COUNT),
        "N",
        "ended reservations remembered, so that late news of them change nothing",
        watch="replica_ended",
    ),
    Flag(
        "--replica-ended-s",
        _seconds(zero=False),
        "S",
        "and for how long",
        watch="replica_ended",
        reloads=True,
    ),
    Flag(
        "--replica-missing-max",
        _whole(1, _COUNT),
        "N",
        "lost messages of a replica known one by one; beyond, everything is fetched",
        watch="replica_statements_missing",
        reloads=True,
    ),
    Flag(
        "--replica-publishers-max",
        _whole(1, _COUNT),
        "N",
        "replicas remembered, gone ones too; without state a restart makes another one",
        watch='replica_refused_total{reason="publishers"}',
        reloads=True,
    ),
    Flag(
        "--replica-peers-max",
        _whole(0, 16384),
        "N",
        "replicas listened to, 409 beyond",
        watch="replica_peers",
        reloads=True,
    ),
    Flag(
        "--replica-message-bytes-max",
        _whole(1, _COUNT),
        "N",
        "longest message of a replica; the connection that sends a longer one is dropped",
        watch='replica_peers{state="broken"}',
    ),
    Flag(
        "--replica-receive-messages-max",
        _whole(1, _COUNT),
        "N",
        "messages queued per replica before they are read; what is lost is pulled",
        watch="replica_statements_missing",
    ),
    Flag(
        "--replica-send-messages-max",
        _whole(1, _COUNT),
        "N",
        "messages queued for a slow replica; what it loses it pulls",
        watch="replica_snapshots_total",
    ),
    Flag(
        "--replica-pulls-max",
        _whole(1, _COUNT),
        "N",
        "snapshots fetched from replicas at one time",
        watch="replica_pulls_running",
    ),
    Flag(
        "--replica-pull-timeout-s",
        _seconds(zero=False),
        "S",
        "longest fetch of a replica's snapshot altogether",
        watch='replica_pulls_total{outcome="timeout"}',
        reloads=True,
    ),
    Flag(
        "--replica-pull-bytes-max",
        _whole(1, _BYTES),
        "N",
        "longest snapshot taken from a replica",
        watch='replica_pulls_total{outcome="too_large"}',
        reloads=True,
    ),
    Flag(
        "--replica-pull-backoff-s",
        _seconds(zero=False),
        "S",
        "a replica whose snapshot could not be had is left alone for so long, then twice as long",
        watch="replica_pulls_total",
        reloads=True,
    ),
    Flag(
        "--replica-pull-backoff-max-s",
        _seconds(zero=False),
        "S",
        "and no longer than this",
        watch="replica_pulls_total",
        reloads=True,
    ),
    Flag(
        "--replica-snapshots-max",
        _whole(1, _COUNT),
        "N",
        "snapshots given out at one time, 503 beyond",
        watch='replica_snapshots_total{outcome="refused"}',
        reloads=True,
    ),
    Flag(
        "--dumps-max",
        _whole(1, _COUNT),
        "N",
        "GET /dump at one time, 503 beyond",
        watch='dumps_total{outcome="refused"}',
        reloads=True,
    ),
    Flag(
        "--dump-timeout-s",
        _seconds(zero=False),
        "S",
        "longest GET /dump altogether; one that is read too slowly is cut off",
        watch='dumps_total{outcome="timeout"}',
        reloads=True,
    ),
    Flag(
        "--indexer-peers",
        _list,
        "URL,…",
        "services whose /dump fills the index at the start, the first that answers wins",
        watch="index_recovery_attempts_total",
    ),
    Flag(
        "--recovery-attempts-max",
        _whole(1, _COUNT),
        "N",
        "rounds over all --indexer-peers before the service starts with an empty index",
        watch="index_recovery_attempts_total",
    ),
    Flag(
        "--recovery-backoff-s",
        _seconds(zero=True),
        "S",
        "pause before the second round, twice as long before each further one",
        watch="index_recovery_attempts_total",
    ),
    Flag(
        "--recovery-silence-s",
        _seconds(zero=False),
        "S",
        "longest wait for a connection to a peer, and for the next piece of its dump",
        watch='index_recovery_attempts_total{outcome="timeout"}',
    ),
    Flag(
        "--recovery-timeout-s",
        _seconds(zero=False),
        "S",
        "longest fetch from one peer altogether",
        watch='index_recovery_attempts_total{outcome="timeout"}',
    ),
    Flag(
        "--recovery-bytes-max",
        _whole(1, _BYTES),
        "N",
        "longest dump taken from a peer, unpacked",
        watch="index_recovery_bytes_total",
    ),
    Flag(
        "--recovery-hold-s",
        _seconds(zero=True),
        "S",
        "the HTTP port opens when the index is recovered, or after this long",
        watch="waiting_for",
    ),
    Flag(
        "--recovery-unclaimed-s",
        _seconds(zero=False),
        "S",
        "recovered ranks that no worker is registered for leave the index after this long",
        watch="index_recovered_ranks_dropped_total",
    ),
    Flag(
        "--ready-timeout-s",
        _seconds(zero=True),
        "S",
        "/ready waits this long for what is being recovered, then no longer",
        watch="ready_given_up",
    ),
    Flag(
        "--workers-file",
        str,
        "PATH",
        "JSON list of workers (bodies of POST /workers) that is followed as it changes",
        watch="discovery_workers",
    ),
    Flag(
        "--workers-file-poll-s",
        _seconds(zero=False),
        "S",
        "how often it is looked at",
        watch="discovery_updates_total",
    ),
    Flag(
        "--workers-file-bytes-max",
        _whole(1, _BYTES),
        "N",
        "longest file of workers; of a longer one nothing is taken, what was known stays",
        watch='discovery_failures_total{kind="too_large"}',
    ),
    Flag(
        "--kubernetes-workers",
        str,
        "SELECTOR",
        "register Kubernetes pods with these labels as workers, by their annotations",
        watch="discovery_workers",
    ),
    Flag(
        "--kubernetes-workers-from",
        _choice("pods", "endpointslices"),
        "pods|endpointslices",
        "what the selector above selects",
    ),
    Flag(
        "--kubernetes-replicas",
        str,
        "SELECTOR",
        "listen to the replicas in EndpointSlices with these labels, on their port replica-sync",
        watch="replica_peers",
    ),
    Flag(
        "--kubernetes-namespace",
        str,
        "NAME",
        "where to look for both; without it the namespace of the service account",
    ),
    Flag(
        "--kubernetes-api",
        _http_url,
        "URL",
        "the API server; without it KUBERNETES_SERVICE_HOST and _PORT say where",
    ),
    Flag(
        "--kubernetes-credentials",
        str,
        "DIR",
        "where token, ca.crt and namespace of the service account are mounted",
    ),
    Flag(
        "--replica-sync-dns",
        _host_port,
        "HOST:PORT",
        "listen to a replica on each address of this name, a headless Service",
        watch="replica_peers",
    ),
    Flag(
        "--discovery-poll-s",
        _seconds(zero=False),
        "S",
        "how often that name is resolved",
        watch="discovery_updates_total",
    ),
    Flag(
        "--discovery-grace-s",
        _seconds(zero=True),
        "S",
        "workers and replicas that Kubernetes or DNS no longer names are kept this long",
        watch="discovery_missed",
    ),
    Flag(
        "--discovery-workers-max",
        _whole(1, _COUNT),
        "N",
        "workers taken from one source, the rest is left out",
        watch="discovery_rejected",
    ),
    Flag(
        "--discovery-objects-max",
        _whole(1, _COUNT),
        "N",
        "Kubernetes objects a selector may select; beyond, what was known stays",
        watch='discovery_failures_total{kind="too_large"}',
    ),
    Flag(
        "--state-dir",
        str,
        "DIR",
        "keep workers, reservations, leases and the index here and bring them back; one process"
        " per directory",
    ),
    Flag(
        "--durability",
        _member(Durability),
        "strict|relaxed",
        "with --state-dir: acknowledge a change once it is on disk, or at once",
    ),
    Flag(
        "--durability-window-s",
        _seconds(zero=False),
        "S",
        "with relaxed durability: the most a crash may take with it",
        watch="state_pending_rows",
    ),
    Flag(
        "--index-snapshot-interval-s",
        _seconds(zero=True),
        "S",
        "with --state-dir: write the index there this often and at the end; 0 = neither write nor"
        " read it",
        watch="index_snapshot_written_timestamp_seconds",
    ),
    Flag(
        "--index-snapshot-bytes-max",
        _whole(1, _BYTES),
        "N",
        "longest index snapshot; ranks beyond are left out",
        watch='index_snapshot_left_out{reason="no_room"}',
    ),
    Flag(
        "--index-snapshot-hold-s",
        _seconds(zero=False),
        "S",
        "longest time that a rank's events wait while it is noted down, or it is left out",
        watch='index_snapshot_left_out{reason="slow"}',
    ),
    Flag(
        "--index-snapshot-proof-s",
        _seconds(zero=False),
        "S",
        "a rank without a replay endpoint may stay silent so long after a restart, then what the"
        " snapshot had of it is dropped",
        watch='index_snapshot_recalled_ranks_total{outcome="unheard"}',
    ),
    Flag(
        "--index-snapshot-shutdown-s",
        _seconds(zero=False),
        "S",
        "longest wait for the last index snapshot at the end",
        watch="index_snapshot_written_timestamp_seconds",
    ),
    Flag(
        "--record",
        str,
        "FILE",
        "write requests (hashes only), KV events, lifecycle calls and decisions here, for"
        " `select-sim replay`",
        watch="recording_notes_total",
    ),
    Flag(
        "--record-bytes-max",
        _whole(1 << 16, _BYTES),
        "N",
        "with --record: compressed bytes of a file, then another one begins",
        watch="recording_files_total",
    ),
    Flag(
        "--record-files-max",
        _whole(1, 100_000),
        "N",
        "with --record: files kept, the oldest goes",
        watch="recording_files_total",
    ),
    Flag(
        "--record-queue-bytes-max",
        _whole(1 << 16, _BYTES),
        "N",
        "with --record: what waits for its writer, about; beyond, it is left out of the recording",
        watch='recording_notes_total{outcome="queue"}',
    ),
    Flag(
        "--record-flush-s",
        _seconds(zero=False),
        "S",
        "with --record: a crash takes no more than this with it",
        watch="recording_queue_bytes",
    ),
    Flag(
        "--reservation-ttl-s",
        _seconds(zero=True),
        "S",
        "a reservation without a lease ends this long after its last lifecycle call; 0 = never",
        watch='reservation_events_total{event="expired"}',
        reloads=True,
    ),
    Flag(
        "--reservation-ttl-max-s",
        _seconds(zero=False),
        "S",
        "longest ttl_s a booking may ask for instead, 422 beyond",
        watch='reservation_events_total{event="expired"}',
        reloads=True,
    ),
    Flag(
        "--freed-ids-max",
        _whole(0, _COUNT),
        "N",
        "ids of ended reservations remembered, for ten minutes; ending one again is no error",
        watch="freed_reservation_ids",
    ),
    Flag(
        "--leases-max",
        _whole(0, _COUNT),
        "N",
        "open leases, 503 beyond; a KiB each",
        watch="leases",
        reloads=True,
    ),
    Flag(
        "--lease-copies-max",
        _whole(0, _COUNT),
        "N",
        "leases known through replicas; beyond, no renewal for them is taken here",
        watch="lease_copies",
        reloads=True,
    ),
    Flag(
        "--ended-leases-max",
        _whole(0, _COUNT),
        "N",
        "ids of ended leases remembered, for ten minutes; a late renewal is told what happened",
        watch="ended_leases",
    ),
    Flag(
        "--lease-reopen-s",
        _seconds(zero=True),
        "S",
        "a lease closed so lately is not opened again, 409; 0 = at once, at most ten minutes",
        watch='lease_events_total{event="reopening"}',
        reloads=True,
    ),
    Flag(
        "--lease-ttl-min-s",
        _seconds(zero=False),
        "S",
        "shortest time to live of a lease, 422 below",
        watch='lease_events_total{event="expired"}',
        reloads=True,
    ),
    Flag(
        "--lease-ttl-max-s",
        _seconds(zero=False),
        "S",
        "longest, 422 beyond: how long the load of a client that died may stay",
        watch='lease_events_total{event="expired"}',
        reloads=True,
    ),
    Flag(
        "--lease-name-length-max",
        _whole(1, _LENGTH),
        "N",
        "characters of a lease_id and of an owner, 422 beyond",
        watch='limit_hits_total{name="lease_name_length_max"}',
        reloads=True,
    ),
    Flag(
        "--batch-operations-max",
        _whole(1, _COUNT),
        "N",
        "operations of one batch, 422 beyond",
        watch='limit_hits_total{name="batch_operations_max"}',
        reloads=True,
    ),
    Flag(
        "--wave-samples-max",
        _whole(1, 1 << 16),  # they are sorted in one go
        "N",
        "samples of one POST /select_batch, 422 beyond",
        watch='limit_hits_total{name="wave_samples_max"}',
        reloads=True,
    ),
    Flag(
        "--session-ttl-s",
        _seconds(zero=True),
        "S",
        "requests with a session_id follow its last one, until it was silent for so long; 0: never",
        watch="sessions",
    ),
    Flag(
        "--sessions-max",
        _whole(1, _COUNT),
        "N",
        "sessions remembered; the one that was silent for longest goes first",
        watch="sessions_evicted_total",
    ),
    Flag(
        "--data-parallel-size-max",
        _whole(1, 1 << 16),  # all of a worker's are seated in one turn of the loop
        "N",
        "most ranks a worker may have, 400 beyond",
        watch="ranks",
        reloads=True,
    ),
    Flag(
        "--workers-max",
        _whole(1, _COUNT),
        "N",
        "workers registered, 409 beyond",
        watch='limit_hits_total{name="workers_max"}',
        reloads=True,
    ),
    Flag(
        "--worker-bytes-max",
        _whole(1, _COUNT),
        "N",
        "longest record of a worker, in MessagePack; 422 beyond",
        watch='limit_hits_total{name="worker_bytes_max"}',
        reloads=True,
    ),
    Flag(
        "--scopes-max",
        _whole(1, _COUNT),
        "N",
        "scopes (model and tenant) open; a worker that would open one more is incomplete",
        watch='limit_hits_total{name="scopes_max"}',
        reloads=True,
    ),
    Flag(
        "--scope-linger-s",
        _seconds(zero=True),
        "S",
        "a scope without workers is given up after this long; its block size stays pinned",
        watch="scopes_closed_total",
        reloads=True,
    ),
    Flag(
        "--reservations-max",
        _whole(1, _COUNT),
        "N",
        "live reservations booked here, with those that wait; 503 beyond",
        watch='limit_hits_total{name="reservations_max"}',
        reloads=True,
    ),
    Flag(
        "--blocks-per-request-max",
        _whole(1, _COUNT),
        "N",
        "blocks of a prompt, 422 beyond",
        watch='selections_failed_total{code="too_many_blocks"}',
        reloads=True,
    ),
    Flag(
        "--id-length-max",
        _whole(1, _LENGTH),
        "N",
        "characters of a session_id, and of a reservation_id or selection_id that is booked, 422"
        " beyond",
        watch='limit_hits_total{name="id_length_max"}',
        reloads=True,
    ),
    Flag(
        "--name-length-max",
        _whole(1, _LENGTH),
        "N",
        "characters of a model, tenant, lora_name or fairness_id, 422 beyond",
        watch='limit_hits_total{name="name_length_max"}',
        reloads=True,
    ),
    Flag(
        "--queue-recheck-s",
        _seconds(zero=False),
        "S",
        "waiting requests are looked at again this often, whatever did not happen",
        watch="pending_requests",
        reloads=True,
    ),
    Flag(
        "--decision-ring",
        _whole(0, 8192),
        "N",
        "decisions kept for /decisions; 0 = none",
        watch="decision_records",
    ),
    Flag(
        "--decision-ring-bytes",
        _whole(0, _BYTES),
        "N",
        "memory they may take together; 0 = none are kept",
        watch="decision_bytes",
    ),
    Flag(
        "--kv-poll-interval-s",
        _seconds(zero=True),
        "S",
        "ask a silent worker's replay endpoint for missed KV events this often; 0 = never",
        watch="kv_replays_asked_total",
        reloads=True,
    ),
    Flag(
        "--kv-polls-max",
        _whole(1, _COUNT),
        "N",
        "replays at one time that only look for missed last events; each takes a socket",
        watch='kv_listeners{state="replaying"}',
        reloads=True,
    ),
    Flag(
        "--kv-orphan-blocks-max",
        _whole(0, _COUNT),
        "N",
        "blocks of a scope that wait for a parent nobody has announced; the oldest give way",
        watch="index_orphan_blocks",
        reloads=True,
    ),
    Flag(
        "--kv-source-blocks-max",
        _whole(1, _BYTES),
        "N",
        "blocks held of one rank; what it stores beyond is left out until it removes some",
        watch='kv_events_total{outcome="no_room"}',
        reloads=True,
    ),
    Flag(
        "--index-bytes-max",
        _whole(1, _BYTES),
        "N",
        "bytes of all indexes together, estimated; beyond, ranks with more than their share store"
        " no more, and if that does not help the largest is forgotten",
        watch="index_budget_bytes",
        reloads=True,
    ),
    Flag(
        "--kv-blocks-per-turn",
        _whole(1, 1 << 20),
        "N",
        "blocks of one rank's KV events applied before others get their turn",
        watch="kv_events_total",
    ),
    Flag(
        "--kv-messages-per-turn",
        _whole(1, 1 << 20),
        "N",
        "KV-event messages taken from one socket before the next socket's turn",
        watch="kv_events_total",
    ),
    Flag(
        "--replay-timeout-s",
        _seconds(zero=False),
        "S",
        "longest replay of KV events altogether",
        watch='kv_replays_total{outcome="deadline"}',
        reloads=True,
    ),
    Flag(
        "--replay-silence-s",
        _seconds(zero=False),
        "S",
        "longest wait for the next reply within a replay",
        watch='kv_replays_total{outcome="silent"}',
        reloads=True,
    ),
    Flag(
        "--replay-attempts-max",
        _whole(1, _COUNT),
        "N",
        "replays in a row that may bring nothing before the missing events count as lost",
        watch="kv_lost_batches_total",
        reloads=True,
    ),
    Flag(
        "--replay-backoff-s",
        _seconds(zero=False),
        "S",
        "a replay endpoint that failed is left alone for so long, twice as long each time",
        watch="kv_replays_asked_total",
        reloads=True,
    ),
    Flag(
        "--replay-backoff-max-s",
        _seconds(zero=False),
        "S",
        "and no longer than this",
        watch="kv_replays_asked_total",
        reloads=True,
    ),
    Flag(
        "--replay-replies-max",
        _whole(1, _COUNT),
        "N",
        "most replies taken from one replay",
        watch='kv_replays_total{outcome="budget"}',
        reloads=True,
    ),
    Flag(
        "--replay-bytes-max",
        _whole(1, _BYTES),
        "N",
        "most bytes taken from one replay",
        watch='kv_replays_total{outcome="budget"}',
        reloads=True,
    ),
    Flag(
        "--replay-useless-max",
        _whole(1, _COUNT),
        "N",
        "most replies of one replay that are garbled or out of place",
        watch='kv_replays_total{outcome="garbage"}',
        reloads=True,
    ),
    Flag(
        "--kv-backlog-batches-max",
        _whole(1, _COUNT),
        "N",
        "live batches of a rank held back while a replay runs; beyond, it is given up",
        watch='kv_replays_total{outcome="backlog_full"}',
    ),
    Flag(
        "--kv-backlog-bytes-max",
        _whole(1, _BYTES),
        "N",
        "bytes of live KV events of a rank held back while a replay runs; beyond, it is given up",
        watch='kv_replays_total{outcome="backlog_full"}',
    ),
    Flag(
        "--kv-message-bytes-max",
        _whole(1, _BYTES),
        "N",
        "longest KV-event message; the connection that sends a longer one is dropped",
        watch="kv_gaps_total",
    ),
    Flag(
        "--kv-receive-messages-max",
        _whole(1, _COUNT),
        "N",
        "KV-event messages queued per rank before they are read",
        watch="kv_gaps_total",
    ),
    Flag(
        "--admission-control",
        _choice("token-capacity", "none"),
        "token-capacity|none",
        "whether busy thresholds are in force",
        env="DYN_ADMISSION_CONTROL",
        reloads=True,
    ),
    Flag(
        "--active-decode-blocks-threshold",
        _optional(_number(0.0, 1.0)),
        "F",
        "a rank is busy above this share of its KV blocks",
        watch="admission_busy_ranks",
        env="DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
        reloads=True,
    ),
    Flag(
        "--active-prefill-tokens-threshold",
        _optional(_whole(0, _BYTES)),
        "N",
        "a rank is busy above so many active prefill tokens",
        watch="admission_busy_ranks",
        env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
        reloads=True,
    ),
    Flag(
        "--active-prefill-tokens-threshold-frac",
        _optional(_number(0.0)),
        "F",
        "a rank is busy above this multiple of its max_num_batched_tokens",
        watch="admission_busy_ranks",
        env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
        reloads=True,
    ),
    Flag(
        "--overload-status-code",
        _status,
        "N",
        "status of refusals for load",
        env="DYN_HTTP_OVERLOAD_STATUS_CODE",
    ),
    Flag(
        "--max-inflight-default",
        _optional(_whole(1, _COUNT)),
        "N",
        "requests given at a time to a worker that does not say (`max_inflight`)",
        watch="admission_full_ranks",
        env="DYN_ENGINE_REQUEST_LIMIT",
        reloads=True,
    ),
    Flag(
        "--max-queued-default",
        _whole(0, _COUNT),
        "N",
        "requests that may wait for such a worker (`max_queued`)",
        watch="admission_decisions_total",
        env="DYN_DYNAMO_REQUEST_QUEUE_LIMIT",
        reloads=True,
    ),
    Flag(
        "--queue-deadline-s",
        _optional(_seconds(zero=False)),
        "S",
        "how long a request may wait; off: 30 for a full worker, else for ever",
        watch="admission_wait_seconds",
        reloads=True,
    ),
    Flag(
        "--global-cache-hit-threshold",
        _number(0.0, 1.0),
        "F",
        "share of a prompt a worker must have cached, where the request does not say",
        reloads=True,
    ),
    Flag(
        "--cache-hit-scope",
        _choice("gpu", "cpu", "disk", "any"),
        "gpu|cpu|disk|any",
        "down to which tier cached tokens count for that",
        reloads=True,
    ),
    Flag(
        "--cache-hit-basis",
        _choice("prompt", "cacheable"),
        "prompt|cacheable",
        "share of the prompt, or of what an engine can have cached of it",
        reloads=True,
    ),
    Flag(
        "--cache-hit-attempts-max",
        _whole(0, _COUNT),
        "N",
        "a request with so many attempts behind it is held to no threshold",
        watch="cache_threshold_guarded_total",
        reloads=True,
    ),
    Flag(
        "--policy",
        _choice("kv-cost", "first-token"),
        "NAME",
        "how ranks are priced: kv-cost, the contract's formula, or first-token, by when the first "
        "token comes",
    ),
    Flag(
        "--decode-load-scale",
        _number(0.0, 1e6),
        "X",
        "what a block held while decoding costs, in blocks to compute; off: as --policy has it",
    ),
    Flag(
        "--delay-scale",
        _number(0.0, 1e6),
        "X",
        "what a prompt's own prefill costs each of those behind it; off: as --policy has it",
    ),
    Flag(
        "--eviction-scale",
        _number(0.0, 1e6),
        "X",
        "what is lost with each block that a prompt pushes out of an average cache; off: as "
        "--policy has it",
    ),
    Flag(
        "--expects-booked",
        _yes_or_no,
        "yes|no",
        "whether blocks that others are booked with count as cached; off: as --policy has it",
    ),
    Flag(
        "--context-load-scale",
        _number(0.0, 1e6),
        "X",
        "what a block that a request attends to costs, shared ones for each, in blocks to compute; "
        "off: as --policy has it",
    ),
    Flag(
        "--overtaking-s",
        _number(0.0, 1e6),
        "S",
        "who waits, where no policy file orders the queue, is overtaken by who comes up to so many "
        "seconds later for each 1,000 tokens less to compute; off: as --policy has it",
        watch="selections_queued_total",
    ),
    Flag(
        "--admission-policy",
        str,
        "NAME",
        "always-admit, token-bucket, reject-all, tier-shed, gaie-legacy or slo-shed",
    ),
    Flag(
        "--admission-config",
        _json_object,
        "JSON|@FILE",
        "configuration of the policy",
    ),
    Flag(
        "--slo-class-max",
        str,
        "NAME",
        "the most important class a request may claim; one above counts as this",
        watch="admission_clamped_total",
    ),
    Flag(
        "--slo-target-ttft-s",
        _number(0.001),
        "S",
        "a rank is saturated with the prefill tokens it computes in that time",
    ),
    Flag(
        "--prefill-tokens-per-s",
        _number(1.0),
        "N",
        "what one rank computes, until it was measured",
    ),
    Flag(
        "--return-horizon-s",
        _seconds(zero=False),
        "S",
        "how far ahead a refused request is promised a place",
        watch="admission_promises",
    ),
    Flag(
        "--return-slots-max",
        _whole(0, _COUNT),
        "N",
        "promises held at once, 200 bytes each",
        watch="admission_promises",
    ),
    Flag(
        "--tenant-labels-max",
        _whole(2, 10_000),
        "N",
        "tenants with admission series of their own; the rest is summed up under `other`",
        watch='admission_tenant_requests_total{fairness_id="other"}',
    ),
    Flag(
        "--load-report-stale-s",
        _seconds(zero=False),
        "S",
        "age at which what a worker told of its load is believed no longer",
        watch="worker_reports_heard_total",
        reloads=True,
    ),
    Flag(
        "--load-report-bytes-max",
        _whole(1, _BYTES),
        "N",
        "longest message with which a worker tells its load beside its KV events; longer is bad",
        watch="worker_reports_bad_total",
    ),
    Flag(
        "--doctor-interval-s",
        _seconds(zero=True),
        "S",
        "it is looked this often whether something is wired wrong; 0: only when asked",
        watch="doctor_examinations_total",
    ),
    Flag(
        "--doctor-samples-max",
        _whole(0, _COUNT),
        "N",
        "prompts looked at between two examinations, the first ones; 0: none",
        watch="doctor_examinations_total",
    ),
    Flag(
        "--doctor-findings-max",
        _whole(1, _COUNT),
        "N",
        "findings told by /ready?verbose=true, the gravest; the metric counts all",
        watch='limit_hits_total{name="doctor_findings_max"}',
    ),
    Flag(
        "--max-body-bytes",
        _whole(128, _COUNT),  # of fewer, PUT /config could not be taken back
        "N",
        "longest request body, 413 beyond",
        watch='limit_hits_total{name="max_body_bytes"}',
        reloads=True,
    ),
    Flag(
        "--head-bytes-max",
        _whole(1024, _COUNT),  # a token has up to 512 by default
        "N",
        "longest request line with its headers, 431 beyond",
        watch='http_connections_cut_total{reason="malformed"}',
        reloads=True,
    ),
    Flag(
        "--header-lines-max",
        _whole(16, _COUNT),
        "N",
        "header lines of a request, 431 beyond",
        watch='limit_hits_total{name="header_lines_max"}',
        reloads=True,
    ),
    Flag(
        "--header-timeout-s",
        _seconds(zero=False),
        "S",
        "a connection that has not finished a request head by then is closed (408)",
        watch='http_connections_cut_total{reason="header_timeout"}',
        reloads=True,
    ),
    Flag(
        "--body-timeout-s",
        _seconds(zero=False),
        "S",
        "the same for a request body, and for a client that does not read its answer",
        watch='http_connections_cut_total{reason=~"(body|write)_timeout"}',
        reloads=True,
    ),
    Flag(
        "--keep-alive-timeout-s",
        _whole(1, _COUNT),
        "S",
        "an idle connection is closed after this long",
        watch="http_connections",
    ),
    Flag(
        "--connections-max",
        _whole(1, _COUNT),
        "N",
        "open connections, 503 beyond, but for 16 that ask for /config, /health or /metrics once",
        watch="http_connections",
        reloads=True,
    ),
    Flag(
        "--connections-per-address-max",
        _whole(1, _COUNT),
        "N",
        "of them, those from one address; 503 beyond",
        watch='limit_hits_total{name="connections_per_address_max"}',
        reloads=True,
    ),
    Flag(
        "--unread-bytes-max",
        _whole(1, _BYTES),
        "N",
        "bytes of answers, of all connections together, that clients have yet to read; beyond,"
        " those that have read nothing for longest are cut off",
        watch="http_unread_bytes",
        reloads=True,
    ),
    Flag(
        "--tls-handshakes-max",
        _whole(1, _COUNT),
        "N",
        "TLS handshakes at one time, each no longer than --header-timeout-s; closed beyond",
        watch="tls_handshakes",
        reloads=True,
    ),
    Flag(
        "--json-depth-max",
        _whole(8, 900),
        "N",
        "arrays and objects within each other in a body, 400 beyond",
        watch='limit_hits_total{name="json_depth_max"}',
        reloads=True,
    ),
    Flag(
        "--body-parts-max",
        _whole(64, _COUNT),  # of fewer, PUT /config could not be taken back
        "N",
        "strings, objects and arrays in a body, or in each request of a wave, 422 beyond: they are"
        " read in one go",
        watch='limit_hits_total{name="body_parts_max"}',
        reloads=True,
    ),
    Flag(
        "--body-numbers-max",
        _whole(64, _COUNT),
        "N",
        "numbers of a body that are not packed (in JSON: commas), 422 beyond",
        watch='limit_hits_total{name="body_numbers_max"}',
        reloads=True,
    ),
    Flag(
        "--body-short-bytes-max",
        _whole(128, _COUNT),
        "N",
        "longest body of a route that takes no prompt, 413 beyond",
        watch='limit_hits_total{name="body_short_bytes_max"}',
        reloads=True,
    ),
    Flag(
        "--body-unknown-bytes-max",
        _whole(64, _COUNT),
        "N",
        "bytes of a member nobody knows, in MessagePack, if it is no text or binary; 422 beyond",
        watch='limit_hits_total{name="body_unknown_bytes_max"}',
        reloads=True,
    ),
    Flag(
        "--body-media-bytes-max",
        _whole(64, _COUNT),
        "N",
        "bytes of an array of objects in MessagePack, as of media items; 422 beyond",
        watch='limit_hits_total{name="body_media_bytes_max"}',
        reloads=True,
    ),
    Flag(
        "--listen-backlog",
        _whole(1, 65535),
        "N",
        "connections the system holds until they are accepted",
        watch="http_connections_accepted_total",
    ),
    Flag(
        "--leave-notice-s",
        _seconds(zero=True),
        "S",
        "after SIGTERM /ready is 503, but for so long all is served: news of that must travel",
        watch='waiting_for{name="leaving"}',
    ),
    Flag(
        "--leave-grace-s",
        _seconds(zero=True),
        "S",
        "and for so long at most, while what was booked here is in flight; SIGINT waits for nobody",
        watch='waiting_for{name="leaving"}',
    ),
    Flag(
        "--shutdown-timeout-s",
        _whole(1, _COUNT),
        "S",
        "how long answers under way may take after SIGTERM or SIGINT",
        watch="http_requests_in_flight",
    ),
    Flag(
        "--metrics-rank-series-max",
        _whole(0, _COUNT),
        "N",
        "ranks with series of their own in /metrics; the rest is only counted",
        watch="ranks_unlisted",
    ),
    Flag(
        "--metrics-scope-series-max",
        _whole(0, _COUNT),
        "N",
        "scopes with series of their own in /metrics; the rest is summed up under `other`",
        watch="scopes_unlisted",
    ),
    Flag(
        "--kv-transfer-cost-per-block",
        _weight,
        "BLOCKS",
        "what moving one KV block from a prefill to a decode worker costs, in blocks of prefill",
    ),
    Flag(
        "--connect-schemes",
        _schemes,
        "tcp,ipc,inproc",
        "schemes of ZMQ endpoints that are connected to; ipc opens files of this machine",
        watch='connect_refused_total{reason="scheme"}',
    ),
    Flag(
        "--connect-allow",
        _reach_list,
        "HOST|NETWORK,…",
        "connect to nothing else: networks, addresses, names, `*.suffix`; judged by the address a"
        " name leads to, at each connection",
        watch='connect_refused_total{reason="address"}',
    ),
    Flag(
        "--connect-deny",
        _reach_list,
        "HOST|NETWORK,…",
        "nor to these, allowed or not; as given it replaces the default: link-local, metadata,"
        " multicast, nobody",
        watch='connect_refused_total{reason="resolved"}',
    ),
    Flag(
        "--connect-no-loopback",
        None,
        "",
        "nor to this machine itself",
        watch='connect_refused_total{reason="address"}',
    ),
    Flag(
        "--connect-lookup-timeout-s",
        _seconds(zero=False),
        "S",
        "longest wait for the addresses of a name; registering waits for none",
        watch='connect_lookups_total{outcome="timeout"}',
    ),
    Flag(
        "--connect-lookup-cache-s",
        _seconds(zero=True),
        "S",
        "so long what a name leads to is remembered",
        watch="connect_lookups_total",
    ),
    Flag(
        "--connect-lookups-max",
        _whole(1, _COUNT),
        "N",
        "names looked up at one time, and remembered",
        watch='connect_lookups_total{outcome="left_out"}',
    ),
    Flag(
        "--config",
        _path,
        "FILE",
        "settings in YAML or TOML (.toml), named as the flags, which win; read again on SIGHUP",
        watch="config_reloads_total",
    ),
    Flag("--no-console", None, "", "serve no console at /console"),
    Flag(
        "--console-clients-max",
        _whole(1, _COUNT),
        "N",
        "pages of the console that are kept up to date at a time",
        watch="console_clients",
    ),
    Flag("--log-format", _choice("json", "text"), "json|text", "form of the log on stderr"),
    Flag(
        "--log-level",
        _choice("debug", "info", "warning", "error"),
        "debug|info|warning|error",
        "least important record to log",
    ),
    Flag(
        "--trust-samples",
        _whole(2, 65536),
        "N",
        "prompts of a rank over which is kept what its engine found of what was predicted"
        " (cached_tokens of prefill_complete); half of them before anything follows",
        watch='cached_tokens_told_total{outcome="compared"}',
    ),
    Flag(
        "--trust-error-max",
        _number(0.01, 1.0),
        "SHARE",
        "share of the predicted cached tokens that an engine may not find before its rank's overlap"
        " credit shrinks by the share; 1 = never",
        watch="trust_missing_share",
    ),
    Flag(
        "--trust-error-clear",
        _number(0.01, 1.0),
        "SHARE",
        "below this share it counts in full again",
        watch="trust_missing_share",
    ),
    Flag(
        "--trust-reread-s",
        _seconds(zero=False),
        "S",
        "a doubtful index is read again from the replay endpoint, and after so long once more if it"
        " is doubtful still, twice as long each time",
        watch="index_rereads_total",
    ),
    Flag(
        "--trust-reread-max-s",
        _seconds(zero=False),
        "S",
        "and no longer than this",
        watch="index_rereads_total",
    ),
    Flag(
        "--trust-rereads-max",
        _whole(0, _COUNT),
        "N",
        "indexes read again at one time; 0 = never",
        watch='kv_listeners{state="replaying"}',
    ),
    Flag(
        "--no-freshness-weighting",
        None,
        "",
        "late events, open gaps and lost batches of a rank do not shrink its overlap credit",
    ),
    Flag(
        "--freshness-grace-s",
        _seconds(zero=False),
        "S",
        "a rank's events may be late by so much, or a gap open for so long, before they do",
        watch="trust_event_lag_seconds",
    ),
    Flag(
        "--freshness-half-s",
        _seconds(zero=False),
        "S",
        "beyond that, half of the credit goes in so many seconds",
        watch="trust_factor",
    ),
    Flag(
        "--shadow-weights",
        _shadow_weights,
        "NAME=VALUE,...|JSON|@FILE",
        "weights that score live traffic and act on nothing, where they differ from those in force;"
        " {} = none",
        watch="shadow_decisions_total",
        reloads=True,
    ),
    Flag(
        "--shadow-sample",
        _number(0.0001, 1.0),
        "SHARE",
        "of the decisions they score",
        watch='shadow_skipped_total{reason="sample"}',
        reloads=True,
    ),
    Flag(
        "--shadow-cost-max",
        _number(0.0001, 1.0),
        "SHARE",
        "of the time that may go into it; once it is spent, decisions are skipped",
        watch='shadow_skipped_total{reason="budget"}',
        reloads=True,
    ),
    Flag("--access-log", None, "", "log every request"),
    Flag(
        "--tracing",
        _choice("none", "otlp"),
        "none|otlp",
        "trace requests and export them by OTLP over HTTP; takes select-service[otel]",
        env="OTEL_TRACES_EXPORTER",
    ),
    Flag(
        "--trace-sampler",
        _choice(*SAMPLERS),
        "NAME",
        "who is traced, by OpenTelemetry's names",
        watch="traced_requests_total",
        env="OTEL_TRACES_SAMPLER",
    ),
    Flag(
        "--trace-sample-ratio",
        _number(0.0, 1.0),
        "SHARE",
        "of requests that are nobody's child, where the sampler goes by a ratio",
        watch="traced_requests_total",
        env="OTEL_TRACES_SAMPLER_ARG",
    ),
    Flag(
        "--trace-queue-spans-max",
        _whole(1, _COUNT),
        "N",
        "spans that wait to be exported; more are dropped",
        watch='trace_spans_total{outcome="dropped"}',
        env="OTEL_BSP_MAX_QUEUE_SIZE",
    ),
    Flag(
        "--trace-batch-spans-max",
        _whole(1, _COUNT),
        "N",
        "spans exported at once",
        watch="trace_queue_spans",
        env="OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    ),
    Flag(
        "--trace-interval-ms",
        _whole(1, _COUNT),
        "MS",
        "how long spans wait for company",
        watch="trace_queue_spans",
        env="OTEL_BSP_SCHEDULE_DELAY",
    ),
    Flag(
        "--trace-shutdown-s",
        _seconds(zero=True),
        "S",
        "how long the last spans may take at the end",
        watch='trace_spans_total{outcome="dropped"}',
    ),
)
