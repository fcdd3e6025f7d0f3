"""How much gateways may hold at the endpoint picker."""

from msgspec import Struct


class PickerLimits(Struct, frozen=True, kw_only=True):
    """Bounds of `edge/epp`; the flags begin with `--epp-`."""

    streams_max: int = 8192  # as many as there may be connections over HTTP
    body_bytes_max: int = 8 << 20
    buffered_bytes_max: int = 256 << 20  # of all streams together
    tokenize_timeout_s: float = 0.25  # 0: no engine is asked
    tokenize_calls_max: int = 64
    tokenize_cache_bytes: int = 32 << 20
