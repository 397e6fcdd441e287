"""The records of a file, one after the other, and how the file ends."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from services.scheduler.recording.file import DamagedRecording, UnreadableRecording, read_frames
from services.scheduler.recording.records import EndOfRecording, Header, Record
from shared.codec import Decoder
from shared.errors import MessageError


class RecordingReader:
    """A recording, open for reading. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raises UnreadableRecording if there is no recording that this version can read."""
        self.ending = "the process ended without closing the recording, or still runs"
        """How the recording ends, once all records were read."""
        self._name = str(path)
        self._decoder: Decoder[Record | EndOfRecording] = Decoder(Record | EndOfRecording)
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UnreadableRecording(f"{path}: {error.strerror}") from error
        try:
            self._frames = read_frames(self._file, self._name)
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def records(self) -> Iterator[Record]:
        """The records in order. Raises UnreadableRecording at one that is damaged, unless it is the last: that was cut
        off while it was written."""
        number = 0
        while True:
            number += 1
            try:
                frame = next(self._frames, None)
            except DamagedRecording as error:
                if not error.is_last:
                    raise UnreadableRecording(
                        f"{self._name} is damaged at byte {error.offset}, in record {number}; "
                        f"--until {number} plays what is before it"
                    ) from error
                self.ending = f"record {number} is cut off: the process or the machine ended while it was written"
                return
            if frame is None:
                return
            try:
                record = self._decoder.decode(frame)
            except MessageError as error:
                raise UnreadableRecording(f"{self._name}: record {number} cannot be read: {error}") from error
            if isinstance(record, EndOfRecording):
                self.ending = record.reason
                return
            yield record

    def _read_header(self) -> Header:
        try:
            frame = next(self._frames, None)
            if frame is None:
                raise UnreadableRecording(f"{self._name} has no records")
            return Decoder[Header](Header).decode(frame)
        except (DamagedRecording, MessageError) as error:
            raise UnreadableRecording(f"{self._name}: its beginning cannot be read: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
