"""Recordings of `select-service --record FILE`: their files, their items, and their requests.

`FILE` and its full predecessors (`FILE.000001` and so on) are one recording, read in order; a
predecessor alone is one, too. `recording_replay.py` repeats the decisions.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.core.hashing import sequence_hashes
from indexer.core.packing import numbers_in
from select_service.core.ledger.reservation_ids import leg_ids
from select_service.core.recording.decoder import RecordedFile, hashes_of
from select_service.core.recording.items import Decided, ReservationStep, number_of
from select_service.simulator.core.requests import ClientRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from select_service.core.recording.items import Item

_log = logging.getLogger("select_sim")

_ENDS: Final = frozenset({"freed", "expired", "lease_ended", "told"})


class Played(NamedTuple):
    """An item and its file."""

    recorded_file: RecordedFile
    path: Path
    item: Item


def files_of(path: Path) -> list[Path]:
    """Return the files of a recording in the order they were written.

    Raises:
        OSError: there is none.
    """
    aside = [
        (number, one)
        for one in path.parent.iterdir()
        if (number := number_of(path.name, one.name)) is not None
    ]
    files = [one for _, one in sorted(aside)]
    if path.exists() or not files:
        files.append(path)
    return files


def play(
    files: Iterable[Path], recorded_files: list[RecordedFile] | None = None
) -> Iterator[Played]:
    """Yield the items of some files.

    Args:
        files: in order.
        recorded_files: opened ones are appended to this.

    Raises:
        BadRecording: one of them cannot be read, with file and offset.
        OSError: one of them does not exist.
    """
    for path in files:
        with path.open("rb") as file:
            recorded_file = RecordedFile(file.read, str(path))
            if recorded_files is not None:
                recorded_files.append(recorded_file)
            for item in recorded_file:
                yield Played(recorded_file, path, item)


def requests_of(path: Path, block_size: int) -> Iterator[ClientRequest]:
    """Return the requests of all files of a recording; a file that was cut off is logged.

    The length of an answer is the output reported, in blocks, until the reservation was freed; else
    the expected output; else 1. The content of answers is unknown, so a turn finds an earlier one
    only as far as its own prompt repeats it.

    Raises:
        BadRecording: it cannot be read.
        ValueError: its blocks have another size.
    """
    return requests_in(_whole(files_of(path)), block_size)


def _whole(files: Sequence[Path]) -> Iterator[tuple[RecordedFile, Item]]:
    recorded_files: list[RecordedFile] = []
    for played in play(files, recorded_files):
        yield played.recorded_file, played.item
    for path, recorded_file in zip(files, recorded_files, strict=True):
        if not recorded_file.is_ended:
            _log.warning("%s has no end: killed, cut off, or still recording", path)


def requests_in(
    items: Iterable[tuple[RecordedFile, Item]], block_size: int
) -> Iterator[ClientRequest]:
    """Return the requests of items, which are given with their files, by arrival."""
    requests: list[ClientRequest] = []
    waits: dict[str, ClientRequest] = {}  # reservations that have not ended
    for recorded_file, item in items:
        if isinstance(item, ReservationStep) and item.what in _ENDS:
            ended = waits.pop(item.reservation_id, None)
            if ended is not None and item.amount:
                ended.osl = item.amount * block_size
        elif isinstance(item, Decided):
            fleet = recorded_file.fleet(item.scope)
            if fleet.block_size != block_size:
                raise ValueError(f"blocks of this recording have {fleet.block_size} tokens")
            one = _request(item, fleet.scope.tenant_id)
            requests.append(one)
            name = item.reservation_id
            if name is not None:
                waits[
                    name if item.pair is None or item.pair.couple is None else leg_ids(name)[1]
                ] = one
    requests.sort(key=lambda one: one.arrival)
    start = requests[0].arrival if requests else 0.0
    for number, one in enumerate(requests, 1):
        one.number, one.arrival = number, one.arrival - start
        yield one


def _request(item: Decided, tenant: str) -> ClientRequest:
    asked = item.asked
    expected = None if asked is None else asked.expected_output_tokens
    return ClientRequest(
        number=0,
        arrival=item.at if item.since < 0.0 else item.since,
        isl=item.prompt.isl_tokens,
        osl=expected or 1,
        blocks=numbers_in(sequence_hashes(hashes_of(item.prompt))),
        tenant=tenant,
        session="" if asked is None else asked.session_id or "",
        slo_class="" if asked is None else asked.slo_class or "",
        slo_ttft_s=None if asked is None or asked.slo_ttft_ms is None else asked.slo_ttft_ms / 1e3,
        expected_osl=expected,
    )
