"""Names of the series at Prometheus: Dynamo's, the selectors', or those of a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec
import yaml

from select_service.planner.errors import SettingsError

MATCH: Final = "$match"
"""Stands for the label matchers in a query."""


class Names(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names of the series; an empty name is not queried.

    The means are of histograms or summaries: `_sum` and `_count` are appended, and `_bucket` to
    that of prompt lengths, to read their mix if available. The two queries are whole ones, in which
    `$match` stands for the label matchers.
    """

    requests: str
    started: str = ""
    """A counter of the same requests as they arrive, where `requests` counts them as they end;
    frontends without it count by `requests`."""
    isl: str = ""
    osl: str = ""
    ttft: str = ""
    itl: str = ""
    request_duration: str = ""
    effective_isl: str = ""
    prefill_moments: str = ""
    """Counters by `moment` of what ranks were measured to take; as of the selectors."""
    itl_moments: str = ""
    rank_kv_tokens: str = ""
    """A gauge, of which the largest counts; so are the next."""
    prefill_worker_ranks: str = ""
    decode_worker_ranks: str = ""
    model_label: str = "model"
    tenant_label: str = ""
    """Empty: tenants are not distinguished."""
    matchers: dict[str, str] = {}
    """Further labels and their values, such as the namespace of a deployment."""
    backlog_query: str = ""
    concurrency_query: str = ""


DYNAMO: Final = Names(
    requests="dynamo_frontend_requests_total",
    started="dynamo_frontend_requests_started_total",
    isl="dynamo_frontend_input_sequence_tokens",
    osl="dynamo_frontend_output_sequence_tokens",
    ttft="dynamo_frontend_time_to_first_token_seconds",
    itl="dynamo_frontend_inter_token_latency_seconds",
    request_duration="dynamo_frontend_request_duration_seconds",
    concurrency_query="sum(dynamo_frontend_inflight_requests{$match})",
)
SELECTOR: Final = Names(
    requests="select_service_demand_requests_total",
    isl="select_service_demand_isl_tokens",
    osl="select_service_demand_output_tokens",
    ttft="select_service_demand_ttft_seconds",
    itl="select_service_demand_itl_seconds",
    request_duration="select_service_demand_request_seconds",
    effective_isl="select_service_demand_prefill_tokens",
    prefill_moments="select_service_measured_prefill_moments_total",
    itl_moments="select_service_measured_itl_moments_total",
    rank_kv_tokens="select_service_measured_rank_kv_tokens",
    prefill_worker_ranks="select_service_measured_prefill_worker_ranks",
    decode_worker_ranks="select_service_measured_decode_worker_ranks",
    model_label="model_name",
    tenant_label="tenant_id",
    # every selector knows the whole load, so take the fullest book, never the sum; requests waiting
    # for a rank are in no book
    backlog_query=(
        'max(sum by (instance) ({__name__=~"select_service_(rank_prefill|pending_isl)_tokens",'
        "$match}))"
    ),
    concurrency_query="max(sum by (instance) (select_service_reservations{$match}))",
)
_KNOWN: Final = {"dynamo": DYNAMO, "selector": SELECTOR}
_SERIES: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_QUERIES: Final = ("backlog_query", "concurrency_query")
_LABELS: Final = ("model_label", "tenant_label")
_NEEDED: Final = ("requests", "model_label")


def read_names(which: str) -> Names:
    """Return the names: `dynamo`, `selector`, or those of a YAML file.

    A file has fields of `Names`; the others are Dynamo's, or those of `like: selector`.

    Raises:
        SettingsError: it cannot be read, or a field is wrong; the field is named.
    """
    if which in _KNOWN:
        return _KNOWN[which]
    try:
        given = msgspec.convert(yaml.safe_load(Path(which).read_text("utf-8")), dict[str, object])
        like = given.pop("like", "dynamo")
        if like not in _KNOWN:
            raise SettingsError(f"{which}: like: want {' or '.join(_KNOWN)}")
        names = msgspec.convert(msgspec.structs.asdict(_KNOWN[str(like)]) | given, Names)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise SettingsError(f"{which}: {error}") from error
    for field, name in msgspec.structs.asdict(names).items():
        _check(which, field, name)
    return names


def _check(which: str, field: str, value: str | dict[str, str]) -> None:
    """Check one field: a wrong name would be a query that Prometheus refuses, every time.

    Raises:
        SettingsError: naming it.
    """
    if isinstance(value, dict):
        for label in value:
            if not _LABEL.fullmatch(label):
                raise SettingsError(f"{which}: {field}: {label!r} is no name of a label")
    elif not value:
        if field in _NEEDED:
            raise SettingsError(f"{which}: {field} is needed")
    elif field in _QUERIES:
        if MATCH not in value:
            raise SettingsError(f"{which}: {field} has no {MATCH}, which stands for the model")
    elif not (_LABEL if field in _LABELS else _SERIES).fullmatch(value):
        raise SettingsError(f"{which}: {field}: {value!r} is no name of a series or label")
