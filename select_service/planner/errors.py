"""Everything that can be wrong with what the planner is given; the text is for people."""

from __future__ import annotations


class PlannerError(Exception):
    """The root of the tree; a command ends with its text."""


class SettingsError(PlannerError):
    """Flags or a targets file contradict themselves."""


class InfeasiblePlan(SettingsError):
    """The minima alone cost more GPUs than there are."""


class MissingExtra(PlannerError):
    """Something optional is asked for and not installed."""

    def __init__(self, what: str, extra: str, requirement: str) -> None:
        """Name it, and what pip takes: extras are only to be had from where we came from."""
        super().__init__(f"{what} needs the extra {extra}: pip install '{requirement}'")


class ProfileError(PlannerError):
    """Profiling results that cannot be used."""


class TraceError(PlannerError):
    """A trace that cannot be read; the line is named."""


class SourceError(PlannerError):
    """Metrics that could not be read; the interval counts as missing, not as idle."""


class SelectorError(PlannerError):
    """A selector that could not be asked about a worker, or informed that it goes."""


class ConnectorError(PlannerError):
    """A replica count that could not be read or changed."""


class LeaseHeld(PlannerError):
    """Another planner has the lease."""
