"""`select-service demo`: parse, start the processes, show the run, sum it up."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from select_service.client.transport import read_address
from select_service.demo.client import MODEL, SelectorClient, SelectorRefused
from select_service.demo.left_over import remove_left_over
from select_service.demo.service_process import ServiceDidNotStart, ServiceProcess
from select_service.settings.command_line import argument
from select_service.settings.value_types import between, count
from select_service.simulator.results import expect_writable
from select_service.standard_output import complain, parse_command
from select_service.token_file import TokenUnreadable, read_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from select_service.demo.session import DemoSession
    from select_service.demo.view import FleetPicture, LiveTable, PlainView
    from select_service.standard_output import Commands

_FOREIGN_FIRST_WORKER_ID = 990_001  # distinct from the workers of a running service
_RESTART_EVERY = 600  # half a minute: less often than what the doctor warns of
_ENDED_BY = (signal.SIGTERM, signal.SIGHUP)  # a supervisor, or a terminal that is closed


def main(argv: Sequence[str]) -> int:
    """Run the demo; return 0 if loads returned to zero and the predictions were right."""
    args = parse_command(add_commands, argv)
    try:
        import rich  # noqa: F401 - only to see whether the extra is installed
    except ImportError:
        complain("the demo needs rich: pip install 'rich>=13.7'")
        return 1
    try:
        expect_writable(None if args.snapshot is None else str(args.snapshot))
    except OSError as error:  # before anything runs
        complain(f"demo: {error.filename}: {error.strerror}")
        return 1
    try:
        token = None if args.token_file is None else read_token(args.token_file)
    except TokenUnreadable as error:
        complain(f"demo: {error}")
        return 1
    return asyncio.run(_run(args, token))


def add_commands(commands: Commands) -> None:
    """Add the command of this module."""
    parser = commands.add_parser(
        "demo",
        help="Shows the service at work, with simulated engines and traffic.",
        description="Simulated engines publish KV events and multi-turn chats are sent to them, in "
        "front of a service of its own or of one that runs (--url). Ends with an audit. Exit "
        "codes: 0 it passed, 1 it did not, 143 or 129 SIGTERM or SIGHUP ended it without one.",
        examples="select-service demo --requests 200 --plain\n"
        "select-service demo --url http://localhost:8092 --engines 2",
    )
    parser.add_argument(
        "--requests",
        type=argument(count()),
        metavar="N",
        help="End after so many requests, with a summary. Default: until Ctrl-C.",
    )
    parser.add_argument(
        "--rate",
        type=argument(between(0.0, math.inf)),
        default=20.0,
        metavar="R",
        help="Requests per second, on average. Default: %(default)s.",
    )
    parser.add_argument(
        "--engines",
        type=argument(count()),
        default=4,
        metavar="N",
        help="Number of simulated engines. Default: %(default)s.",
    )
    parser.add_argument(
        "--blocks",
        type=argument(count()),
        default=512,
        metavar="N",
        help="KV blocks of 16 tokens that each engine has. Default: %(default)s.",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="Seed of the traffic. Default: %(default)s."
    )
    parser.add_argument(
        "--restart-every",
        type=int,
        metavar="N",
        help="Restart an engine every N requests; 0: never."
        f" Default: once in the middle with --requests, else {_RESTART_EVERY}.",
    )
    parser.add_argument(
        "--url", type=_address, help="Use the service that runs there, instead of starting one."
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="With --url, a file with a token that the service accepts, of the scope admin, or of "
        "catalog, select, lifecycle and read.",
    )
    parser.add_argument(
        "--snapshot", type=Path, metavar="FILE", help="Write the last busy picture there, as SVG."
    )
    parser.add_argument(
        "--plain", action="store_true", help="Print lines instead of the live table."
    )


def _address(text: str) -> str:
    try:
        read_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _restart_every(args: argparse.Namespace) -> int | None:
    if args.restart_every is not None:
        return int(args.restart_every) or None
    return _RESTART_EVERY if args.requests is None else max(1, args.requests // 2)


async def _run(args: argparse.Namespace, token: str | None) -> int:
    signals = _cancelled_by_signals()
    try:
        async with _service(args.url) as url:
            if args.url is not None:
                await _make_room(url, token)
            return await _show(args, url, token)
    except* (ServiceDidNotStart, SelectorRefused, OSError) as group:
        for error in _leaves(group):
            complain(f"demo: {str(error) or type(error).__name__}")
    except* asyncio.CancelledError:
        if not signals:
            raise
    return 128 + signals[0] if signals else 1


def _cancelled_by_signals() -> list[int]:
    """Let signals end the run in order: no worker stays registered, and no service runs on.

    Returns:
        Those that came.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    came: list[int] = []

    def ended(number: int) -> None:
        came.append(number)
        if task is not None:
            task.cancel()

    for number in _ENDED_BY:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, ended, number)
    return came


async def _make_room(url: str, token: str | None) -> None:
    client = SelectorClient(url, model_name=MODEL, token=token)
    try:
        left = await remove_left_over(client)
    finally:
        await client.close()
    if left:
        workers = ", ".join(map(str, left))
        complain(f"demo: removed the workers that a demo which was killed left there: {workers}")


def _leaves(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


@contextlib.asynccontextmanager
async def _service(url: str | None) -> AsyncIterator[str]:
    if url is not None:
        yield url.rstrip("/")
    else:
        async with ServiceProcess() as service:
            yield service.url


async def _show(args: argparse.Namespace, url: str, token: str | None) -> int:
    from rich.console import Console  # part of the extra, like the imports inside `demo.view`

    from select_service.demo.session import DemoSession, DemoSettings
    from select_service.demo.view import FleetPicture, LiveTable, PlainView
    from select_service.demo.worker import EngineShape

    session = DemoSession(
        DemoSettings(
            url=url,
            token=token,
            requests=args.requests,
            rate=args.rate,
            engines=args.engines,
            seed=args.seed,
            restart_every=_restart_every(args),
            first_worker_id=1 if args.url is None else _FOREIGN_FIRST_WORKER_ID,
            engine=EngineShape(blocks=args.blocks),
        )
    )
    # Ctrl-C ends the traffic, not the summary; a second one kills the demo.
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        complain("ending: the last requests, then the audit; Ctrl-C again ends at once")
        session.stop()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    console = Console()
    plain = args.plain or not console.is_terminal
    view = PlainView(lambda line: print(line, flush=True)) if plain else LiveTable(console)
    snapshot = FleetPicture()
    async with asyncio.TaskGroup() as group:
        drawing = group.create_task(_draw(session, view, snapshot))
        try:
            summary = await session.run()
        finally:
            drawing.cancel()
    if args.snapshot is not None:
        snapshot.save(args.snapshot)
    print("\n".join(summary.lines()))
    return 1 if summary.problems() else 0


async def _draw(session: DemoSession, view: LiveTable | PlainView, snapshot: FleetPicture) -> None:
    await session.registered.wait()  # nothing before that: an error is the first line
    with view:
        while True:
            board = session.board()
            view.show(board)
            snapshot.show(board)
            await asyncio.sleep(view.interval_s)
