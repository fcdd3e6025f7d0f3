"""One flag of the command line: its name, its parser, and the field of Settings it sets."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final

from msgspec import Struct

from select_service.settings.settings import Settings

_NO_LIMITS: Final = frozenset(
    {
        "port",
        "threads",
        "kv_transfer_cost_per_block",
        "overload_status_code",
        "global_cache_hit_threshold",
        "slo_target_ttft_s",
        "prefill_tokens_per_s",
        "shadow_sample",
        "trace_sample_ratio",
    }
)
_DEFAULTS: Final = Settings()


class Flag(Struct, frozen=True):
    """One command-line flag; its default is that of the field of Settings with its name."""

    name: str  # as typed, "--port"
    parse: Callable[[str], object] | None  # None: a switch
    metavar: str
    help: str
    watch: str = ""  # the metric that shows how near it is, or how often it was reached
    env: str = ""  # the variable that sets it if the flag does not
    reloads: bool = False  # whether it may change at run time: see `edge/config_reload.py`

    @property
    def is_limit(self) -> bool:
        """Whether it bounds something: a number, shown in /metrics as select_service_limit."""
        return self.field not in _NO_LIMITS and type(self.default) in {int, float}

    @property
    def field(self) -> str:
        """The field of Settings it sets."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def default(self) -> object:
        """The value without the flag."""
        return getattr(_DEFAULTS, self.field)

    @property
    def default_text(self) -> str:
        """The default as one would type it."""
        value = self.default
        if isinstance(value, Enum):
            return str(value.value)
        if value is None or value is False or value in ((), {}):
            return "off"
        if isinstance(value, tuple):
            return ",".join(value)
        return f"{value:g}" if isinstance(value, float) else str(value)
