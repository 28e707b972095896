"""Measuring a live server: what a step costs, and what its links carry.

Owns the experiment and the fit. Must not know HTTP: the server is a `Served`, a few questions.

    prefill    prompts nobody has sent before, of growing length, one token of answer
    decode     answers of some length to cached prompts, at growing context and batch
    copies     what the prompts above had copied down; with `flush`, also what it takes to bring
               prompts back after their tiers were emptied

Times are the server's own (sums of its histograms), so neither the client's machine nor HTTP is in
them: from arrival to first token, and from token to token. Of repeated measurements the median
counts: on a machine that others use too, replays are to predict the usual, not the best.

Prompts are random tokens from a seed that differs per run, so nothing of them is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

import numpy as np

from kvtiers.errors import ConfigError
from kvtiers.planner.machines import NVME, Machine, StepCost
from kvtiers.planner.serving_settings import KnownSettings
from kvtiers.transfer.virtual import Link

DECODE_TOKENS = 16
BATCHES = (1, 2, 8)
DEVICE_SHARE = 0.6
"""Of the device tier, what prompts that decode together may take."""
_REWEIGHTINGS = 20
LINKS = ("device_to_host", "host_to_device", "storage_read", "storage_write")


@dataclass(frozen=True, slots=True)
class Moved:
    """What went over one link: calls, bytes, and the seconds of the copies alone."""

    calls: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def since(self, earlier: Moved) -> Moved:
        return Moved(
            self.calls - earlier.calls, self.bytes - earlier.bytes, self.seconds - earlier.seconds
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all that a server did since its start, as it reports them."""

    first_tokens: float
    first_token_seconds: float
    """From arrivals to first tokens."""
    gaps: float
    gap_seconds: float
    """From each sequence's tokens to their next ones."""
    moved: Mapping[str, Moved]
    """By link; see `LINKS`."""


class Served(Protocol):
    """A live server, as far as a calibration needs it. Every call may raise `ConfigError`."""

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Have prompts of token ids continued at once, each by exactly so many tokens; return
        when all are done."""
        ...

    def settle(self) -> None:
        """Return when no copy is under way."""
        ...

    def totals(self) -> Totals:
        """The sums now."""
        ...

    def flush(self, tier: str) -> None:
        """Empty the `device` or the `host` tier."""
        ...

    @property
    def device_tokens(self) -> int:
        """Capacity of the device tier."""
        ...

    @property
    def link_ceilings(self) -> Mapping[str, float]:
        """Bytes per second by path, as the server probed them at its start."""
        ...

    def settings(self) -> KnownSettings:
        """How it batches and asks storage, as far as it says so."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """One measurement: a step (or the steps of one prefill) and what it computed."""

    tokens: int
    pairs: float
    context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """How far to measure: prompt lengths in tokens, and the vocabulary to draw from.

    `flush` empties the server's device and host tiers to see pages come back; not on a server
    that others use.
    """

    lengths: Sequence[int] = (16, 64, 128, 256, 512, 1024)
    vocab_tokens: int = 1_000
    repeats: int = 3
    seed: int = 0
    flush: bool = False

    def __post_init__(self) -> None:
        if len(set(self.lengths)) < 3 or min(self.lengths) < 2:
            raise ConfigError(
                f"prompt lengths {list(self.lengths)} are too few to tell step, token and "
                "attention apart; give at least three different ones of 2 tokens or more "
                "(--lengths)"
            )

    @property
    def measurements(self) -> int:
        """How often `progress` is called."""
        return len(self.lengths) + 2 * len(BATCHES) + (2 if self.flush else 0)


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that was measured of a server."""

    prefills: list[Observation]
    decodes: list[Observation]
    moved: dict[str, list[Moved]]

    def together(self, other: Observed) -> Observed:
        """What two calibrations of one server saw, e.g. before and after a run."""
        return Observed(
            self.prefills + other.prefills,
            self.decodes + other.decodes,
            {link: self.moved[link] + other.moved[link] for link in LINKS},
        )

    def over(self, other: Observed) -> float:
        """How much longer the same steps took than in another calibration, on average."""
        ours = sum(o.seconds for o in self.prefills + self.decodes)
        return ours / sum(o.seconds for o in other.prefills + other.decodes)


