"""Takes a data file's size and checksum while it is being written."""

import threading
import zlib
from pathlib import Path
from types import TracebackType

from megascale.checkpoint.manifest import CHUNK_BYTES, FileMark


class ChecksumFollower:
    """Reads a file in a thread while it is being written, so that its checksum is known soon after its last byte.

    It reads what the file really holds, not what was meant to be written. Use it in a ``with`` block.

    Args:
        path: the file, which exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = threading.Condition()
        self._end = 0
        self._is_whole = False
        self._done = 0
        self._crc = 0
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._follow, name="megascale checksum", daemon=True)

    def __enter__(self) -> "ChecksumFollower":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell(self._end, is_whole=True)
        self._thread.join()

    def written(self, end: int) -> None:
        """Say that the file has been written, and flushed, up to byte ``end``."""
        self._tell(end, is_whole=False)

    def mark(self) -> FileMark:
        """Read the rest; return size and checksum of all that was written. Raises the OSError of a failed read."""
        self._tell(self._end, is_whole=True)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return FileMark(self._end, self._crc)

    def _tell(self, end: int, *, is_whole: bool) -> None:
        with self._changed:
            self._end, self._is_whole = end, self._is_whole or is_whole
            self._changed.notify()

    def _follow(self) -> None:
        chunk = memoryview(bytearray(CHUNK_BYTES))
        try:
            with open(self._path, "rb", buffering=0) as stream:
                while True:
                    with self._changed:
                        self._changed.wait_for(lambda: self._end > self._done or self._is_whole)
                        end = self._end
                    if self._done == end:
                        return
                    count = stream.readinto(chunk[: min(len(chunk), end - self._done)])
                    if not count:
                        raise OSError(f"{self._path} ends at byte {self._done}, although {end} were written")
                    self._crc = zlib.crc32(chunk[:count], self._crc)
                    self._done += count
        except OSError as error:
            self._error = error
