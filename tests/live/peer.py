"""The reference service as an opponent: how it is started, or why it cannot be.

It is only ever asked questions over HTTP. `bench/compare/peer.py` knows where it is installed;
`make test-full` installs it.
"""

from __future__ import annotations

from bench.compare import peer


def why_missing() -> str | None:
    """None if the reference can be started, else the reason."""
    try:
        found = peer.installed(peer.CONTRACT_VERSION)
    except peer.PeerMissing as error:
        return str(error)
    return None if found else "the reference service is not installed here: make peer"


def command() -> tuple[str, ...]:
    """What starts it, before its flags; ask `why_missing` first."""
    python = peer.installed(peer.CONTRACT_VERSION)
    assert python is not None
    return peer.command(python)
