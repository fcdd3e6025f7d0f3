"""Workers from a JSON file that another program writes, followed as it changes.

The file is polled, not watched: that works on every file system and for every way of replacing it,
including a ConfigMap's symlinks. A file that is unreadable or has any invalid worker changes
nothing; an unknown member of a worker is ignored, and named in the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Final

import msgspec
from typing_extensions import override

from indexer.plain_file import open_plain
from select_service.edge.discovery.source import DiscoverySource, SourceFailed, poll
from select_service.settings import Settings
from select_service.types import WorkerSpec

_log = logging.getLogger("select_service")

BYTES_MAX: Final = Settings().workers_file_bytes_max
"""Default limit on the size of the file."""


class _Document(msgspec.Struct):
    workers: list[WorkerSpec]


class _Names(msgspec.Struct):
    workers: list[dict[str, msgspec.Raw]]


_decode: Final = msgspec.json.Decoder(list[WorkerSpec] | _Document).decode
_decode_names: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]] | _Names).decode
_KNOWN: Final = frozenset(WorkerSpec.__struct_encode_fields__)
_NAMED: Final = 5
_Signature = tuple[int, int, int]


class WorkersFile(DiscoverySource[dict[int, WorkerSpec]]):
    """One file: a list of bodies of POST /workers, or `{"workers": [...]}`."""

    def __init__(self, path: str, poll_s: float, *, bytes_max: int = BYTES_MAX) -> None:
        super().__init__("file", poll_s)
        self._bytes_max = bytes_max
        self._path = Path(path)
        self._poll_s = poll_s
        self._seen: _Signature | None = None
        self._is_valid = False  # what was seen
        self._unknown: list[str] = []

    @override
    async def run(self) -> None:
        await poll(self, self.look, self._poll_s)

    async def look(self) -> None:
        """Read the file if it has changed since last time.

        Raises:
            SourceFailed: it is unreadable or invalid; an invalid file is not read again until it
                changes.
        """
        signature, workers = await asyncio.to_thread(self._read)
        if workers is not None:
            self.publish(workers)
        self._seen = signature
        if self._is_valid:
            self.is_good()

    def _read(self) -> tuple[_Signature, dict[int, WorkerSpec] | None]:
        try:
            with open_plain(self._path) as file:
                about = os.fstat(file.fileno())  # not of the path, which may have changed
                signature = (about.st_mtime_ns, about.st_size, about.st_ino)
                if signature == self._seen:
                    return signature, None
                text = file.read(self._bytes_max + 1)
        except OSError as error:
            self._seen = None
            raise SourceFailed("unreadable", f"{self._path}: {error.strerror}") from None
        self._seen, self._is_valid = signature, False
        workers = parse_workers(text, self._bytes_max)
        self._log_unknown(unknown_members(text))
        self._is_valid = True
        return signature, workers

    def _log_unknown(self, unknown: list[str]) -> None:
        """Log the members that are not read, which may be misspelled; once while they stay."""
        before, self._unknown = self._unknown, unknown
        if unknown and unknown != before:
            names = ", ".join(map(repr, unknown[:_NAMED]))
            _log.warning("%s: unknown members of workers are ignored: %s", self._path, names)


def unknown_members(text: bytes) -> list[str]:
    """Return the members of workers that no worker has, from contents that `parse_workers` took.

    Raises:
        SourceFailed: the name of one is no text.
    """
    try:
        document = _decode_names(text)
    except (msgspec.DecodeError, ValueError) as error:
        raise SourceFailed("malformed", str(error)) from None
    specs = document.workers if isinstance(document, _Names) else document
    return sorted({name for spec in specs for name in spec} - _KNOWN)


def parse_workers(text: bytes, bytes_max: int = BYTES_MAX) -> dict[int, WorkerSpec]:
    """Parse the contents of a file.

    Raises:
        SourceFailed: it is not a list of workers, or has a worker_id twice.
    """
    if len(text) > bytes_max:
        why = f"longer than {bytes_max} bytes (--workers-file-bytes-max)"
        raise SourceFailed("too_large", why)
    try:
        document = _decode(text)
    except (msgspec.DecodeError, ValueError) as error:
        raise SourceFailed("malformed", str(error)) from None
    specs = document.workers if isinstance(document, _Document) else document
    workers: dict[int, WorkerSpec] = {}
    for spec in specs:
        if workers.setdefault(spec.worker_id, spec) is not spec:
            raise SourceFailed("malformed", f"worker_id {spec.worker_id} comes twice")
    return workers
