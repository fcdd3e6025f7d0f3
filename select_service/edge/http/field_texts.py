"""What each field of a type means, out of its source: the text below it, as editors show it.

Such a text may end with an example in JSON: Seconds until it ends, e.g. `300.0`. Classes above a
type, and `types/common_fields.py`, have the texts that it leaves out.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from select_service.types.common_fields import COMMON_FIELDS

if TYPE_CHECKING:
    from types import ModuleType

_EXAMPLE: Final = re.compile(r"[,;:]? e\.g\. `(.*)`\.$")


class FieldText(NamedTuple):
    """A sentence, and an example where the text has one."""

    text: str
    examples: list[object]


def text_of(kind: type, field: str) -> FieldText | None:
    """Return what a field means; None: that is not said."""
    for one in kind.__mro__:
        module = inspect.getmodule(one)
        found = None if module is None else _texts(module).get((one.__name__, field))
        if found is not None:
            return _parted(found)
    common = COMMON_FIELDS.get(field)
    return None if common is None else _parted(common)


def _parted(text: str) -> FieldText:
    found = _EXAMPLE.search(text)
    if found is None:
        return FieldText(text, [])
    return FieldText(text[: found.start()] + ".", [msgspec.json.decode(found[1])])


@cache
def _texts(module: ModuleType) -> dict[tuple[str, str], str]:
    """Return the texts of a module by class and field; nothing where its source is not there."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return {}
    texts: dict[tuple[str, str], str] = {}
    for one in tree.body:
        if isinstance(one, ast.ClassDef):
            for node, below in zip(one.body, one.body[1:], strict=False):
                text = _literal(below)
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and text:
                    texts[one.name, node.target.id] = " ".join(text.split())
    return texts


def _literal(node: ast.stmt) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return str(node.value.value) if is_text else ""  # type: ignore[attr-defined]
