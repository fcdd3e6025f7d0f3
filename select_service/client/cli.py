"""Commands for people: `select-service call|workers|loads|drain|explain`, of a running service.

Exit codes: 0 answered, 1 the service refuses, 2 wrong usage or no answer.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode

import msgspec

from indexer.core.packing import unpack_i64
from select_service.client import text_output
from select_service.client.connection_flags import add_connection_flags, client_of
from select_service.client.core.problems import ClientError, MissingPackage, Unreachable
from select_service.client.synchronous import Client
from select_service.errors import DecisionNotFound, RouteNotFound, ServiceError
from select_service.standard_output import (
    CommandParser,
    complain,
    positive_seconds,
)
from select_service.token_file import TokenUnreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.standard_output import Commands
    from select_service.types import ScopeLoads

Found = TypeVar("Found")

_ANSWERED, _REFUSED, _NO_ANSWER = 0, 1, 2
_ROUTES: Final = {
    "select": "/select",
    "reserve": "/select_and_reserve",
    "pair": "/select_pair",
    "book": "/reservations",
    "batch": "/reservations/batch",
    "potential-loads": "/potential_loads",
    "overlap-scores": "/overlap_scores",
}


def main(argv: Sequence[str]) -> int:
    """Ask, print, and return the exit code."""
    chosen = _read(argv)
    try:
        with client_of(chosen, Client) as client:
            verb: Callable[[Client, argparse.Namespace], None] = chosen.verb
            verb(client, chosen)
    except ServiceError as refusal:
        if chosen.json:  # as its answers are
            print(msgspec.json.encode(refusal.body()).decode(), file=sys.stderr)
        else:
            complain(f"select-service {argv[0]}: {refusal}")
            if isinstance(refusal, DecisionNotFound):
                complain("`select-service explain` without an id lists those that are kept")
        if isinstance(refusal, RouteNotFound) and chosen.verb is not _call:
            complain("--url is the address of the service alone, without a path of its pages")
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            complain(f"select-service {argv[0]}: --token-file FILE names a token that it accepts")
        return _REFUSED
    except BrokenPipeError:  # the reader has seen enough
        raise
    except (ClientError, OSError, TokenUnreadable, ValueError) as error:
        complain(f"select-service {argv[0]}: {error}")
        if isinstance(error, Unreachable):
            complain(error.remedy)
        return _NO_ANSWER
    except KeyboardInterrupt:  # the user has waited long enough
        return _NO_ANSWER
    return _ANSWERED


# -- the verbs ---------------------------------------------------------------------------------


def _call(client: Client, chosen: argparse.Namespace) -> None:
    body: dict[str, Any] = {}
    if chosen.body is not None:
        text = sys.stdin.read() if chosen.body == "-" else chosen.body
        body = msgspec.json.decode(text, type=dict[str, Any])
    if chosen.tokens is not None:
        body["token_ids"] = chosen.tokens
    for name in ("model_name", "tenant_id"):
        if getattr(chosen, name) is not None:
            body[name] = getattr(chosen, name)
    if chosen.route.startswith("/"):
        says = chosen.body is not None or chosen.tokens is not None
        method, route = chosen.method or ("POST" if says else "GET"), chosen.route
        if method == "GET" and body:  # a body would be ignored
            route += f"{'&' if '?' in route else '?'}{urlencode(body)}"
            body = {}
        answer: object = client.call(method, route, body or None)
    else:
        answer = client.call("POST", _ROUTES[chosen.route], body)
    _print(answer)


def _workers(client: Client, chosen: argparse.Namespace) -> None:
    found = client.workers(chosen.model_name, chosen.tenant_id)
    _show(found, text_output.workers, chosen)


def _loads(client: Client, chosen: argparse.Namespace) -> None:
    def ask() -> list[ScopeLoads]:
        return client.loads(chosen.model_name, chosen.tenant_id)

    if chosen.watch:
        _watch(ask, chosen.every_s)
    else:
        _show(ask(), text_output.loads, chosen)


def _watch(ask: Callable[[], list[ScopeLoads]], every_s: float) -> None:
    try:
        from rich.live import Live  # an optional extra, only for --watch
    except ImportError as error:
        raise MissingPackage("--watch needs rich: pip install 'rich>=13.7'") from error
    shown = text_output.table(ask())
    screen = sys.stdout.isatty()
    with suppress(KeyboardInterrupt), Live(shown, auto_refresh=False, screen=screen) as live:
        while True:
            time.sleep(every_s)
            try:
                shown = text_output.table(ask())
            except ClientError as error:  # keep watching: it may come back
                shown.caption = f"what is shown may be old: {error}"
            live.update(shown, refresh=True)


def _drain(client: Client, chosen: argparse.Namespace) -> None:
    if chosen.status:
        _print(client.drain_status(chosen.worker_id))
    elif chosen.undo:
        _print(client.undrain_worker(chosen.worker_id))
    else:
        _print(client.drain_worker(chosen.worker_id, chosen.reason))


def _explain(client: Client, chosen: argparse.Namespace) -> None:
    if chosen.id is None:
        query = urlencode({"limit": chosen.limit})
        found = client.call("GET", f"/decisions?{query}", kind=dict[str, list[dict[str, Any]]])
        _show(found["decisions"], text_output.decisions, chosen)
    else:
        _show(msgspec.to_builtins(client.decision(chosen.id)), text_output.decision, chosen)


def _show(found: Found, as_text: Callable[[Found], str], chosen: argparse.Namespace) -> None:
    print(msgspec.json.encode(found).decode() if chosen.json else as_text(found))


def _print(answer: object) -> None:
    text = msgspec.json.encode(_unpacked(answer))
    print(msgspec.json.format(text, indent=2).decode())


def _unpacked(answer: object) -> object:
    """Convert packed hashes to numbers."""
    if isinstance(answer, dict):
        return {name: _unpacked(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [_unpacked(value) for value in answer]
    if isinstance(answer, bytes):
        return unpack_i64(answer)
    return answer


def _read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; argparse itself does not accept a body after flags."""
    parser = CommandParser(prog="select-service")
    add_commands(parser.add_subparsers(required=True, metavar="COMMAND"))
    chosen, rest = parser.parse_known_args(argv)
    if len(rest) == 1 and getattr(chosen, "body", "-") is None and not rest[0].startswith("--"):
        chosen.body = rest.pop()
    if rest:
        parser.refuse(rest[0], argv)
    return chosen


