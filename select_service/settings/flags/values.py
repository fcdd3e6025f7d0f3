"""Parsers of flag values: text to value, or ValueError with the reason."""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from indexer.core.curve_key import is_curve_key
from indexer.core.egress import Egress
from indexer.core.endpoint import SCHEMES, why_elsewhere, why_no_base
from indexer.edge.plain_file import open_plain
from indexer.settings import EgressSettings
from select_service.settings.environment import parse_float
from select_service.types.shadow import Weight, read_shadow_weights

if TYPE_CHECKING:
    from collections.abc import Callable

PORT_MAX: Final = 65535
"""Of TCP."""
COUNT_MAX: Final = (1 << 31) - 1
"""Of counts: the largest C int."""
BYTES_MAX: Final = (1 << 62) - 1
"""Of bytes: sums of a few still fit 64 bits."""
LENGTH_MAX: Final = 4096
"""Of ids and names: replicas accept hardly longer ones from each other."""

_FILE_BYTES_MAX: Final = 4 << 20
_FILE_MODE: Final = re.compile("0?[0-7]{3}")
_BODILESS: Final = frozenset({204, 205, 304})


def status(text: str) -> int:
    """Read a status whose answers may have a body; HTTP clients expect none after some."""
    status = whole(200, 999)(text)
    if status in _BODILESS:
        raise ValueError(f"{status} has no body")
    return status


def whole(minimum: int, maximum: int) -> Callable[[str], int]:
    """Read a whole number within bounds, both allowed."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            raise ValueError(f"{value} is not in {minimum}..{maximum}")
        return value

    return parse


def optional(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Read `None` as other tools in the field do: off."""
    return lambda text: None if text == "None" else parse(text)


def number(minimum: float, maximum: float | None = None) -> Callable[[str], float]:
    """Read a number from `minimum`, and up to `maximum` if there is one."""
    bounds = f"at least {minimum:g}" if maximum is None else f"in {minimum:g}..{maximum:g}"

    def parse(text: str) -> float:
        value = parse_float(text)
        if value is None or value < minimum or (maximum is not None and value > maximum):
            raise ValueError(f"{text!r} is not a number {bounds}")
        return value

    return parse


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object, or `@FILE` with one in it."""
    try:
        source = _content(text[1:]) if text.startswith("@") else text.encode()
        return msgspec.json.decode(source, type=dict[str, Any])
    except OSError as error:
        raise ValueError(f"cannot read {text[1:]}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a JSON object: {error}") from None


def shadow_weights(text: str) -> dict[str, Weight]:
    """Read a JSON object, `@FILE` with one in it, or name=value,..."""
    if text.startswith(("@", "{")):
        return read_shadow_weights(json_object(text))
    said: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        name, is_said, value = part.strip().partition("=")
        if not is_said:
            raise ValueError(f"{part[:64]!r} is not name=value")
        if name in said:
            raise ValueError(f"{name} comes twice")
        switch = {"true": True, "false": False}.get(value.lower())
        number = parse_float(value) if switch is None else switch
        said[name] = value if number is None else number
    return read_shadow_weights(said)


def _content(path: str) -> bytes:
    with open_plain(path) as file:
        text = file.read(_FILE_BYTES_MAX + 1)
    if len(text) > _FILE_BYTES_MAX:
        raise ValueError(f"{path} is longer than {_FILE_BYTES_MAX} bytes")
    return text


def seconds(*, zero: bool) -> Callable[[str], float]:
    """Read a finite time in seconds; zero only if it has a meaning."""

    def parse(text: str) -> float:
        value = parse_float(text)
        if value is None or value < 0 or (value == 0 and not zero):
            raise ValueError(f"{text!r} is not a number of seconds{'' if zero else ' above 0'}")
        return value

    return parse


def weight(text: str) -> float:
    """Read a number that is not negative."""
    value = parse_float(text)
    if value is None or value < 0:
        raise ValueError(f"{text!r} is not a number from 0")
    return value


def choice(*names: str) -> Callable[[str], str]:
    """Read one of these words."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def yes_or_no(text: str) -> bool:
    """Read `yes` or `no`."""
    return choice("yes", "no")(text) == "yes"


def listed(text: str) -> tuple[str, ...]:
    """Split at commas; nothing is trimmed, empty text gives an empty list."""
    return tuple(text.split(",")) if text else ()


def schemes(text: str) -> tuple[str, ...]:
    """Read schemes of ZMQ endpoints, at least one."""
    schemes = listed(text)
    for scheme in schemes:
        choice(*sorted(SCHEMES))(scheme)
    if not schemes:
        raise ValueError("no scheme at all")
    return schemes


def reach_list(text: str) -> tuple[str, ...]:
    """Check hosts, networks and ports with the parser of `indexer.core.egress`."""
    entries = listed(text)
    Egress(EgressSettings(deny=entries))  # parses them
    return entries


def path(text: str) -> str:
    """Read a path; it must not be empty."""
    if not text:
        raise ValueError("an empty path")
    return text


def file_mode(text: str) -> str:
    """Read the permissions of a file, in octal."""
    if not _FILE_MODE.fullmatch(text):
        raise ValueError(f"{text!r} is not an octal file mode")
    return text


def curve_key(text: str) -> str:
    """Read a public key of CURVE."""
    if not is_curve_key(text):
        raise ValueError(f"{text[:8]!r}... is not a CURVE key: 40 characters of Z85")
    return text


def http_url(text: str) -> str:
    """Read a base URL of HTTP; a trailing slash is dropped."""
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is not an http:// or https:// URL")
    if (why := why_no_base(text)) is not None:
        raise ValueError(f"{_without_secrets(text)!r} is not to be asked: {why}")
    try:
        parts = urlsplit(text)
        named = parts.hostname and parts.port != 0
    except ValueError as error:
        raise ValueError(f"{text!r} is no URL: {error}") from None
    if not named:
        raise ValueError(f"{text!r} names no host, or no port of it")
    return text.rstrip("/")


def peer_urls(text: str) -> tuple[str, ...]:
    """Read base URLs of peers, split at commas.

    As in the reference, an unusable URL is no error: the service starts without that peer. Refused
    are URLs that would lead to something else, or contain credentials, which logs would show.
    """
    urls = listed(text)
    for url in urls:
        if (why := why_elsewhere(url)) is not None:
            raise ValueError(f"{_without_secrets(url)!r} is not to be asked: {why}")
    return urls


def _without_secrets(url: str) -> str:
    return url.rpartition("@")[2].partition("?")[0]


def host_port(text: str) -> str:
    """Read `host:port`."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) <= PORT_MAX):
        raise ValueError(f"{text!r} is not host:port")
    return text


def member(kind: type[Enum]) -> Callable[[str], Enum]:
    """Read the value of an enumeration's member."""
    choose = choice(*(one.value for one in kind))
    return lambda text: kind(choose(text))
