"""An append-only file of what a server accepted and answered: a restart after kill -9 loses and repeats nothing.

A record is a JSON header and a body, with a CRC over both. A torn or damaged record ends the file: what follows it was
never answered, because a record is written before the answer that depends on it. `write` survives the death of the
process. A power failure loses what the disk had not got yet: the records of the last `sync` seconds at most.

Called by service.operations (append), service.recovery (read) and service.worker (append).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxrl.errors import ConfigError
from jaxrl.service.files import replace, sync_folder

log = logging.getLogger("jaxrl")
HEAD = struct.Struct("<III")  # CRC-32 of header and body, bytes of the header, bytes of the body
LONGEST = 1 << 30  # bytes of a record, beyond which its head is damaged


class Record(NamedTuple):
    """A record of the journal.

    Attributes:
      header: JSON, with the entry "kind". body: bytes, such as those of a request.
    """

    header: dict
    body: bytes


class Journal:
    """The journal of a folder, which one process at a time may have.

    Args:
      sync: seconds within which the disk has a record; 0 = before `append` returns; None = when the system writes it.

    Attributes:
      path: of the file. bytes: its size.

    Raises ConfigError if another process has it.
    """

    def __init__(self, folder: Path, sync: float | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = folder / "journal", threading.Lock()
        self._held = open(folder / "lock", "w")  # noqa: SIM115 (until close)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"--dir={folder.parent}: another server works in this folder; stop it, or choose another "
                              "--dir") from None
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (until close)
        self.bytes = self.path.stat().st_size
        self.seconds, self._written, self._failure = sync, threading.Event(), None
        sync_folder(folder)
        if sync:
            threading.Thread(target=self._sync_later, name="journal", daemon=True).start()

    def append(self, header: dict, body: bytes = b"") -> None:
        """Writes a record; on return it survives the death of the process. Raises OSError, having written nothing, also
        if the disk did not take earlier records in the background. A file with a damaged end has to be compacted
        before: records behind that end are not read."""
        data = _encoded(header, body)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            left = memoryview(data)
            try:
                while left:
                    left = left[self._file.write(left):]
                if self.seconds == 0:
                    os.fsync(self._file.fileno())
            except OSError:
                self._file.truncate(self.bytes)  # a torn record would hide those behind it
                raise
            self.bytes += len(data)
        self._written.set()

    def sync(self) -> None:
        """Waits until the disk has all records; does nothing if it is left to the system. Raises OSError."""
        if self.seconds is None:
            return
        with self._lock:
            number = os.dup(self._file.fileno())  # `append` and `compact` go on meanwhile
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def _sync_later(self) -> None:
        while True:  # until `close`; `compact` closes one file and opens another
            self._written.wait()
            time.sleep(self.seconds or 0)
            self._written.clear()
            try:
                self.sync()
            except (OSError, ValueError) as e:  # ValueError: it was closed
                self._failure = e if isinstance(e, OSError) else None
                return

    def records(self) -> Iterator[Record]:
        """Yields the records of the file, up to the first damaged one, which is logged."""
        yield from _records(self.path)

    def compact(self, needed: Callable[[Record], Record | None]) -> None:
        """Replaces the file, at once, by one with the records that are needed; a damaged end is dropped.

        needed: record -> what to keep of it: the record, a shorter one, or None = nothing. Raises OSError."""
        with self._lock:
            temporary, before = self.path.with_name("journal.new"), self.bytes
            with open(temporary, "wb") as f:
                for record in _records(self.path):
                    if (kept := needed(record)) is not None:
                        f.write(_encoded(*kept))
                f.flush()
                os.fsync(f.fileno())
            self._file.close()
            replace(temporary, self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (until close)
            self.bytes = self.path.stat().st_size
        if self.bytes < before:
            log.info("journal: %d bytes of %d are still needed", self.bytes, before)

    def close(self) -> None:
        """Closes the file and lets another process have the folder."""
        with self._lock:
            self._file.close()
        self._written.set()
        self._held.close()


def _encoded(header: dict, body: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return HEAD.pack(zlib.crc32(body, zlib.crc32(text)), len(text), len(body)) + text + body


def _records(path: Path) -> Iterator[Record]:
    with open(path, "rb") as f:
        at = 0
        while head := f.read(HEAD.size):
            crc, text, body = HEAD.unpack(head) if len(head) == HEAD.size else (0, LONGEST, 0)
            data = f.read(text + body) if text + body < LONGEST else b""
            if len(data) != text + body or zlib.crc32(data) != crc:
                log.warning("journal: %s ends with a damaged record at byte %d; it was never answered and is dropped",
                            path, at)
                return
            yield Record(json.loads(data[:text]), data[text:])
            at = f.tell()
