"""The orders in which waiting requests are admitted.

A policy gives a request a *rank*; the smallest goes first. Ranks do not depend on the present
time: waiting lowers every rank alike, so a queue stays sorted without being touched. No policy can
starve for ever: the lead that a later request may have (a longer prefix, a higher priority) is
bounded, and the later it arrives, the more of that lead is already spent. It can starve for longer
than a client waits: under `priority` a steady stream of requests that is n levels higher is served
first for n times `ageing_seconds`, which is what a priority is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvtiers.errors import UnknownName
from kvtiers.scheduling.config import SchedulerConfig
from kvtiers.scheduling.request import Request


class Policy(Protocol):
    """An order of admission."""

    uses_match: bool
    """Whether the rank depends on the matched length, which changes while a request waits."""

    def rank(self, request: Request, matched_tokens: int) -> float:
        """The smallest rank is admitted first; ties go to the request added first."""
        ...


class Fcfs:
    """First come, first served; a retracted request keeps its place."""

    uses_match = False

    def rank(self, request: Request, matched_tokens: int) -> float:
        return request.arrival


class LongestPrefix:
    """The longest cached prefix first, so that pages are used before they are evicted.

    One second of waiting counts as `ageing_tokens_per_second` tokens of prefix: a request can be
    overtaken only by those that arrive within (longest prompt ÷ rate) seconds after it.
    """

    uses_match = True

    def __init__(self, ageing_tokens_per_second: float) -> None:
        self._rate = ageing_tokens_per_second

    def rank(self, request: Request, matched_tokens: int) -> float:
        return request.arrival * self._rate - matched_tokens


class Priority:
    """The largest priority first; `ageing_seconds` of waiting count as one level."""

    uses_match = False

    def __init__(self, ageing_seconds: float) -> None:
        self._ageing_seconds = ageing_seconds

    def rank(self, request: Request, matched_tokens: int) -> float:
        return request.arrival / self._ageing_seconds - request.priority


_POLICIES: dict[str, Callable[[SchedulerConfig], Policy]] = {
    "fcfs": lambda config: Fcfs(),
    "lpm": lambda config: LongestPrefix(config.lpm_ageing_tokens_per_second),
    "priority": lambda config: Priority(config.priority_ageing_seconds),
}

POLICY_NAMES = tuple(_POLICIES)


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that `config.policy` names; raises `UnknownName`."""
    build = _POLICIES.get(config.policy)
    if build is None:
        raise UnknownName("scheduling policy", config.policy, _POLICIES)
    return build(config)
