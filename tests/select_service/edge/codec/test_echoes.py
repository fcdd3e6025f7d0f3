"""An answer shows the hashes of its request as printed numbers, however they were written there.

Where they were written just so the text is taken over instead of printed anew; nobody may notice.
"""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from select_service.edge.codec import encoder
from select_service.edge.codec.encoder import encode, show_hashes
from select_service.edge.codec.json_codec import RequestDecoder
from select_service.errors import ServiceError
from select_service.settings import FieldValidation
from select_service.types import SelectAndReserveRequest

DECODER = RequestDecoder(SelectAndReserveRequest, FieldValidation.WARN)
SPELLINGS = (
    st.integers(-(2**63), 2**63 - 1).map(str)
    | st.integers(2**63, 2**64 - 1).map(str)
    | st.sampled_from(["0", "-0", "-1", "256", "9223372036854775808", "-9223372036854775808"])
)
BLANKS = st.sampled_from(["", "", "", "", " ", "\n", "\t", "\r"])


class Shown(msgspec.Struct):
    hashes: list[int]


def shown(packed: object) -> bytes:
    assert isinstance(packed, bytes)
    return encode(Shown(show_hashes(packed)))


def printed(spelled: list[str]) -> bytes:
    """What has to be shown, by somebody else's printer."""
    values = [int(one) % 2**64 for one in spelled]
    signed = [value - 2**64 if value >> 63 else value for value in values]
    return json.dumps({"hashes": signed}, separators=(",", ":")).encode()


def test_hashes_are_printed_where_the_machine_has_another_order_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are packed in one order, and the printer takes only numbers in the machine's own."""
    monkeypatch.setattr(encoder.echo, "last", (b"", msgspec.Raw(b"[]")))
    monkeypatch.setattr(encoder, "_SIGNED", np.dtype(np.int64).newbyteorder())
    assert shown(np.array([1, -2, 2**62], np.int64).byteswap().tobytes()) == printed(
        ["1", "-2", f"{2**62}"]
    )


@given(
    spelled=st.lists(SPELLINGS, max_size=20),
    blanks=st.tuples(BLANKS, BLANKS, BLANKS, BLANKS),
    name=st.sampled_from(["m", "sequence_hashes", "[1,2]", "\\"]),
    before=st.booleans(),
)
@example(spelled=["-0", "9223372036854775808"], blanks=("", "", "", ""), name="m", before=True)
@example(spelled=["0", "-0"], blanks=("", "", "", ""), name="m", before=False)
@example(spelled=[], blanks=("", "", " ", ""), name="m", before=False)
def test_hashes_are_shown_as_signed_numbers_however_they_were_written(
    *, spelled: list[str], blanks: tuple[str, ...], name: str, before: bool
) -> None:
    colon, first, comma, last = blanks
    hashes = f'"sequence_hashes":{colon}[{first}{f"{comma},".join(spelled)}{last}]'
    other = f'"model_name":{json.dumps(name)}'
    body = f"{{{other},{hashes}}}" if before else f"{{{hashes},{other}}}"
    packed = DECODER.decode(body.encode()).request.sequence_hashes
    assert shown(packed) == printed(spelled)


def test_another_request_s_hashes_are_not_shown() -> None:
    first = DECODER.decode(b'{"sequence_hashes":[1,-2]}').request.sequence_hashes
    DECODER.decode(b'{"sequence_hashes":[3,-4]}')
    assert shown(first) == b'{"hashes":[1,-2]}'


def test_what_an_unknown_member_has_is_not_shown() -> None:
    body = b'{"x":{"sequence_hashes":[7]},"sequence_hashes":[1],"y":[{"sequence_hashes":[8]}]}'
    assert shown(DECODER.decode(body).request.sequence_hashes) == b'{"hashes":[1]}'


def test_of_two_members_of_one_name_nothing_is_remembered_wrongly() -> None:
    with pytest.raises(ServiceError):
        DECODER.decode(b'{"sequence_hashes":[1],"sequence_hashes":[2]}')
    packed = DECODER.decode(b'{"sequence_hashes":[1]}').request.sequence_hashes
    assert shown(packed) == b'{"hashes":[1]}'


def test_the_text_is_taken_over_and_no_more_of_it_than_is_bounded() -> None:
    few = DECODER.decode(b'{"sequence_hashes":[1,-2]}').request.sequence_hashes
    assert encoder.echo.last[0] is few
    text = ",".join(["-9223372036854775807"] * 4096)
    many = DECODER.decode(f'{{"sequence_hashes":[{text}]}}'.encode()).request.sequence_hashes
    assert encoder.echo.last[0] is few
    assert shown(many) == printed(text.split(","))