# -- usage -------------------------------------------------------------------------------------


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    call = _command(
        commands,
        "call",
        _call,
        "Sends one request to any route, and prints the answer as JSON.",
        "select-service call select --tokens 0-511\n"
        "select-service call /workers\n"
        "select-service call /workers/7 --method DELETE",
    )
    call.add_argument("route", type=_route, help=f"A path, or one of {', '.join(_ROUTES)}.")
    call.add_argument("body", nargs="?", help="The body as JSON; - reads it from standard input.")
    call.add_argument(
        "--tokens",
        type=_numbers,
        metavar="N,N-N",
        help="The prompt: token ids, and ranges of them.",
    )
    call.add_argument(
        "--method", help="The method for a path. Default: POST with a body, GET without."
    )
    workers = _command(
        commands,
        "workers",
        _workers,
        "Lists the workers of a running service, with their state and what they lack.",
        "select-service workers --model-name llama-3-70b",
    )
    loads = _command(
        commands,
        "loads",
        _loads,
        "Lists the load of every rank: requests, prompt tokens to compute, and KV blocks.",
        "select-service loads --watch",
    )
    loads.add_argument(
        "--watch", action="store_true", help="Show it again and again, in place (needs rich)."
    )
    loads.add_argument(
        "--every-s",
        type=positive_seconds,
        default=1.0,
        metavar="S",
        help="Seconds between two looks of --watch. Default: %(default)s.",
    )
    drain = _command(
        commands,
        "drain",
        _drain,
        "Sends a worker no new requests; those that it has go on.",
        "select-service drain 7 --reason upgrade\nselect-service drain 7 --status",
    )
    drain.add_argument("worker_id", type=_whole, help="The worker to drain.")
    drain.add_argument("--reason", help="Why, for the people who look at it.")
    how = drain.add_mutually_exclusive_group()
    how.add_argument("--undo", action="store_true", help="Let the worker take requests again.")
    how.add_argument("--status", action="store_true", help="Only say how far the drain is.")
    explain = _add_explain(commands)
    for one in (call, workers, loads):
        of = "Its member {}." if one is call else "Only of this {}."
        one.add_argument("--model-name", metavar="NAME", help=of.format("model"))
        one.add_argument("--tenant-id", metavar="NAME", help=of.format("tenant"))
    call.set_defaults(json=True)
    drain.set_defaults(json=False)  # what is printed is JSON; what it complains about is for people
    for one in (workers, loads, explain):
        one.add_argument("--json", action="store_true", help="Print one line of JSON.")


def _add_explain(commands: Commands) -> CommandParser:
    explain = _command(
        commands,
        "explain",
        _explain,
        "Lists the last decisions, or explains one: what each rank would have cost, and why. "
        "A cost and its terms are in KV blocks: less is better; --help-all says what each is.",
        "select-service explain\nselect-service explain 5f0c7f0e-6a1c-4b58-a5c1-5d1c2a9b7c11",
    )
    explain.list_seldom_used(text_output.legend())
    explain.add_argument("id", nargs="?", help="The id of a selection, reservation or decision.")
    explain.add_argument(
        "--limit",
        type=_whole,
        default=20,
        help="How many decisions are listed. Default: %(default)s.",
    )
    return explain


def _command(
    commands: Commands,
    name: str,
    verb: Callable[[Client, argparse.Namespace], None],
    text: str,
    examples: str,
) -> CommandParser:
    parser = commands.add_parser(name, help=text, description=text, examples=examples)
    parser.set_defaults(verb=verb)
    add_connection_flags(parser, "File with the token that the service asks for.")
    return parser


def _route(text: str) -> str:
    if text.startswith("/") or text in _ROUTES:
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither a path nor one of {', '.join(_ROUTES)}")


def _whole(text: str) -> int:
    """Read a whole number.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _numbers(text: str) -> list[int]:
    """Read `1,2,5-8`.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = first, last if dash else first
        if not all(end.isdecimal() for end in ends) or int(ends[0]) > int(ends[1]):
            raise argparse.ArgumentTypeError(f"{part!r} is no number and no range such as 0-511")
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return numbers
