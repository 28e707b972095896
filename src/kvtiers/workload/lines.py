"""Numbered lines of a text file, plain or compressed, and what to do with one that is bad.

Owns opening and decompressing (gzip, zstd: told by the first bytes, not by the name) and the
line-level faults: binary content, over-long lines, a file that ends too early. Must not know what
a line means.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from kvtiers.errors import ConfigError, TraceError
from kvtiers.workload.request import TraceProblem

LINE_BYTES_MAX = 64 << 20
"""Longer than any prompt's record; a binary file without line ends must not fill the memory."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class OnError(StrEnum):
    """What a reader does with a record it cannot use."""

    FAIL = "fail"
    SKIP = "skip"  # count it, report it, go on


class Line(NamedTuple):
    """Line `number` (from 1) of a file: its text, or the problem that kept it from being text."""

    number: int
    text: str
    problem: TraceProblem | None = None
    message: str = ""
    ended: bool = True
    """False: the file's last line, without a line end."""


def numbered_lines(path: Path) -> Iterator[Line]:
    """Every line of a file in order. A fault that ends the stream is the last line yielded."""
    with closing(_open(path)) as stream:
        number = 0
        while True:
            number += 1
            try:
                raw = stream.readline(LINE_BYTES_MAX)
            except (EOFError, OSError, zlib.error, _zstd_error()) as error:
                yield Line(number, "", TraceProblem.TRUNCATED, f"cannot decompress: {error}")
                return
            if not raw:
                return
            if len(raw) == LINE_BYTES_MAX and not raw.endswith(b"\n"):
                message = f"longer than {LINE_BYTES_MAX >> 20} MiB; is this a text file?"
                yield Line(number, "", TraceProblem.LINE_TOO_LONG, message)
                return
            try:
                # some editors begin a file with a byte order mark
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                message = f"not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x})"
                if number == 1 and raw.startswith(_UTF16):
                    message = "is UTF-16 text; convert it to UTF-8 (iconv -f utf-16 -t utf-8)"
                yield Line(number, "", TraceProblem.NOT_TEXT, message)
                continue
            if "\x00" in text:
                yield Line(number, "", TraceProblem.NOT_TEXT, "holds NUL bytes; is it binary?")
                continue
            yield Line(number, text, ended=raw.endswith(b"\n"))


def open_for_writing(path: Path) -> IO[bytes]:
    """A byte stream to write a trace to; `.gz` and `.zst` names are compressed."""
    if path.suffix == ".gz":
        return _GzipWriter(path)
    if path.suffix in (".zst", ".zstd"):
        zstandard = _zstandard(path)
        stream: IO[bytes] = zstandard.open(path, "wb")
        return stream
    return path.open("wb")


def _open(path: Path) -> IO[bytes]:
    try:
        with path.open("rb") as probe:
            magic = probe.read(4)
        if magic.startswith(_GZIP):
            # unbuffered on top: what was decompressed before a fault must reach the reader
            return cast(IO[bytes], gzip.open(path, "rb"))
        if magic == _ZSTD:
            return io.BufferedReader(_ZstdStream(path, _zstandard(path)), 1 << 20)
        return path.open("rb", buffering=1 << 20)
    except OSError as error:
        raise TraceError(f"{path}: cannot be opened: {error.strerror or error}") from error


class _GzipWriter(io.BufferedWriter):
    """A buffer above a gzip file; flushing it brings all that was written into the file.

    The file holds neither its name nor a time: the same requests give the same file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        super().__init__(gzip.GzipFile("", "wb", compresslevel=6, fileobj=self._file, mtime=0))

    def flush(self) -> None:
        super().flush()
        if not self.raw.closed:
            self.raw.flush()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._file.close()


class _ZstdStream(io.RawIOBase):
    """What a zstd file holds, frame after frame.

    Unlike the package's own reader it raises `EOFError` for a file that ends inside a frame: half a
    trace must not look like a whole one.
    """

    def __init__(self, path: Path, zstandard: Any) -> None:
        self._file = path.open("rb")
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new_frame()
        self._begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = (self._frame.unused_data if self._frame.eof else b"") or self._file.read(1 << 18)
            if self._frame.eof:
                self._frame, self._begun = self._new_frame(), False
            if not data:
                if self._begun:
                    raise EOFError("the file ends inside a compressed frame")
                return 0
            self._begun = True
            self._ready = memoryview(self._frame.decompress(data))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _zstandard(path: Path):  # type: ignore[no-untyped-def]
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"{path} is compressed with zstd, which needs the package zstandard; "
            "install it with: pip install 'kvtiers[plan]'"
        ) from None
    return zstandard


def _zstd_error() -> type[Exception]:
    try:
        from zstandard import ZstdError
    except ImportError:
        return EOFError
    return ZstdError
