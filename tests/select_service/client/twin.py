"""The calls for threads out of those for asyncio: `python -m tests.select_service.client.twin`.

The two say the same with other words, so one is written and the other made (`make twin`);
`test_twin.py` fails when they differ.
"""

from __future__ import annotations

import re
from pathlib import Path

import select_service.client

COMMAND = "make twin"
ROOM = Path(select_service.client.__file__).parent
SOURCE, TWIN = ROOM / "asynchronous_calls.py", ROOM / "synchronous_calls.py"
HEAD = (
    '"""What can be asked of a `Client`: made out of `asynchronous_calls.py` by `make twin`.\n\n'
    "Change that one.\n"
    '"""'
)
WORDS = (
    (r"\basync def ", "def "),
    (r"\basync with ", "with "),
    (r"\bawait ", ""),
    (r"AsyncReserve\[(\w+)\]", r"\1"),
    (r"\bAsync(Calls|Client)\b", r"\1"),
    (r"^from select_service.client.reserve_context import AsyncReserve\n", ""),
    (r"^        Awaited instead.*\n", "        Without `with`, call `r.free()` yourself.\n"),
)


def made() -> str:
    """The text of the twin."""
    text = SOURCE.read_text("utf-8")
    _, _, text = text.split('"""', 2)
    for pattern, words in WORDS:
        text = re.sub(pattern, words, text, flags=re.MULTILINE)
    return HEAD + text


if __name__ == "__main__":
    TWIN.write_text(made(), "utf-8")
