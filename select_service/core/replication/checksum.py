"""A checksum at the end of the messages between replicas of this service.

TCP's own checksum misses one error in 65,536, and anything between two hosts may add errors after
it was verified. A flipped bit in an id or a number would be believed: the message is still valid.

The checksum is one more member, the last, of the MessagePack map that every message is, so older
readers skip it. It guards against errors, not forgers: those are excluded by keys.
"""

from __future__ import annotations

from typing import Final

from xxhash import xxh3_64_digest

_SUM_BYTES: Final = 8
_MEMBER: Final = b"\xa8checksum\xc4" + bytes([_SUM_BYTES])  # its name, and the header of its bytes
_END: Final = -_SUM_BYTES
_BEGIN: Final = _END - len(_MEMBER)

_SHORT: Final = range(0x80, 0x8F)  # headers of maps whose first byte has room for one more member
_SHORT_FULL: Final = 0x8F
_LONG: Final = 0xDE  # followed by two bytes with the number of members


class GarbledReplicaMessage(Exception):
    """A message that does not match its checksum."""


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
    """Tell whether a message has a checksum, and verify it.

    Raises:
        GarbledReplicaMessage: the checksum is not that of these bytes.
    """
    if payload[_BEGIN:_END] != _MEMBER:
        return False
    if xxh3_64_digest(memoryview(payload)[:_END]) != payload[_END:]:
        raise GarbledReplicaMessage("its checksum is that of another message")
    return True
