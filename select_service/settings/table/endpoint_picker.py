"""Envoy's external processing: where gateways ask for an endpoint, and how much they may hold."""

from typing import Annotated, Final

from select_service.settings.row import HITS
from select_service.settings.table.listening import ListeningSettings
from select_service.settings.value_types import count, seconds, size, tcp_port, text
from select_service.types.router_config import PickerLimits

_PICKER: Final = PickerLimits()


class EndpointPickerSettings(ListeningSettings, frozen=True, kw_only=True):
    """Envoy's external processing: where gateways ask for an endpoint, and how much they hold."""

    epp_port: Annotated[
        int | None,
        tcp_port(0).watched("epp_streams", limit=False),
        "a gRPC port for Envoy's ext_proc, as the endpoint picker of an InferencePool; 0 picks a "
        "free one; needs the extra `epp`",
    ] = None
    epp_host: Annotated[str | None, text("ADDRESS"), "address of that; off: the one of --host"] = (
        None
    )
    epp_streams_max: Annotated[
        int,
        count().watched(HITS),
        "open streams, one for each HTTP request that a gateway has under way; 429 beyond",
    ] = _PICKER.streams_max
    epp_body_bytes_max: Annotated[
        int,
        size(1024).watched(HITS),
        "longest request body, 413 beyond",
    ] = _PICKER.body_bytes_max
    epp_buffered_bytes_max: Annotated[
        int,
        size(1024).watched(HITS),
        "bytes of request bodies that wait for their end or for a choice, 429 beyond",
    ] = _PICKER.buffered_bytes_max
    epp_tokenize_timeout_s: Annotated[
        float,
        seconds(zero=True).watched(HITS),
        "an engine has this long to tokenize a prompt, which is placed by load alone otherwise; "
        "0: no engine is asked",
    ] = _PICKER.tokenize_timeout_s
    epp_tokenize_calls_max: Annotated[
        int,
        count().watched(HITS),
        "prompts that engines tokenize at one time; beyond, they are placed by load alone",
    ] = _PICKER.tokenize_calls_max
    epp_tokenize_cache_bytes: Annotated[
        int,
        size(0).watched("epp_tokenize_cache_bytes"),
        "memory for the tokens of texts that were seen before; the oldest go",
    ] = _PICKER.tokenize_cache_bytes