def observe(
    server: Served, experiment: Experiment, progress: Callable[[], None] = lambda: None
) -> Observed:
    """Measure prefills, decode steps and copies; the median of the repeats of each."""
    rng = np.random.default_rng(experiment.seed)
    moved: dict[str, list[Moved]] = {link: [] for link in LINKS}

    def prompt(tokens: int) -> list[int]:
        drawn: list[int] = rng.integers(10, experiment.vocab_tokens, tokens).tolist()
        return drawn

    def ask(prompts: list[list[int]], max_tokens: int) -> tuple[float, float]:
        """Mean seconds to the first token and from token to token; notes what was copied."""
        before = server.totals()
        server.complete(prompts, max_tokens)
        server.settle()
        after = server.totals()
        for link in LINKS:
            here = after.moved[link].since(before.moved[link])
            if here.bytes:
                moved[link].append(here)
        return (
            _mean(
                after.first_token_seconds - before.first_token_seconds,
                after.first_tokens - before.first_tokens,
            ),
            _mean(after.gap_seconds - before.gap_seconds, after.gaps - before.gaps),
        )

    room = server.device_tokens * DEVICE_SHARE
    fitting = [n for n in experiment.lengths if n < room]
    if len(fitting) < 3 or min(fitting) + DECODE_TOKENS > room / max(BATCHES):
        raise ConfigError(
            f"the device tier holds {server.device_tokens} tokens, of which a calibration takes "
            f"{DEVICE_SHARE:.0%}: too few for {max(BATCHES)} of the shortest prompts at once, or "
            f"for three of the lengths {list(experiment.lengths)}; shorten them (--lengths) or "
            "raise the device tier"
        )
    server.complete([prompt(min(experiment.lengths))], 2)  # what is slow only once
    server.settle()
    prefills = []
    for tokens in fitting:
        seconds = median(ask([prompt(tokens)], 1)[0] for _ in range(experiment.repeats))
        prefills.append(Observation(tokens, tokens**2 / 2, 0, seconds))
        progress()

    decodes = []
    for batch in BATCHES:
        longest = int(server.device_tokens * DEVICE_SHARE / batch) - DECODE_TOKENS
        for tokens in (min(fitting), min(max(fitting), longest)):
            prompts = [prompt(tokens) for _ in range(batch)]
            server.complete(prompts, 1)
            seconds = median(ask(prompts, 1 + DECODE_TOKENS)[1] for _ in range(experiment.repeats))
            context = tokens + DECODE_TOKENS // 2
            decodes.append(Observation(batch, batch * context, batch * context, seconds))
            progress()

    for tokens in (min(64, max(fitting)), max(fitting)) if experiment.flush else ():
        for _ in range(experiment.repeats):
            again = [prompt(tokens)]
            ask(again, 1)
            for tiers in (("device",), ("device", "host")):
                for tier in tiers:
                    server.flush(tier)
                ask(again, 1)
        progress()
    return Observed(prefills, decodes, moved)


def fit(prefills: Sequence[Observation], decodes: Sequence[Observation]) -> StepCost:
    """The numbers that explain the observations best, none of them negative.

    From decode: what a step of one position and one of a few cost at least, and per position of
    context. From prefill: step, token and attention. What a step of a few positions costs beyond
    a prefill's fixed part is reading the weights; prefills so short that this hides their work
    say nothing about it, so they are left out one by one as long as that explains all better.
    """
    single, floor, per_context = _least_squares(
        [[o.tokens == 1, o.tokens > 1, o.context_tokens] for o in decodes],
        [o.seconds for o in decodes],
    )

    def cost(usable: Sequence[Observation]) -> StepCost:
        step, per_token, per_pair = _least_squares(
            [[1.0, o.tokens, o.pairs] for o in usable], [o.seconds for o in usable]
        )
        return StepCost(
            step_seconds=min(step, floor),
            weights_seconds=max(0.0, floor - step),
            seconds_per_token=per_token,
            seconds_per_pair=per_pair,
            seconds_per_context=per_context,
            single_seconds=min(single, floor),
        )

    def error(candidate: StepCost) -> float:
        return sum(
            abs(candidate.seconds(o.tokens, o.pairs, o.context_tokens) / o.seconds - 1)
            for o in prefills
        )

    by_length = sorted(prefills, key=lambda o: o.tokens)
    starts = [i for i in range(len(by_length)) if len({o.tokens for o in by_length[i:]}) >= 3]
    return min((cost(by_length[i:]) for i in starts or [0]), key=error)


