"""Who may do what, and where the service itself may connect."""

from __future__ import annotations

from typing import Final

from select_service.settings.flags import values
from select_service.settings.flags.flag import Flag

SECURITY: Final = (
    Flag(
        "--token-file",
        values.path,
        "FILE",
        "ask every client for a token of this file; read again on SIGHUP",
        watch="auth_refused_total",
    ),
    Flag(
        "--token-file-bytes-max",
        values.whole(1, values.BYTES_MAX),
        "N",
        "longest file of tokens; a longer one is not taken over, and none to start with",
        watch='auth_reloads_total{outcome="refused"}',
    ),
    Flag(
        "--token-chars-max",
        values.whole(64, 16_384),
        "N",
        "longest token that is looked at, 401 beyond; it has to fit into --head-bytes-max, too",
        watch='auth_refused_total{reason="unknown"}',
    ),
    Flag(
        "--tls-cert",
        values.path,
        "FILE",
        "speak TLS on the TCP port: the certificate chain, PEM; read again when it changes",
        watch="tls_reloads_total",
    ),
    Flag("--tls-key", values.path, "FILE", "its private key, where that is not in the same file"),
    Flag(
        "--tls-client-ca",
        values.path,
        "FILE",
        "demand a certificate of every client, signed by one of these",
    ),
    Flag(
        "--peer-token-file",
        values.path,
        "FILE",
        "the token shown to --indexer-peers and to replicas whose snapshot is fetched",
    ),
    Flag(
        "--peer-ca",
        values.path,
        "FILE",
        "fetch from them over TLS, and believe certificates signed by one of these",
        watch="replica_pulls_total",
    ),
    Flag(
        "--curve-key",
        values.path,
        "FILE",
        "encrypt the replica plane with this key pair (`select-service keys new`), read again on"
        " SIGHUP",
        watch="curve_refused_total",
    ),
    Flag(
        "--curve-replica-keys",
        values.path,
        "FILE",
        "public keys of the replicas that may listen, a line each, with their endpoints if they"
        " differ; off: those with our own key",
    ),
    Flag(
        "--curve-worker-key",
        values.curve_key,
        "KEY",
        "public key of every worker's event and replay sockets; off: as each record says",
    ),
    Flag(
        "--connect-schemes",
        values.schemes,
        "tcp,ipc,inproc",
        "schemes of ZMQ endpoints that are connected to; ipc opens files of this machine",
        watch='connect_refused_total{reason="scheme"}',
    ),
    Flag(
        "--connect-allow",
        values.reach_list,
        "HOST|NETWORK,…",
        "connect to nothing else: networks, addresses, names, `*.suffix`; judged by the address a"
        " name leads to, at each connection",
        watch='connect_refused_total{reason="address"}',
    ),
    Flag(
        "--connect-deny",
        values.reach_list,
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
        values.seconds(zero=False),
        "S",
        "longest wait for the addresses of a name; registering waits for none",
        watch='connect_lookups_total{outcome="timeout"}',
    ),
    Flag(
        "--connect-lookup-cache-s",
        values.seconds(zero=True),
        "S",
        "how long the addresses of a name are remembered",
        watch="connect_lookups_total",
    ),
    Flag(
        "--connect-lookups-max",
        values.whole(1, values.COUNT_MAX),
        "N",
        "names looked up at one time, and remembered",
        watch='connect_lookups_total{outcome="left_out"}',
    ),
)
