"""The types of settings: each reads text into a value, or raises ValueError with the reason."""

from __future__ import annotations

import re
from enum import Enum
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from indexer.core.curve_key import is_curve_key
from indexer.core.egress import Egress
from indexer.core.endpoint import SCHEMES, why_elsewhere, why_no_base
from indexer.limits import EgressSettings
from indexer.plain_file import open_plain
from indexer.redaction import redact
from select_service.settings.environment import parse_float
from select_service.settings.row import ValueType
from select_service.types.shadow import Weight, read_shadow_weights

if TYPE_CHECKING:
    from collections.abc import Callable

_PORT_MAX: Final = 65535  # of TCP
_COUNT_MAX: Final = (1 << 31) - 1  # the largest C int
_BYTES_MAX: Final = (1 << 62) - 1  # sums of a few still fit 64 bits
_LENGTH_MAX: Final = 4096  # replicas accept hardly longer ids and names from each other
_FILE_BYTES_MAX: Final = 4 << 20
_COST_MAX: Final = 1_000_000.0
_FILE_MODE: Final = re.compile("0?[0-7]{3}")
_BODILESS: Final = frozenset({204, 205, 304})  # HTTP clients expect no body after these


# -- numbers -------------------------------------------------------------------------------------


def whole(minimum: int, maximum: int, metavar: str = "N") -> ValueType:
    """Read a whole number within bounds, both allowed."""

    def parse(text: str) -> int:
        value = _whole(text)
        if not minimum <= value <= maximum:
            raise ValueError(f"{value} is not in {minimum}..{maximum}")
        return value

    return ValueType(parse, metavar)


def count(minimum: int = 1, metavar: str = "N") -> ValueType:
    """Read how many of something there may be."""
    return whole(minimum, _COUNT_MAX, metavar)


def size(minimum: int = 1) -> ValueType:
    """Read a number of bytes, or of blocks or tokens: there may be more than a C int holds."""
    return whole(minimum, _BYTES_MAX)


def length() -> ValueType:
    """Read how many characters an id or a name may have."""
    return whole(1, _LENGTH_MAX)


def tcp_port(minimum: int = 1) -> ValueType:
    """Read a TCP port."""
    return whole(minimum, _PORT_MAX)


def number(minimum: float, maximum: float | None = None, metavar: str = "F") -> ValueType:
    """Read a number from `minimum`, and up to `maximum` if there is one."""
    bounds = f"at least {minimum:g}" if maximum is None else f"in {minimum:g}..{maximum:g}"

    def parse(text: str) -> float:
        value = parse_float(text)
        if value is None or value < minimum or (maximum is not None and value > maximum):
            raise ValueError(f"{text!r} is not a number {bounds}")
        return value

    return ValueType(parse, metavar)


def any_whole(metavar: str = "N") -> ValueType:
    """Read a whole number whose bounds are its component's."""
    return ValueType(_whole, metavar)