def fit_link(observed: Sequence[Moved]) -> Link | None:
    """The latency of a call and the bandwidth that explain what moved best; None: nothing did."""
    observed = [m for m in observed if m.bytes > 0 and m.seconds > 0]
    if not observed:
        return None
    rows, seconds = [[m.calls, m.bytes] for m in observed], [m.seconds for m in observed]
    per_call, per_byte = _least_squares(rows, seconds)
    # Least deviations instead of squares: a file's first growth takes a hundred times a write.
    for _ in range(_REWEIGHTINGS):
        predicted = [per_call * calls + per_byte * size for calls, size in rows]
        weights = [
            1 / max(0.01, abs(there / here - 1)) ** 0.5
            for here, there in zip(seconds, predicted, strict=True)
        ]
        per_call, per_byte = _least_squares(rows, seconds, weights)
    if per_byte <= 0:  # latency explains it all, as far as these sizes go
        per_byte = sum(m.seconds for m in observed) / sum(m.bytes for m in observed)
        per_call = 0.0
    return Link(1 / per_byte, per_call)


def calibrate(
    server: Served,
    experiment: Experiment,
    name: str,
    measured: str,
    progress: Callable[[], None] = lambda: None,
) -> Machine:
    """A live server as a machine; `measured` says when and how, for every report."""
    settings = server.settings()
    seen = observe(server, experiment, progress)
    return replace(machine_of(seen, server.link_ceilings, name, measured), settings=settings)


def machine_of(seen: Observed, ceilings: Mapping[str, float], name: str, measured: str) -> Machine:
    """What was observed as a machine.

    A link over which nothing went is as the server's probe says, else as its opposite, else a
    common NVMe drive's.
    """
    found = {link: fit_link(seen.moved[link]) for link in LINKS}
    probed = {link: Link(ceilings[link]) for link in LINKS if link in ceilings}

    def link(name: str, opposite: str, otherwise: Link) -> Link:
        return found[name] or probed.get(name) or found[opposite] or otherwise

    memory = Link(max(ceilings.values(), default=10e9))
    return Machine(
        name=name,
        cost=fit(seen.prefills, seen.decodes),
        device_to_host=link("device_to_host", "host_to_device", memory),
        host_to_device=link("host_to_device", "device_to_host", memory),
        storage_read=link("storage_read", "storage_write", NVME[0]),
        storage_write=link("storage_write", "storage_read", NVME[1]),
        validated=measured,
    )


def _mean(total: float, count: float) -> float:
    return max(1e-6, total / count) if count else 1e-6


def _least_squares(
    rows: Sequence[Sequence[float]],
    values: Sequence[float],
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Least squares without negative coefficients: the most negative one is set to zero, again."""
    matrix, target = np.array(rows, float), np.array(values, float)
    # relative errors count, so that short prompts are explained as well as long ones
    weight = np.array(weights or [1.0] * len(values)) / np.maximum(target, 1e-9)
    scale = np.maximum(matrix.max(axis=0), 1e-300)
    free = list(range(matrix.shape[1]))
    while free:
        part = (matrix[:, free] / scale[free]) * weight[:, None]
        solved = np.linalg.lstsq(part, target * weight, rcond=None)[0]
        if solved.min() >= 0:
            result = np.zeros(matrix.shape[1])
            result[free] = solved / scale[free]
            return [float(v) for v in result]
        del free[int(solved.argmin())]
    return [0.0] * matrix.shape[1]
