"""What the process will not do as it runs now."""

from __future__ import annotations

from select_service.errors.refusal import BoundReached, Crowded, ServiceError


class NeedsRestart(ServiceError):
    """A setting that PUT /config cannot change."""

    status = 409
    code = "needs_restart"

    def __init__(self, field: str) -> None:
        super().__init__(
            f"{field} cannot change while the process runs: restart it", field=f"settings.{field}"
        )


class DecisionNotFound(ServiceError):
    """No decision of that name is kept: there was none, or later ones replaced it."""

    status = 404
    code = "decision_not_found"

    def __init__(self, name: str, kept_max: int) -> None:
        super().__init__(
            f"decision {name} not found: at most the last {kept_max} are kept (--decision-ring)"
        )


class DecisionsOff(ServiceError):
    """The process runs with `--decision-ring 0`."""

    status = 404
    code = "decision_ring_off"

    def __init__(self) -> None:
        super().__init__("decisions are not kept: --decision-ring is 0")


class TooManyDumps(BoundReached):
    """As many dumps in progress as `--dumps-max` allows."""

    status = 503
    code = "too_many_dumps"

    def __init__(self, most: int, crowded: Crowded | None = None) -> None:
        none = f"{most} dumps are under way, no more may be: ask again"
        super().__init__(none if crowded is None else "no more dumps may be under way", crowded)


class TooManyConsoles(ServiceError):
    """As many pages of the console as `--console-clients-max` allows."""

    status = 503
    code = "too_many_console_clients"

    def __init__(self, clients_max: int) -> None:
        super().__init__(f"{clients_max} pages of the console are open, no more may be")


class StateUnwritable(ServiceError):
    """The state directory cannot be written: nothing is acknowledged that would not survive.

    Ask again when the journal tries again.
    """

    status = 503
    code = "state_unwritable"

    def __init__(self) -> None:
        super().__init__("the state cannot be written to disk, ask again")


class StateDiskFull(ServiceError):
    """The disk of the state directory is full: nothing is acknowledged that would not survive."""

    status = 503
    code = "state_disk_full"

    def __init__(self) -> None:
        super().__init__("the disk of the state directory is full, ask again when it has room")


class StateStalled(ServiceError):
    """The disk of the state directory stalls, or too many answers wait for it."""

    status = 503
    code = "state_stalled"

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}, ask again")


class ShuttingDown(ServiceError):
    """The process is leaving; waiting requests are sent to another replica."""

    status = 503
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the service is shutting down")


class SecurityFileUnusable(Exception):
    """A file of tokens, certificates or keys cannot be used; the text says where and why.

    It never shows what stands there.
    """


class TokenFileUnusable(SecurityFileUnusable):
    """`--token-file`."""


class CertificatesUnusable(SecurityFileUnusable):
    """`--tls-cert`, `--tls-key` or `--tls-client-ca`."""


class StateDirUnusable(Exception):
    """The service cannot start with this state directory; `str(error)` says why."""


class RecordingUnusable(Exception):
    """The service cannot start with this file to record to; `str(error)` says why."""
