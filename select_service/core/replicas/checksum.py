"""A checksum at the end of what replicas of this service tell each other.

TCP's own lets one error in 65,536 through, and what runs between two hosts may add its own after
that was looked at. A flipped bit in an id or a number would be believed: it is a valid message.

It is one more member of the MessagePack map that every message is, the last one, so that whoever
does not know it reads the rest as ever. Against errors, not against forgers: those
are shut out by keys.
"""

from __future__ import annotations

from typing import Final

from xxhash import xxh3_64_digest

_SUM_BYTES: Final = 8
_MEMBER: Final = b"\xa8checksum\xc4" + bytes([_SUM_BYTES])  # its name, and the head of its bytes
_END: Final = -_SUM_BYTES
_BEGIN: Final = _END - len(_MEMBER)

_SHORT: Final = range(0x80, 0x8F)  # heads of maps that have room for one more in their first byte
_SHORT_FULL: Final = 0x8F
_LONG: Final = 0xDE  # two bytes with the number of members follow


class GarbledReplicaMessage(Exception):
    """A message that is not what its sender has put the checksum under."""


def with_checksum(payload: bytes) -> bytes:
    """Return an encoded map with its checksum as the last member, 19 bytes more."""
    head = payload[0]
    if head in _SHORT:
        body = b"%c%b%b" % (head + 1, payload[1:], _MEMBER)
    elif head == _SHORT_FULL:
        body = b"\xde\x00\x10%b%b" % (payload[1:], _MEMBER)
    else:
        assert head == _LONG, "a message is a map of a few members"
        members = int.from_bytes(payload[1:3], "big") + 1
        body = b"\xde%b%b%b" % (members.to_bytes(2, "big"), payload[3:], _MEMBER)
    return body + xxh3_64_digest(body)


def is_checked(payload: bytes) -> bool:
    """Tell whether a message has a checksum, False: it has none.

    Raises:
        GarbledReplicaMessage: it has another than belongs to these bytes.
    """
    if payload[_BEGIN:_END] != _MEMBER:
        return False
    if xxh3_64_digest(memoryview(payload)[:_END]) != payload[_END:]:
        raise GarbledReplicaMessage("its checksum is that of another message")
    return True
