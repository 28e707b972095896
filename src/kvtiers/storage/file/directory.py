"""The directory of a `file` store: who owns it, and what lies in it.

Owns the lock (one writer per directory), the permissions and the names of the files. Knows nothing
of pages.

    LOCK                   locked (flock) by the process that writes here, and its process id
    segment-00000001.kv    pages
    segment-00000002.tmp   a segment whose creation was cut short; removed by the next owner
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from kvtiers.errors import StorageError, StorageLocked

DIRECTORY_OVERHEAD_BYTES = 2 * 4096
"""The directory itself and its lock file."""

_LOCK = "LOCK"

_LOCK_WAIT_SECONDS = 0.5
"""Who looks for an owner (`owner_process`) holds the lock for a moment."""


class StoreDirectory:
    """A locked store directory; the lock is held until `release`, or until the process dies."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd: int | None = lock_fd

    @classmethod
    def acquire(cls, path: Path) -> StoreDirectory:
        """Own `path`, which is created where it does not exist, with mode 0700.

        Raises `StorageLocked` when another process (or another store of this one) owns it, and
        `StorageError` when it cannot be used or holds files that are not a store's.
        """
        try:
            is_new = not path.exists()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_new:
                with contextlib.suppress(OSError):  # a parent that may not be read
                    sync_directory(path.parent)
            names = sorted(name for name in os.listdir(path) if name != "lost+found")
            if names and _LOCK not in names:
                raise StorageError(
                    f"{path} is not empty and not a kvtiers store (it has no {_LOCK} file, but "
                    f"{names[0]!r}); name an empty or a new directory"
                )
            path.chmod(0o700)
            lock_fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"{path} cannot be used as a store: {error}") from error
        try:
            _lock(path, lock_fd)
        except BaseException:
            os.close(lock_fd)
            raise
        with contextlib.suppress(OSError):  # on a full disk the lock holds without the name
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        directory = cls(path, lock_fd)
        for draft in path.glob("segment-*.tmp"):
            draft.unlink(missing_ok=True)
        return directory

    def release(self) -> None:
        if self._lock_fd is not None:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)  # a forked child may have the file open, too
            os.close(self._lock_fd)
            self._lock_fd = None

    def check_ours(self) -> None:
        """Raise `OSError` when the directory was deleted underneath, or made anew by another owner.

        Its files must not be touched then: they bear the same names.
        """
        with contextlib.suppress(OSError):
            if self._lock_fd is not None and os.path.samestat(
                os.fstat(self._lock_fd), os.stat(self.path / _LOCK)
            ):
                return
        raise OSError(errno.ESTALE, "the directory was deleted underneath", str(self.path))

    def segment_path(self, number: int) -> Path:
        return self.path / f"segment-{number:08d}.kv"


def _lock(path: Path, lock_fd: int) -> None:
    """Raises `StorageLocked` when somebody else has the lock."""
    give_up_at = time.monotonic() + _LOCK_WAIT_SECONDS
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() < give_up_at:
                time.sleep(0.01)
                continue
            owner = os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StorageLocked(
                f"{path} is in use by process {owner}; a store has one writer at a time: stop that "
                "process or give this one a directory of its own"
            ) from error
        except OSError as error:
            raise StorageError(
                f"{path} cannot be locked ({error}); a store needs a file system with flock"
            ) from error


def sync_directory(path: Path) -> None:
    """What was created in the directory, or renamed, is there after a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def segment_files(path: Path) -> dict[int, Path]:
    """Segment files of a store directory by number, in order; needs no lock."""
    found = {}
    for file in path.glob("segment-*.kv"):
        digits = file.stem.removeprefix("segment-")
        if digits.isdigit():
            found[int(digits)] = file
    return dict(sorted(found.items()))


def owner_process(path: Path) -> int | None:
    """The process that owns the directory now, or None."""
    try:
        fd = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        digits = os.pread(fd, 32, 0).decode(errors="replace").strip()
        return int(digits) if digits.isdigit() else 0
    else:
        return None
    finally:
        os.close(fd)
