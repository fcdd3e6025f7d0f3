"""Busy thresholds, and the book that keeps them per model and, optionally, tenant.

Changes are merged into an entry field by field: what a change leaves out stays. A scope gets its
tenant's entry, else its model's, else the process-wide one, field by field. `busy.py` turns
thresholds into limits; nothing here knows a load.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.types import U64_MASK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

UNKNOWN_BATCH_TOKENS: Final = 10_000_000
"""Assumed if max_num_batched_tokens is unknown."""


class Thresholds(NamedTuple):
    """The three checks; None is off. All are strict: a load equal to the limit is not busy."""

    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    active_prefill_tokens_threshold_frac: float | None = None

    @property
    def any(self) -> bool:
        """Whether any check is on."""
        return self != NOTHING

    def prefill_limit(self, max_num_batched_tokens: int | None) -> float:
        """Return the prefill tokens above which a rank is busy; infinity: never."""
        limit = math.inf
        if self.active_prefill_tokens_threshold is not None:
            limit = self.active_prefill_tokens_threshold  # an int: beyond 2^53 a float may be less
        frac = self.active_prefill_tokens_threshold_frac
        if frac is not None:
            batch = (
                UNKNOWN_BATCH_TOKENS if max_num_batched_tokens is None else max_num_batched_tokens
            )
            limit = min(limit, math.floor(min(frac * batch, 1e300)))
        return limit

    def decode_limit(self, kv_total_blocks: int | None) -> float:
        """Return the blocks above which a rank is busy; infinity: never, or total unknown."""
        if self.active_decode_blocks_threshold is None or not kv_total_blocks:
            return math.inf
        return self.active_decode_blocks_threshold * kv_total_blocks


NOTHING: Final = Thresholds()
FIELDS: Final = Thresholds._fields


def check_threshold(field: str, value: object) -> float | int | None:
    """Return a threshold in its normal form.

    Raises:
        ValueError: wrong type or out of range; the text names the range.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} must be a number")  # noqa: TRY004 - one kind of refusal
    if not abs(value) <= sys.float_info.max:  # JSON has whole numbers beyond any float
        raise ValueError(f"{field} must be finite")
    if field == "active_decode_blocks_threshold":
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{field} must be in 0..1, got {value:g}")
        return float(value)
    if value < 0:
        raise ValueError(f"{field} must be at least 0, got {value:g}")
    if field == "active_prefill_tokens_threshold":
        if value != int(value):
            raise ValueError(f"{field} must be a whole number")
        if value > U64_MASK:
            raise ValueError(f"{field} must be at most 2^64-1")
        return int(value)
    return float(value)


def read_thresholds(values: Mapping[str, object]) -> Thresholds:
    """Validate a mapping of the three fields; missing ones are None.

    Raises:
        ValueError: as `check_threshold`, and for an unknown field.
    """
    unknown = sorted(set(values) - set(FIELDS))
    if unknown:
        raise ValueError(f"unknown threshold {', '.join(unknown)}; known are {', '.join(FIELDS)}")
    return _of({field: check_threshold(field, value) for field, value in values.items()})


def _of(values: Mapping[str, float | int | None]) -> Thresholds:
    prefill = values.get(FIELDS[1])
    return Thresholds(
        values.get(FIELDS[0]), None if prefill is None else int(prefill), values.get(FIELDS[2])
    )


class ThresholdBook:
    """Thresholds by (model, tenant); tenant None is the whole model."""

    def __init__(self, defaults: Thresholds = NOTHING) -> None:
        self.defaults = defaults
        self._entries: dict[tuple[str, str | None], dict[str, float | int | None]] = {}

    def merge(
        self,
        model_name: str,
        tenant_id: str | None,
        given: Thresholds,
        clear: Iterable[str] = (),
        *,
        entries_max: int,
    ) -> Thresholds:
        """Set the given thresholds, switch off those to clear, keep the rest.

        Returns:
            What now applies to this model or tenant.

        Raises:
            ValueError: a name in `clear` that is no threshold, or one both set and cleared; the
                book is full.
        """
        key = (model_name, tenant_id)
        entry = dict(self._entries.get(key, {}))
        cleared = set(clear)
        if unknown := sorted(cleared - set(FIELDS)):
            raise ValueError(f"cannot clear {', '.join(unknown)}; known are {', '.join(FIELDS)}")
        for field, value in zip(FIELDS, given, strict=True):
            if value is not None and field in cleared:
                raise ValueError(f"{field} is both set and cleared")
            if value is not None or field in cleared:
                entry[field] = value
        if entry:
            if key not in self._entries and len(self._entries) >= entries_max:
                most = f"{entries_max}, as there may be scopes (--scopes-max)"
                raise ValueError(f"more models and tenants have thresholds than {most}")
            self._entries[key] = entry
        return self.of(model_name, tenant_id)

    def forget(self, model_name: str, tenant_id: str | None) -> bool:
        """Drop an entry, so that the more general one applies; False if there was none."""
        return self._entries.pop((model_name, tenant_id), None) is not None

    def of(self, model_name: str, tenant_id: str | None) -> Thresholds:
        """Return what applies: the tenant's value, else the model's, else the process-wide one."""
        values = dict(zip(FIELDS, self.defaults, strict=True))
        values |= self._entries.get((model_name, None), {})
        if tenant_id is not None:
            values |= self._entries.get((model_name, tenant_id), {})
        return _of(values)

    def entries(self) -> list[tuple[str, str | None, dict[str, float | int | None]]]:
        """Return every entry as set, in order of names; a None in an entry means switched off."""
        ordered = sorted(self._entries.items(), key=lambda item: (item[0][0], item[0][1] or ""))
        return [(model, tenant, dict(entry)) for (model, tenant), entry in ordered]

    def entry(self, model_name: str, tenant_id: str | None) -> dict[str, float | int | None] | None:
        """Return an entry as set, or None."""
        return self._entries.get((model_name, tenant_id))

    def restore(self, model_name: str, tenant_id: str | None, entry: Mapping[str, object]) -> None:
        """Restore an entry of `entries`.

        Raises:
            ValueError: it cannot be one.
        """
        read_thresholds(entry)
        self._entries[model_name, tenant_id] = {
            field: check_threshold(field, value) for field, value in entry.items()
        }
