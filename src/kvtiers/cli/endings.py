"""How a command ends when it does not simply end: interrupted, or with nowhere to write to.

Owns the exit statuses of both (130, 1), and that a file is written whole or left as it was. What
is lost is said on stderr in one line.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from kvtiers.cli import EXIT_INTERRUPTED

EXIT_FAILURE = 1


def ends_in_words(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which says in a line that it was interrupted, or that stdout is full."""

    @functools.wraps(command)
    def called(**given: object) -> None:
        try:
            command(**given)
        except KeyboardInterrupt:
            end_interrupted("nothing was written")
        except OSError as error:
            if error.errno != errno.ENOSPC or error.filename is not None:
                raise
            # what is buffered would be tried again, and reported again, at the very end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            end_failed("the answer could not be written: no space left where stdout goes")

    return called


def end_interrupted(lost: str) -> NoReturn:
    """End the command as its user's Ctrl-C asked, saying what that cost."""
    typer.echo(f"\nkvtiers: interrupted; {lost}", err=True)
    raise typer.Exit(EXIT_INTERRUPTED)


def end_failed(why: str) -> NoReturn:
    """End the command as one that was called rightly and failed nevertheless."""
    typer.echo(f"kvtiers: {why}", err=True)
    raise typer.Exit(EXIT_FAILURE)


def write_output(path: Path, text: str, flag: str, *, rest: str) -> None:
    """The file holds the text; or it is as before, and the command ends with that and `rest`."""
    try:
        with replacing(path) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        end_failed(f"{flag} {path} could not be written ({error.strerror or error}); {rest}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of `path` at the end; after an exception it is gone.

    Its name ends as that of `path`. What is no plain file (a pipe, a device), or lies where no
    second file may be made, is written in place.
    """
    target = Path(os.path.realpath(path))
    if path.exists() and not (path.is_file() and os.access(target.parent, os.W_OK)):
        yield path
        return
    beside = target.with_name(f".{os.getpid()}.unfinished.{target.name}")
    try:
        yield beside
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
