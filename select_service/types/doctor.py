"""What the doctor says of a fleet: findings, and the bounds of looking for them."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Severity = Literal["error", "warning", "info"]


class Subject(Struct, frozen=True, kw_only=True):
    """What a finding is about; fields that do not apply are absent."""

    model_name: str | UnsetType = UNSET
    tenant_id: str | UnsetType = UNSET
    worker_id: int | UnsetType = UNSET
    dp_rank: int | UnsetType = UNSET
    endpoint: str | UnsetType = UNSET  # of the worker's events or replays
    """Endpoint of the worker's KV events or replays, e.g. `"tcp://10.0.0.7:5557"`."""
    peer: str | UnsetType = UNSET  # endpoint of a replica
    source: str | UnsetType = UNSET
    """Source of discovery, e.g. `"kubernetes"`."""


class Finding(Struct, frozen=True):
    """Something is wired wrong: what is seen, what causes it, what to do."""

    code: str
    """Kind of finding, listed in deploy/reference/findings.md, e.g. `"worker-incomplete"`."""
    severity: Severity
    """How grave it is."""
    subject: Subject
    """What it is about."""
    what: str
    """What is seen, e.g. `"block_size must be greater than 0"`."""
    why: str
    """What causes it, e.g. `"The worker's record lacks something."`."""
    remedy: str
    """What to do about it, e.g. `"Register it again with what the reasons name."`."""
    since_s: float
    """For how many seconds it has looked like that, e.g. `20.0`."""
    finding_in_s: float | UnsetType = UNSET
    """Of what is suspected: seconds until it is a finding, if it lasts, e.g. `7.5`."""


class Report(Struct, frozen=True):
    """What one examination has found, the gravest first."""

    findings: list[Finding]
    left_out: int  # beyond `--doctor-findings-max`
    suspected: list[Finding] = []  # seen, but not for long enough to be findings


class PeerLink(Struct, frozen=True):
    """A replica that is listened to."""

    endpoint: str
    is_connected: bool
    quiet_s: float  # since its last message, or since it is listened to
    is_refused: bool = False  # a server is there, and hung up on our handshake


class SourceLink(Struct, frozen=True):
    """A source of discovery."""

    name: str
    age_s: float  # since it was last read, or said that nothing is new
    every_s: float  # how often it is read, if all is well
    trouble: str = ""  # why it could not be read
    shared: dict[int, list[str]] = {}  # worker ids that several pods claim; the first has it


class DoctorLimits(Struct, frozen=True, kw_only=True):
    """How often the doctor looks, and how closely."""

    interval_s: float = 10.0  # 0: only when asked
    samples_max: int = 64  # prompts looked at per examination; some 2 µs each
    findings_max: int = 200  # reported; the metric counts all
    probe_workers: bool = False  # send each new worker canary prompts
    discovery_stale_s: float = 120.0  # a source that could not be read for so long is a finding
