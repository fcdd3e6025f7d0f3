"""A batch that is booked whole or not at all, when the process that books it is killed.

What was answered stands; of what was not, all is there or nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path

import pytest

from tests.faults.patient import service
from tests.live.batches import batch, booked

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

SAMPLES = 300
"""Of a batch: it takes several turns of the loop, and several commits."""

LIVES = 3
CALLERS = 3


def test_batches_of_a_killed_process_stand_or_were_never_there(tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path / "state"), "--reservation-ttl-s", "0")
    numbers, said = itertools.count(), set[str]()
    with service(tmp_path, *flags) as server:
        server.add_worker(1, 2)
        for life in range(LIVES):
            first = threading.Event()

            def call(life: int = life, first: threading.Event = first) -> None:
                with contextlib.suppress(Exception):  # until it is killed
                    while True:
                        name = f"w{life}-{next(numbers)}"
                        answer = server.request("POST", "/select_batch", batch(name, SAMPLES))
                        assert answer.status == 200
                        said.add(name)
                        first.set()

            callers = [threading.Thread(target=call) for _ in range(CALLERS)]
            for one in callers:
                one.start()
            assert first.wait(30)
            threading.Event().wait(0.05 * life)  # somewhere in the middle of others
            process = server.process
            assert process is not None
            process.kill()
            process.wait()
            for one in callers:
                one.join()
            server.__enter__()
            batches = booked(server)
            assert batches.keys() >= said, "what was answered stands"
            assert set(batches.values()) == {SAMPLES}, "all or none"
            said.update(batches)
