"""The reference service as an opponent: how it is started, or why it cannot be.

It is only ever asked questions over HTTP. `bench/compare/peer.py` knows where it is installed;
`make test-full` installs it.
"""

from __future__ import annotations

from pathlib import Path

from bench.compare import peer


def why_missing(version: str = peer.CONTRACT_VERSION) -> str | None:
    """None if the reference can be started, else the reason."""
    try:
        found = peer.installed(version)
    except peer.PeerMissing as error:
        return str(error)
    return None if found else f"the reference service {version} is not installed here: make peer"


def command() -> tuple[str, ...]:
    """What starts it, before its flags; ask `why_missing` first."""
    return peer.command(Path(python()))


def python(version: str = peer.CONTRACT_VERSION) -> str:
    """The interpreter that has it; ask `why_missing` first."""
    found = peer.installed(version)
    assert found is not None
    return str(found)
