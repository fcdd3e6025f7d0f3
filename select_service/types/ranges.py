"""Numbers and lists as the wire allows them, and the checks that several types share.

What JSON cannot express (u64) is checked in `__post_init__`, by the functions below.
"""

from typing import TYPE_CHECKING, Annotated, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from indexer.types import U64_MASK

U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
U64 = Annotated[int, Meta(ge=0)]  # upper bound: `__post_init__` (JSON schema has no u64)
I64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Meta(ge=0.0)]
Seconds = Annotated[float, Meta(gt=0.0)]
Milliseconds = Annotated[float, Meta(gt=0.0)]
# The numbers of long lists are read without their bounds: packing checks all of them at once.
AnyHash = Annotated[int, Meta(extra_json_schema={"minimum": -(1 << 63)})]
"""Signed or unsigned, 64 bits; packed modulo 2^64."""
Token = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": (1 << 32) - 1})]
# What the core takes and what JSON may hold: callers in the same process may pass lists, or packed
# little-endian numbers as the codec does; a JSON decoder must not read a string as the latter.
if TYPE_CHECKING:
    HashList: TypeAlias = list[int] | bytes
    TokenList: TypeAlias = list[int] | bytes
else:
    HashList = list[AnyHash]
    TokenList = list[Token]


def check_u64(name: str, value: int | None) -> None:
    """Raise ValueError, naming the field, for a number that is not one of 64 unsigned bits."""
    if value is not None and not 0 <= value <= U64_MASK:  # embedding constructs without a codec
        bound = "at least 0" if value < 0 else "at most 2^64-1"
        raise ValueError(f"{name} must be {bound}")


def check_positive(name: str, value: int | None) -> None:
    """Raise ValueError, naming the field, for a number below 1; of its upper bound see others."""
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1")


def check_scope_names(tenant_id: str | UnsetType, routing_group: str | UnsetType) -> None:
    """Raise ValueError for two names of one tenant that differ."""
    if tenant_id is not UNSET and routing_group is not UNSET and tenant_id != routing_group:
        raise ValueError("routing_group and tenant_id name the same thing and must be equal")
