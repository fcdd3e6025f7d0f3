"""How a lost connection is told from one that libzmq gave up: by what comes next, not by time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from indexer.edge.sockets import Link
from indexer.edge.stream_sockets import StreamSockets


class _Stream:
    breaches = 0

    def on_breach(self) -> None:
        self.breaches += 1

    def on_reconnect(self, now: float) -> None:
        pass

    def on_connect(self) -> None:
        pass


@pytest.mark.parametrize(
    ("news", "breaches"),
    [
        ([Link.CONNECTED, Link.BROKEN, Link.RETRYING, None], 0),
        # the turn that read the loss was late, and the retry is read after our own attempt
        ([Link.CONNECTED, Link.BROKEN, None, Link.RETRYING, Link.CONNECTING], 0),
        ([Link.CONNECTED, Link.BROKEN, None, Link.CONNECTING, Link.CONNECTED], 1),
        ([Link.CONNECTED, Link.BROKEN, None, Link.CONNECTED], 1),
        ([Link.CONNECTED, Link.BROKEN, Link.BROKEN, None, Link.CONNECTING], 1),
        ([Link.BROKEN, None, Link.CONNECTING, Link.BROKEN, None, Link.CONNECTING], 0),
    ],
    ids=["retried", "retried-late", "given-up", "back-at-once", "told-twice", "never-up"],
)
def test_what_comes_after_a_loss_tells_which_it_was(news: list[Link | None], breaches: int) -> None:
    stream: Any = _Stream()
    subscriber: Any = SimpleNamespace(connect_again=lambda: None)
    sockets = StreamSockets(stream, subscriber, None, 0.0)
    for at, link in enumerate(news):
        if link is None:
            sockets.connect_again(at)
        else:
            sockets.follow(link, at)
    assert stream.breaches == breaches
