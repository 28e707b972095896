"""A dataclass among a command's parameters is the options that its fields declare."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvtiers.cli.option_groups import with_option_groups


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(help="In metres.")] = 2
    flat: Annotated[bool, typer.Option("--flat")] = False


@with_option_groups
def draw(
    name: Annotated[str, typer.Argument()],
    *,
    colour: Annotated[str, typer.Option()] = "red",
    size: Size,
) -> None:
    """Draws."""
    typer.echo(f"{name} {colour} {size}")


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(draw)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output.strip()


def test_the_command_gets_its_group_as_one_object() -> None:
    assert run("box") == f"box red {Size()}"
    assert run("box", "--width", "7", "--flat", "--colour", "blue") == f"box blue {Size(7, True)}"


def test_help_tells_the_fields_as_options_of_the_command() -> None:
    text = run("--help")
    assert "Draws." in text
    assert "--width" in text
    assert "In metres." in text


def test_a_field_that_hides_a_parameter_is_refused() -> None:
    def paint(width: int, *, size: Size) -> None: ...

    with pytest.raises(TypeError, match="two parameters 'width'"):
        with_option_groups(paint)
