"""How the server that is replayed batches and asks storage, under the names of `kvtiers serve`.

Owns the one table of defaults, what is right for which kind of machine, and whose word counts:

    an option  >  what the calibrated server says of itself  >  the default for the machine

Each value keeps where it is from (`Origin`), since a plan for other values than the server's own
promises what that server will not do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from kvtiers.errors import ConfigError
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.types import PrefetchPolicy

REPEAT_MAX = 64
"""Decode steps at a time, as far as nothing else happens meanwhile."""

_LEAST = {"max_running_requests": 1, "max_batch_tokens": 1, "prefetch_threshold_tokens": 0}


class Origin(StrEnum):
    """Where a value is from."""

    OPTION = "option"
    CALIBRATION = "calibration"  # what the server that was measured says of itself
    ACCELERATOR_DEFAULT = "default_for_a_data_centre_gpu"
    SERVE_DEFAULT = "default_of_kvtiers_serve"


_SOURCES = {
    Origin.OPTION: "as the options say",
    Origin.CALIBRATION: "as the calibrated server says",
    Origin.ACCELERATOR_DEFAULT: "defaults for a data-centre GPU",
    Origin.SERVE_DEFAULT: "defaults of kvtiers serve",
}


@dataclass(frozen=True, slots=True)
class KnownSettings:
    """Those of the settings that somebody has named; None: not named.

    Raises `ConfigError` for a value that no server has.
    """

    max_running_requests: int | None = None
    max_batch_tokens: int | None = None
    prefetch_threshold_tokens: int | None = None
    prefetch_policy: PrefetchPolicy | None = None

    def __post_init__(self) -> None:
        problems = []
        for name, least in _LEAST.items():
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value >= least):
                problems.append(
                    f"{_flag(name)} is {value}; it must be a whole number, {least} or more"
                )
        if self.prefetch_policy is not None:
            try:
                object.__setattr__(self, "prefetch_policy", PrefetchPolicy(self.prefetch_policy))
            except ValueError:
                problems.append(
                    f"{_flag('prefetch_policy')} is '{self.prefetch_policy}'; "
                    f"known: {', '.join(PrefetchPolicy)}"
                )
        if problems:
            raise ConfigError("; ".join(problems))

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> KnownSettings:
        """From plain JSON; raises `ConfigError`, also for names that are none of the settings."""
        unknown = [name for name in content if name not in NAMES]
        if unknown:
            raise ConfigError(
                f"'{unknown[0]}' is none of the settings of a server; known: {', '.join(NAMES)}"
            )
        return cls(**content)

    def to_dict(self) -> dict[str, int | str]:
        """Those that are named, as plain JSON."""
        return {name: _plain(v) for name in NAMES if (v := getattr(self, name)) is not None}


NAMES = tuple(each.name for each in fields(KnownSettings))
NOTHING_KNOWN = KnownSettings()


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """The settings of one server, all of them, and where each is from.

    Raises `ConfigError` where decoding alone would fill every step.
    """

    max_running_requests: int
    max_batch_tokens: int
    """Positions in a step, and prompt positions among them."""
    prefetch_threshold_tokens: int
    prefetch_policy: PrefetchPolicy
    origins: Mapping[str, Origin] = field(compare=False)

    def __post_init__(self) -> None:
        if self.max_running_requests >= self.max_batch_tokens:
            running, batch = (
                f"{_flag(name)} is {getattr(self, name)} ({_SOURCES[self.origins[name]]})"
                for name in ("max_running_requests", "max_batch_tokens")
            )
            raise ConfigError(
                f"{running} and {batch}; decoding alone would fill every step: give "
                "--max-batch-tokens above --max-running-requests"
            )

    def scheduler(self) -> SchedulerConfig:
        """The scheduler of that server, for a replay."""
        return SchedulerConfig(
            max_running=self.max_running_requests,
            max_step_tokens=self.max_batch_tokens,
            max_prefill_tokens=self.max_batch_tokens,
            repeat_max=REPEAT_MAX,
        )

    @property
    def text(self) -> str:
        """All of them in one line, for people, with where they are from."""
        worded = {
            "max_running_requests": f"{self.max_running_requests:,} running requests",
            "max_batch_tokens": f"{self.max_batch_tokens:,} tokens a step",
            "prefetch_threshold_tokens": f"prefetch from {self.prefetch_threshold_tokens:,} tokens",
            "prefetch_policy": f"prefetch policy {self.prefetch_policy}",
        }
        by_source: dict[str, list[str]] = {}
        for name, words in worded.items():
            by_source.setdefault(_SOURCES[self.origins[name]], []).append(words)
        return "; ".join(f"{', '.join(all_)} ({source})" for source, all_ in by_source.items())

    def to_dict(self) -> dict[str, dict[str, int | str]]:
        """As plain JSON: of each the value, and where it is `from`."""
        return {
            name: {"value": _plain(getattr(self, name)), "from": self.origins[name].value}
            for name in NAMES
        }


DEFAULTS: Mapping[Origin, Mapping[str, Any]] = {
    # A data-centre GPU computes thousands of tokens in the time of reading its weights once, and
    # its memory holds the KV of hundreds of requests: this is how engines serve there. A fetch
    # from storage takes as long as computing hundreds of tokens.
    Origin.ACCELERATOR_DEFAULT: {
        "max_running_requests": 256,
        "max_batch_tokens": 8192,
        "prefetch_threshold_tokens": 256,
        "prefetch_policy": PrefetchPolicy.TIMEOUT,
    },
    # What `kvtiers serve` has where no option says otherwise (kept equal by a test). It computes
    # on a CPU, a thousand tokens in seconds: a longer step would keep all others waiting for one
    # prompt, and what storage finds is worth a fetch far sooner.
    Origin.SERVE_DEFAULT: {
        "max_running_requests": 64,
        "max_batch_tokens": 1024,
        "prefetch_threshold_tokens": 64,
        "prefetch_policy": PrefetchPolicy.TIMEOUT,
    },
}
"""By kind of machine: of the table (a GPU), and calibrated (on a live `kvtiers serve`)."""


def settings_for(
    *,
    calibrated: bool = False,
    options: KnownSettings = NOTHING_KNOWN,
    server: KnownSettings = NOTHING_KNOWN,
) -> ServingSettings:
    """What a replay on a machine uses: options first, then what its server said, then defaults."""
    kind = Origin.SERVE_DEFAULT if calibrated else Origin.ACCELERATOR_DEFAULT
    values = dict(DEFAULTS[kind])
    origins = dict.fromkeys(NAMES, kind)
    for origin, known in ((Origin.CALIBRATION, server), (Origin.OPTION, options)):
        for name in NAMES:
            if (value := getattr(known, name)) is not None:
                values[name], origins[name] = value, origin
    return ServingSettings(**values, origins=origins)


def default_words(name: str) -> str:
    """The defaults of a setting, for a help text."""
    gpu, serve = (
        _plain(DEFAULTS[kind][name]) for kind in (Origin.ACCELERATOR_DEFAULT, Origin.SERVE_DEFAULT)
    )
    if gpu == serve:
        return f"default: a calibrated server's own, else {gpu}"
    return f"default: {gpu}; for a calibration, the server's own, else {serve}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain(value: int | str) -> int | str:
    return value.value if isinstance(value, StrEnum) else value
