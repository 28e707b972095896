"""What commands that replay in virtual time let their user say about the server's own settings.

The options are those of `kvtiers serve`, by the same names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from kvtiers.cli.checks import flag_of
from kvtiers.planner.serving_settings import KnownSettings, default_words
from kvtiers.types import PrefetchPolicy

_PANEL = "How it serves"


def _option(name: str, meaning: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(
        help=f"{meaning}; {default_words(name)}.", rich_help_panel=_PANEL
    )
    return info


RunningOption = Annotated[
    int | None, _option("max_running_requests", "Requests in one batch, as of kvtiers serve")
]
BatchTokensOption = Annotated[
    int | None, _option("max_batch_tokens", "Positions computed per step, as of kvtiers serve")
]
ThresholdOption = Annotated[
    int | None,
    _option("prefetch_threshold_tokens", "Fewer tokens than this are not asked for in storage"),
]
PrefetchPolicyOption = Annotated[
    PrefetchPolicy | None, _option("prefetch_policy", "How long an admission waits for storage")
]


@dataclass(frozen=True, slots=True)
class ServingFlags:
    """Settings of the server that is replayed; None: the machine's."""

    max_running_requests: RunningOption = None
    max_batch_tokens: BatchTokensOption = None
    prefetch_threshold_tokens: ThresholdOption = None
    prefetch_policy: PrefetchPolicyOption = None

    @property
    def given(self) -> list[str]:
        """The options that were given, as they are written."""
        return [flag_of(name) for name, value in asdict(self).items() if value is not None]

    def known(self) -> KnownSettings:
        """As the planner takes them; `ConfigError` for one that no server has."""
        return KnownSettings(**asdict(self))
