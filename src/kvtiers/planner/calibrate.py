"""Measuring a live server: the five numbers of a step, and the ceilings of its links.

Owns the experiment and the fit. Must not know HTTP: the server is a `Served`, a few questions.

    prefill    prompts nobody has sent before, of growing length, one token of answer
    decode     answers of some length less the same with one token, at growing context and batch

Prompts are random tokens from a seed that differs per run, so nothing of them is cached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtiers.errors import ConfigError
from kvtiers.planner.machines import NVME, Machine, StepCost
from kvtiers.transfer.virtual import Link

DECODE_TOKENS = 16
BATCH = 4


class Served(Protocol):
    """A live server, as far as a calibration needs it. Every call may raise `ConfigError`."""

    def complete(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Have a prompt of token ids continued by exactly so many tokens; return when done."""
        ...

    def link_ceilings(self) -> dict[str, float]:
        """Bytes per second by path, as the server probed them at its start."""
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
    """How far to measure: prompt lengths in tokens, and the vocabulary to draw from."""

    lengths: Sequence[int] = (64, 128, 256, 512, 1024)
    vocab_tokens: int = 1_000
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if len(set(self.lengths)) < 3 or min(self.lengths) < 2:
            raise ConfigError(
                f"prompt lengths {list(self.lengths)} are too few to tell step, token and "
                "attention apart; give at least three different ones of 2 tokens or more"
            )


def observe(
    server: Served, experiment: Experiment, clock: Callable[[], float] = time.perf_counter
) -> tuple[list[Observation], list[Observation]]:
    """Measured prefills and measured decode steps; the best of the repeats of each."""
    rng = np.random.default_rng(experiment.seed)

    def prompt(tokens: int) -> list[int]:
        drawn: list[int] = rng.integers(10, experiment.vocab_tokens, tokens).tolist()
        return drawn

    def seconds_of(work: Callable[[], object]) -> float:
        start = clock()
        work()
        return clock() - start

    server.complete(prompt(min(experiment.lengths)), 2)  # what is slow only once
    prefills = []
    for tokens in experiment.lengths:
        best = min(
            seconds_of(lambda n=tokens: server.complete(prompt(n), 1))  # type: ignore[misc]
            for _ in range(experiment.repeats)
        )
        prefills.append(Observation(tokens, tokens**2 / 2, 0, best))

    decodes = []
    for tokens in (min(experiment.lengths), max(experiment.lengths)):
        for batch in (1, BATCH):
            best = min(
                _decode_seconds(server, [prompt(tokens) for _ in range(batch)], seconds_of)
                for _ in range(experiment.repeats)
            )
            context = tokens + DECODE_TOKENS // 2
            decodes.append(Observation(batch, batch * context, batch * context, best))
    return prefills, decodes


def _decode_seconds(
    server: Served,
    prompts: list[list[int]],
    seconds_of: Callable[[Callable[[], object]], float],
) -> float:
    """Seconds of one decode step of these prompts together.

    Each prompt is sent once for one token, so that it is cached, and again for more: prefill and
    transport are in both and cancel out.
    """
    with ThreadPoolExecutor(len(prompts)) as threads:

        def all_for(max_tokens: int) -> None:
            list(threads.map(lambda p: server.complete(p, max_tokens), prompts))

        all_for(1)
        short = seconds_of(lambda: all_for(1))
        long = seconds_of(lambda: all_for(1 + DECODE_TOKENS))
    return max(1e-6, (long - short) / DECODE_TOKENS)


def fit(prefills: Sequence[Observation], decodes: Sequence[Observation]) -> StepCost:
    """The five numbers that explain the observations best, none of them negative.

    From decode at batch 1: what a step costs at least, and per position of context. From prefill:
    step, token and attention. What a decode step costs beyond a prefill's fixed part is reading
    the weights.
    """
    single = [o for o in decodes if o.tokens == 1] or list(decodes)
    floor, per_context = _least_squares(
        [[1.0, o.context_tokens] for o in single], [o.seconds for o in single]
    )
    step, per_token, per_pair = _least_squares(
        [[1.0, o.tokens, o.pairs] for o in prefills], [o.seconds for o in prefills]
    )
    step = min(step, floor)
    return StepCost(
        step_seconds=step,
        weights_seconds=max(0.0, floor - step),
        seconds_per_token=per_token,
        seconds_per_pair=per_pair,
        seconds_per_context=per_context,
    )


def calibrate(server: Served, experiment: Experiment, name: str, measured: str) -> Machine:
    """A live server as a machine; `measured` says when and how, for every report."""
    cost = fit(*observe(server, experiment))
    ceilings = server.link_ceilings()
    memory = max(ceilings.values(), default=10e9)
    return Machine(
        name=name,
        cost=cost,
        device_to_host=Link(ceilings.get("device_to_host", memory)),
        host_to_device=Link(ceilings.get("host_to_device", memory)),
        storage_read=Link(ceilings["storage_read"]) if "storage_read" in ceilings else NVME[0],
        storage_write=Link(ceilings["storage_write"]) if "storage_write" in ceilings else NVME[1],
        validated=measured,
    )


def _least_squares(rows: list[list[float]], values: list[float]) -> list[float]:
    """Least squares without negative coefficients: the most negative one is set to zero, again."""
    matrix, target = np.array(rows, float), np.array(values, float)
    # relative errors count, so that short prompts are explained as well as long ones
    weight = 1 / np.maximum(target, 1e-9)
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
