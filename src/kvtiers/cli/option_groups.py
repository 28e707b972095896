"""Options that several commands take, declared once: a dataclass as a parameter of a command.

    @with_option_groups
    def curve(trace: TraceArgument, *, reading: TraceFlags) -> None: ...

has the options that the fields of `TraceFlags` declare, in the place of `reading`, which gets them
as one object.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from kvtiers.cli.checks import check_numbers


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each dataclass among its parameters replaced by the dataclass's fields.

    Raises `TypeError` where a field has the name of another parameter: one would hide the other.
    """
    groups: dict[str, type[Any]] = {}
    parameters: dict[str, inspect.Parameter] = {}

    def add(name: str, annotation: Any, default: Any) -> None:
        if name in parameters:
            raise TypeError(f"{command.__name__} has two parameters '{name}'")
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )

    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if not (isinstance(group, type) and is_dataclass(group)):
            add(parameter.name, group, parameter.default)
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            add(field.name, hints[field.name], field.default)

    @functools.wraps(command)
    def called(**given: Any) -> None:
        check_numbers(given)
        for name, group in groups.items():
            values = {field.name: given.pop(field.name) for field in fields(group)}
            given[name] = group(**values)
        command(**given)

    called.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    called.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    return called
