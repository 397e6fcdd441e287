"""A recording as a file: frames behind a line that says what it is. Knows bytes, not what is in them.

    shoal scheduler recording 1\\n
    [length: u32][crc32: u32][content] ...

Appending never waits for the disk: a thread writes what has been collected. A frame that was cut off by the end of the
process, or of the machine, is noticed by whoever reads.
"""

import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from struct import Struct
from threading import Thread
from typing import BinaryIO, Final

from shared.errors import OperatorError

log = logging.getLogger(__name__)

FORMAT: Final = 1
_FIRST_WORDS: Final = b"shoal scheduler recording "
_FIRST_LINE: Final = _FIRST_WORDS + b"%d\n" % FORMAT
_FRAME: Final = Struct("<II")

_CHUNK_BYTES: Final = 256 << 10
_MAX_BACKLOG_BYTES: Final = 64 << 20
"""What may wait for a disk that is slow, before the recording ends."""
_CLOSE_TIMEOUT_S: Final = 5.0


class UnreadableRecording(OperatorError):
    """A file that cannot be replayed; says why."""


class DamagedRecording(Exception):
    """A frame that is not as it was written. `is_last`: nothing follows, so it may have been cut while written."""

    def __init__(self, offset: int, *, is_last: bool) -> None:
        super().__init__(f"damaged at byte {offset}")
        self.offset = offset
        self.is_last = is_last


class FrameWriter:
    """Appends frames to a new file, which only its owner can read. Call it from one thread."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises OSError if the file cannot be made, or is there already."""
        self.path = path
        self.num_bytes = len(_FIRST_LINE)
        """Of the file, once everything has been written."""
        self.failure: str | None = None
        """Why nothing is written any more."""
        self._max_bytes = max_bytes
        self._pending = bytearray(_FIRST_LINE)
        self._chunks: SimpleQueue[bytes | None] = SimpleQueue()
        self._num_written = 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._thread = Thread(target=self._write, args=(descriptor,), name="recording", daemon=True)
        self._thread.start()

    def has_room(self, num_bytes: int) -> bool:
        """Whether a frame with so much content stays within the file's limit."""
        return self.num_bytes + _FRAME.size + num_bytes <= self._max_bytes

    def append(self, content: bytes) -> None:
        """Add a frame, which is written soon after the next `flush`; nothing after a failure."""
        if self.failure is not None:
            return
        self._pending += _FRAME.pack(len(content), zlib.crc32(content))
        self._pending += content
        self.num_bytes += _FRAME.size + len(content)
        if len(self._pending) >= _CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Have everything so far written, without waiting for it."""
        if not self._pending or self.failure is not None:
            return
        if self.num_bytes - self._num_written > _MAX_BACKLOG_BYTES:
            self.failure = "the disk is too slow"
            return
        self._chunks.put(bytes(self._pending))
        self._pending.clear()

    def close(self) -> None:
        """Write everything and close the file, within a few seconds."""
        self.flush()
        self._chunks.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _write(self, descriptor: int) -> None:
        """What the thread does."""
        with open(descriptor, "wb", buffering=0) as file:
            while (chunk := self._chunks.get()) is not None:
                if self.failure is not None:
                    continue
                try:
                    _write_all(file, chunk)
                except OSError as error:
                    self.failure = str(error)
                self._num_written += len(chunk)


def _write_all(file: BinaryIO, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) :]


def read_frames(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The content of each frame. Raises UnreadableRecording if the file `name` is none that this version reads, and
    DamagedRecording, after all frames before it, at one that is not whole."""
    first_line = file.readline(len(_FIRST_LINE) + 20)
    if not first_line.startswith(_FIRST_WORDS):
        raise UnreadableRecording(f"{name} is not a scheduler's recording")
    if first_line != _FIRST_LINE:
        theirs = first_line.removeprefix(_FIRST_WORDS).strip().decode(errors="replace")
        raise UnreadableRecording(
            f"{name} has format {theirs}, and this version of Shoal reads format {FORMAT}: "
            f"replay it with the version that recorded it"
        )
    size = os.fstat(file.fileno()).st_size
    offset = len(first_line)
    while head := file.read(_FRAME.size):
        if len(head) < _FRAME.size:
            raise DamagedRecording(offset, is_last=True)
        length, checksum = _FRAME.unpack(head)
        end = offset + _FRAME.size + length
        content = file.read(length) if end <= size else b""
        if end > size or zlib.crc32(content) != checksum or not length:
            raise DamagedRecording(offset, is_last=end >= size)
        yield content
        offset = end