def any_number(metavar: str = "F") -> ValueType:
    """Read a number whose bounds are its component's; it may be infinite, or none."""

    def parse(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None

    return ValueType(parse, metavar)


def between(low: float, high: float, metavar: str = "F") -> ValueType:
    """Read a number above `low` and below `high`."""
    bounds = f"above {low:g}" if isinf(high) else f"between {low:g} and {high:g}, neither of them"

    def parse(text: str) -> float:
        value = parse_float(text)
        if value is None or not low < value < high:
            raise ValueError(f"{text!r} is not a number {bounds}")
        return value

    return ValueType(parse, metavar)


def seconds(*, zero: bool = False) -> ValueType:
    """Read a finite time in seconds; zero only if it has a meaning."""

    def parse(text: str) -> float:
        value = parse_float(text)
        if value is None or value < 0 or (value == 0 and not zero):
            raise ValueError(f"{text!r} is not a number of seconds{'' if zero else ' above 0'}")
        return value

    return ValueType(parse, "S")


def status() -> ValueType:
    """Read a status whose answers may have a body."""
    parse_status = _parser_of(whole(200, 999))

    def parse(text: str) -> object:
        value = parse_status(text)
        if value in _BODILESS:
            raise ValueError(f"{value} has no body")
        return value

    return ValueType(parse, "N")


def optional(kind: ValueType) -> ValueType:
    """Read `None` as other tools in the field do: off."""
    parse = _parser_of(kind)
    return ValueType(lambda text: None if text == "None" else parse(text), kind.metavar)


# -- words ---------------------------------------------------------------------------------------


def switch() -> ValueType:
    """Off unless given; takes no value on the command line, true or false in a file."""
    return ValueType(None, "")


def choice(*names: str, metavar: str | None = None) -> ValueType:
    """Read one of these words."""

    def parse(text: str) -> str:
        _expect_one_of(text, names)
        return text

    return ValueType(parse, metavar or "|".join(names))


def yes_or_no() -> ValueType:
    """Read `yes` or `no`."""

    def parse(text: str) -> bool:
        _expect_one_of(text, ("yes", "no"))
        return text == "yes"

    return ValueType(parse, "yes|no")


def member(kind: type[Enum]) -> ValueType:
    """Read the value of an enumeration's member."""
    names = tuple(one.value for one in kind)

    def parse(text: str) -> Enum:
        _expect_one_of(text, names)
        return kind(text)

    return ValueType(parse, "|".join(names))


def text(metavar: str) -> ValueType:
    """Read any text."""
    return ValueType(str, metavar)


def path(metavar: str) -> ValueType:
    """Read a path; it must not be empty."""

    def parse(text: str) -> str:
        if not text:
            raise ValueError("an empty path")
        return text

    return ValueType(parse, metavar)


def file(metavar: str) -> ValueType:
    """Read a path as `pathlib` has it; it must not be empty."""
    parse = _parser_of(path(metavar))
    return ValueType(lambda text: Path(str(parse(text))), metavar)


def file_mode() -> ValueType:
    """Read the permissions of a file, in octal."""

    def parse(text: str) -> str:
        if not _FILE_MODE.fullmatch(text):
            raise ValueError(f"{text!r} is not an octal file mode")
        return text

    return ValueType(parse, "OCTAL")


def curve_public_key() -> ValueType:
    """Read a public key of CURVE."""

    def parse(text: str) -> str:
        if not is_curve_key(text):
            raise ValueError(f"{text[:8]!r}... is not a CURVE key: 40 characters of Z85")
        return text

    return ValueType(parse, "KEY")


# -- lists and objects ---------------------------------------------------------------------------


def repeated(kind: ValueType) -> ValueType:
    """Read one value each time the flag is given."""
    return replace(kind, repeats=True)


def comma_list(metavar: str) -> ValueType:
    """Split at commas; nothing is trimmed, empty text gives an empty list."""
    return ValueType(_split, metavar)


def schemes() -> ValueType:
    """Read schemes of ZMQ endpoints, at least one."""

    def parse(text: str) -> tuple[str, ...]:
        found = _split(text)
        for scheme in found:
            _expect_one_of(scheme, tuple(sorted(SCHEMES)))
        if not found:
            raise ValueError("no scheme at all")
        return found

    return ValueType(parse, "tcp,ipc,inproc")


def egress_list() -> ValueType:
    """Check hosts, networks and ports with the parser of `indexer.core.egress`."""

    def parse(text: str) -> tuple[str, ...]:
        entries = _split(text)
        Egress(EgressSettings(deny=entries))  # parses them
        return entries

    return ValueType(parse, "HOST|NETWORK,…")


def json_object() -> ValueType:
    """Read a JSON object, or `@FILE` with one in it."""
    return ValueType(_json_object, "JSON|@FILE")


def weights_object() -> ValueType:
    """Read a JSON object, `@FILE` with one in it, or name=value,..."""

    def parse(text: str) -> dict[str, Weight]:
        return read_shadow_weights(_named_values(text))

    return ValueType(parse, "NAME=VALUE,...|JSON|@FILE")


def costs_object() -> ValueType:
    """Read numbers from 0 by name: a JSON object, `@FILE` with one in it, or name=value,..."""

    def parse(text: str) -> dict[str, float]:
        costs: dict[str, float] = {}
        for key, value in _named_values(text).items():
            name = key.strip()
            if not name or name in costs:
                raise ValueError(f"{key[:64]!r} comes twice, or is no name")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0.0 <= value <= _COST_MAX:
                raise ValueError(f"{name[:64]} must be a number from 0 to {_COST_MAX:g}")
            costs[name] = float(value)
        return costs

    return ValueType(parse, "NAME=VALUE,...|JSON|@FILE")


def _named_values(text: str) -> dict[str, Any]:
    if text.startswith(("@", "{")):
        return _json_object(text)
    values: dict[str, object] = {}
    for part in filter(None, text.split(",")):
        name, has_value, value = part.strip().partition("=")
        if not has_value:
            raise ValueError(f"{part[:64]!r} is not name=value")
        if name in values:
            raise ValueError(f"{name} comes twice")
        switched = {"true": True, "false": False}.get(value.lower())
        found = parse_float(value) if switched is None else switched
        values[name] = value if found is None else found
    return values


# -- addresses -----------------------------------------------------------------------------------


def http_url() -> ValueType:
    """Read a base URL of HTTP; a trailing slash is dropped."""

    def parse(text: str) -> str:
        if not text.startswith(("http://", "https://")):
            raise ValueError(f"{text!r} is not an http:// or https:// URL")
        if (why := why_no_base(text)) is not None:
            raise ValueError(f"{redact(text)!r} is not to be asked: {why}")
        try:
            parts = urlsplit(text)
            named = parts.hostname and parts.port != 0
        except ValueError as error:
            raise ValueError(f"{text!r} is no URL: {error}") from None
        if not named:
            raise ValueError(f"{text!r} names no host, or no port of it")
        return text.rstrip("/")

    return ValueType(parse, "URL")


def peer_urls() -> ValueType:
    """Read base URLs of peers, split at commas.

    As in the reference, an unusable URL is no error: the service starts without that peer. Refused
    are URLs that would lead to something else, or contain credentials, which logs would show.
    """

    def parse(text: str) -> tuple[str, ...]:
        urls = _split(text)
        for url in urls:
            if (why := why_elsewhere(url)) is not None:
                raise ValueError(f"{redact(url)!r} is not to be asked: {why}")
        return urls

    return ValueType(parse, "URL,…")


def host_port() -> ValueType:
    """Read `host:port`."""

    def parse(text: str) -> str:
        host, colon, number = text.rpartition(":")
        if not (host and colon and number.isdigit() and 0 < int(number) <= _PORT_MAX):
            raise ValueError(f"{text!r} is not host:port")
        return text

    return ValueType(parse, "HOST:PORT")


# -- what they share -----------------------------------------------------------------------------


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def _parser_of(kind: ValueType) -> Callable[[str], object]:
    assert kind.parse is not None, "a switch has no value"
    return kind.parse


def _expect_one_of(text: str, names: tuple[str, ...]) -> None:
    if text not in names:
        raise ValueError(f"{text!r} is none of {', '.join(names)}")


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


def _json_object(text: str) -> dict[str, Any]:
    try:
        source = _content(text[1:]) if text.startswith("@") else text.encode()
        return msgspec.json.decode(source, type=dict[str, Any])
    except OSError as error:
        raise ValueError(f"cannot read {text[1:]}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a JSON object: {error}") from None


def _content(path: str) -> bytes:
    with open_plain(path) as file:
        content = file.read(_FILE_BYTES_MAX + 1)
    if len(content) > _FILE_BYTES_MAX:
        raise ValueError(f"{path} is longer than {_FILE_BYTES_MAX} bytes")
    return content


LogFormat = Literal["json", "text"]
TracesTo = Literal["none", "otlp"]
KubernetesKind = Literal["pods", "endpointslices"]
SAMPLERS: Final = (
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
)
"""The samplers, by OpenTelemetry's names."""


class Durability(Enum):
    """When a change may be acknowledged."""

    STRICT = "strict"  # once it is on disk
    RELAXED = "relaxed"  # at once; on disk within --durability-window-s


class FieldValidation(Enum):
    """What happens to an unknown top-level field."""

    STRICT = "strict"  # 422
    WARN = "warn"  # accepted, with a Warning header
    IGNORE = "ignore"
