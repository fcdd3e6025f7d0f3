"""Collects the answers to everything one turn of the loop has read, and sends them together.

Complete answers only: `connection.py` puts them in, and streams are sent by `exchange.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import asyncio

    from select_service.edge.codec.responses import Response

__all__ = ["ANSWERS_MAX", "Outbox"]

ANSWERS_MAX: Final = 16
"""Send at the latest after this many, so that the first does not wait long: 16 take half a
millisecond to make."""


class Recipient(Protocol):
    """What the outbox uses of a connection."""

    transport: asyncio.Transport

    def until_sent(self, answer: Response) -> None:
        """Watch over a written answer until the kernel has all of it."""


class Outbox:
    """Answers of one turn of the loop, across all connections; sent once all are made.

    A client woken by the first answer would compete for the processor while the others are made:
    this saves a tenth of a lifecycle compared with sending each at once.
    """

    __slots__ = ("answers",)

    def __init__(self) -> None:
        self.answers: list[tuple[Recipient, bytes, Response]] = []
        """Put in by `HttpConnection.write_answer`; `flush` before writing anything else to one of
        these connections."""

    def flush(self) -> None:
        """Send everything; what cannot be written is lost."""
        answers, self.answers = self.answers, []
        for recipient, data, answer in answers:
            transport = recipient.transport
            if not transport.is_closing():
                transport.write(data)
            if answer.withdraw is not None:
                if transport.is_closing():
                    answer.lost()
                elif transport.get_write_buffer_size():
                    recipient.until_sent(answer)
