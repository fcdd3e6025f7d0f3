"""Families of series as Prometheus reads them, some lines at a time.

prometheus_client writes the same (`generate_latest`, which the tests hold this against), but all
of it in one go and at three times the price. Nothing of OpenMetrics is written here: no family of
ours, nor of the process and its garbage collector, has a timestamp, an exemplar or `_created`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

__all__ = ["LINES_PER_STEP", "text_of"]

LINES_PER_STEP: Final = 32
"""Some 3 µs each."""

_number: Callable[[float], str] = floatToGoString
_PAIRS_MAX: Final = 4096
"""Labels with their values that are remembered as they are written: those of 1,000 ranks."""

_ESCAPED: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPED: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})
_NAMED_OTHERWISE: Final = {"counter": "_total", "info": "_info"}
_SHOWN_AS: Final = {"info": "gauge", "unknown": "untyped"}


def text_of(family: Metric) -> Iterator[bytes]:
    """Yield the text of a family, so many lines at a time.

    Its samples must not change meanwhile.
    """
    name = family.name + _NAMED_OTHERWISE.get(family.type, "")
    kind = _SHOWN_AS.get(family.type, family.type)
    text = family.documentation.translate(_HELP_ESCAPED)
    head = f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
    samples = family.samples
    for start in range(0, max(1, len(samples)), LINES_PER_STEP):
        lines = [
            f"{one.name}{_labels(one.labels)} {_number(one.value)}\n"
            for one in samples[start : start + LINES_PER_STEP]
        ]
        yield (head + "".join(lines)).encode()
        head = ""


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join([_pair(*pair) for pair in sorted(labels.items())]) + "}"


@functools.lru_cache(maxsize=_PAIRS_MAX)
def _pair(name: str, value: str) -> str:
    return f'{name}="{value.translate(_ESCAPED)}"'
