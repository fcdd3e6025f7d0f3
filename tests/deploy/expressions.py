"""PromQL as far as it must be read to see which series an expression uses, and how."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

TOKEN = re.compile(
    r'(?P<text>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<name>[a-zA-Z_:$][\w:$]*)'
    r"|(?P<number>[\d.]+\w*)|(?P<mark>=~|!~|!=|==|>=|<=|[-+*/%^<>=(){},])|(?P<blank>\s+)"
)
GROUPING = frozenset(("by", "without", "on", "ignoring", "group_left", "group_right"))
WORDS = frozenset(("and", "or", "unless", "bool", "offset", *GROUPING))
FUNCTIONS = frozenset(
    (
        *(
            "sum",
            "max",
            "min",
            "avg",
            "count",
            "topk",
            "bottomk",
            "rate",
            "increase",
            "time",
            "vector",
            "scalar",
        ),
        *("histogram_quantile", "min_over_time", "max_over_time", "last_over_time", "absent"),
        "label_values",
    )
)
OF_COUNTERS = frozenset(("rate", "increase"))


@dataclass(frozen=True)
class Matcher:
    """`label op "value"`."""

    label: str
    operator: str
    value: str


@dataclass(frozen=True)
class Use:
    """One series selector, and the functions around it, innermost first."""

    metric: str
    matchers: tuple[Matcher, ...]
    has_range: bool
    inside: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """An expression's selectors, and every label it groups or matches by."""

    uses: tuple[Use, ...]
    grouped: frozenset[str]


def read(expression: str) -> Reading:
    """Read an expression.

    Raises:
        ValueError: it has something in it that this does not know.
    """
    tokens = list(_tokens(expression))
    uses: list[Use] = []
    grouped: set[str] = set()
    calls: list[str] = []
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        after = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if text in GROUPING:
            end = tokens.index(("mark", ")"), at)
            grouped |= {word for kind, word in tokens[at:end] if kind == "name" and word != text}
            at = end
        elif kind == "name" and text in FUNCTIONS:
            if after == "(":
                at += 1
            calls.append(text)  # one with `by` before its parenthesis opens it later
            if after != "(":
                _, at, named = _grouping(tokens, at + 1)
                grouped |= named
        elif text == "(":
            calls.append("")
        elif text == ")":
            calls.pop()
        elif kind == "name" and text not in WORDS:
            matchers, at = _matchers(tokens, at + 1)
            has_range = at + 1 < len(tokens) and tokens[at + 1][0] == "range"
            inside = tuple(call for call in reversed(calls) if call)
            uses.append(Use(text, matchers, has_range, inside))
        at += 1
    if calls:
        raise ValueError(f"unbalanced: {expression}")
    return Reading(tuple(uses), frozenset(grouped))


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(expression):
        found = TOKEN.match(expression, at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"cannot read {expression[at : at + 20]!r} in {expression}")
        at = found.end()
        if found.lastgroup != "blank":
            yield found.lastgroup, found[0]


def _grouping(tokens: list[tuple[str, str]], at: int) -> tuple[str, int, set[str]]:
    """`by (a, b) (`: the position of the last parenthesis, and the labels."""
    word = tokens[at][1]
    if word not in GROUPING:
        raise ValueError(f"not a grouping: {word}")
    end = tokens.index(("mark", ")"), at)
    if tokens[end + 1][1] != "(":
        raise ValueError("nothing is grouped")
    return word, end + 1, {text for kind, text in tokens[at + 1 : end] if kind == "name"}


def _matchers(tokens: list[tuple[str, str]], at: int) -> tuple[tuple[Matcher, ...], int]:
    """The matchers behind a metric's name, and the position of the last token read."""
    if at >= len(tokens) or tokens[at][1] != "{":
        return (), at - 1
    end = tokens.index(("mark", "}"), at)
    found = []
    inner = [token for token in tokens[at + 1 : end] if token[1] != ","]
    for label, operator, value in zip(inner[::3], inner[1::3], inner[2::3], strict=True):
        found.append(Matcher(label[1], operator[1], value[1][1:-1]))
    return tuple(found), end
