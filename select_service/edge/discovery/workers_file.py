"""Workers out of a JSON file that somebody else writes, followed as it changes.

The file is looked at every so often rather than watched: that works on every file system and for
every way of replacing it, a ConfigMap's links included. A file that cannot be read, or says
anything that is no worker, changes nothing.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

import msgspec
from typing_extensions import override

from indexer.edge.plain_file import open_plain
from select_service.config import Settings
from select_service.edge.discovery.source import Source, SourceFailed, poll
from select_service.types import WorkerSpec

BYTES_MAX: Final = Settings().workers_file_bytes_max
"""Of the file, unless told otherwise."""


class _Document(msgspec.Struct):
    workers: list[WorkerSpec]


_decode: Final = msgspec.json.Decoder(list[WorkerSpec] | _Document).decode
_Signature = tuple[int, int, int]


class WorkersFile(Source[dict[int, WorkerSpec]]):
    """One file: a list of bodies of POST /workers, or `{"workers": [...]}`."""

    def __init__(self, path: str, poll_s: float, *, bytes_max: int = BYTES_MAX) -> None:
        super().__init__("file")
        self._bytes_max = bytes_max
        self._path = Path(path)
        self._poll_s = poll_s
        self._seen: _Signature | None = None

    @override
    async def run(self) -> None:
        await poll(self, self.look, self._poll_s)

    async def look(self) -> None:
        """Read the file if it is another one than last time.

        Raises:
            SourceFailed: it cannot be read, or is wrong; a wrong file is not read twice.
        """
        signature, workers = await asyncio.to_thread(self._read)
        if workers is not None:
            self.publish(workers)
        self._seen = signature

    def _read(self) -> tuple[_Signature, dict[int, WorkerSpec] | None]:
        try:
            with open_plain(self._path) as file:
                about = os.fstat(file.fileno())  # of this file: another may be there by now
                signature = (about.st_mtime_ns, about.st_size, about.st_ino)
                if signature == self._seen:
                    return signature, None
                text = file.read(self._bytes_max + 1)
        except OSError as error:
            self._seen = None
            raise SourceFailed("unreadable", f"{self._path}: {error.strerror}") from None
        self._seen = signature
        return signature, parse_workers(text, self._bytes_max)


def parse_workers(text: bytes, bytes_max: int = BYTES_MAX) -> dict[int, WorkerSpec]:
    """Return what a file says.

    Raises:
        SourceFailed: it is no list of workers, or names one twice.
    """
    if len(text) > bytes_max:
        why = f"longer than {bytes_max} bytes (--workers-file-bytes-max)"
        raise SourceFailed("too_large", why)
    try:
        document = _decode(text)
    except (msgspec.DecodeError, ValueError) as error:
        raise SourceFailed("malformed", str(error)) from None
    specs = document.workers if isinstance(document, _Document) else document
    workers = {spec.worker_id: spec for spec in specs}
    if len(workers) != len(specs):
        raise SourceFailed("malformed", "a worker_id comes twice")
    return workers
