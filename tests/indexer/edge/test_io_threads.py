"""What blocks is done in turn, and nobody's end waits for it."""

import asyncio
import subprocess
import sys
import threading
import weakref

import pytest

from indexer.edge.io_threads import IoThreads
from tests.wait import PATIENCE_S


async def test_one_after_another_in_one_thread_that_ends() -> None:
    aside = IoThreads("a disk")
    done: list[int] = []
    await asyncio.gather(*(aside.do(done.append, number) for number in range(20)))
    assert done == list(range(20))
    with pytest.raises(ZeroDivisionError):
        await aside.do(lambda: 1 // 0)
    thread = await aside.do(threading.current_thread)
    assert thread.name == "a disk"
    aside.close()
    aside.close()
    thread.join()


async def test_who_is_cancelled_need_not_wait_and_what_has_begun_is_finished() -> None:
    aside = IoThreads("a disk")
    begun, moves = threading.Event(), threading.Event()
    done: list[str] = []

    def stand_still() -> None:
        begun.set()
        moves.wait()
        done.append("late")

    waits = asyncio.ensure_future(aside.do(stand_still))
    behind = asyncio.ensure_future(aside.do(done.append, "never"))
    while not begun.is_set():
        await asyncio.sleep(0)
    waits.cancel()
    behind.cancel()
    await asyncio.gather(waits, behind, return_exceptions=True)
    last = aside.begin(done.append, "last")
    moves.set()
    await asyncio.wrap_future(last)
    assert done == ["late", "last"]
    aside.close()


async def test_what_is_done_is_let_go_of() -> None:
    """A rank's blocks are megabytes, and the next snapshot may be an hour away."""

    class Blocks:
        pass

    aside = IoThreads("a disk")
    blocks = Blocks()
    given = weakref.ref(blocks)
    came = weakref.ref(await aside.do(lambda _: Blocks(), blocks))
    del blocks
    while given() or came():  # the thread comes to it by itself
        await asyncio.sleep(0)
    aside.close()


def test_a_process_ends_while_its_disk_stands_still() -> None:
    program = (
        "import asyncio, threading\n"
        "from indexer.edge.io_threads import IoThreads\n"
        "async def run():\n"
        "    begun = threading.Event()\n"
        "    IoThreads('a disk').begin(lambda: (begun.set(), threading.Event().wait()))\n"
        "    while not begun.is_set():\n"
        "        await asyncio.sleep(0)\n"
        "asyncio.run(run())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
