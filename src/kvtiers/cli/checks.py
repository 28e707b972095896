"""What commands look at first: minutes of work must not end in what was clear at once."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from kvtiers.errors import ConfigError


def flag_of(name: str) -> str:
    """The option of a command's parameter."""
    return "--" + name.replace("_", "-")


def check_numbers(options: Mapping[str, object]) -> None:
    """`ConfigError` for an option that is nan: no limit would catch it."""
    for name, value in options.items():
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"{flag_of(name)} is nan; give a number")


def check_sizes(**sizes: float | None) -> None:
    """`ConfigError` for a size that is negative or infinite; None is one that was not given."""
    for name, value in sizes.items():
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(
                f"{flag_of(name)} is {value:g}; it must be a finite number, 0 or more"
            )


def check_positive(**numbers: float | None) -> None:
    """`ConfigError` for a number that is not above 0 and finite; None is one not given."""
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{flag_of(name)} is {value:g}; it must be a finite number above 0")


def check_whole(at_least: int, **numbers: int | None) -> None:
    """`ConfigError` for a whole number below `at_least`; None is one that was not given."""
    for name, value in numbers.items():
        if value is not None and value < at_least:
            raise ConfigError(
                f"{flag_of(name)} is {value}; it must be a whole number, {at_least} or more"
            )


def check_output(path: Path | None, flag: str, *, not_over: Path | None = None) -> None:
    """`ConfigError` for a file that could not be written in the end; nothing is written yet.

    Nor may it be the file that is read, `not_over`.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} {path} is a directory; name a file")
    if not_over is not None and path.exists() and not_over.exists() and path.samefile(not_over):
        raise ConfigError(f"{flag} {path} is the trace that is read; name another file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no directory {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written (permissions)")
