"""What each act came to, and whether the demo holds: pure functions over what was seen.

Every check says what it compared, so that a failing demo tells what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtiers.demo.books import Counters
from kvtiers.demo.client import Reply
from kvtiers.demo.exactness import Turn
from kvtiers.demo.workload import Act
from kvtiers.engine.reference import Comparison

TIES_SHARE_MAX = 0.01
TIERS = ("device", "host", "storage")


@dataclass(slots=True)
class ActResult:
    """Everything seen in one act: from the clients, from the server's books, from the reference."""

    act: Act
    replies: list[Reply] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reusable_tokens: list[int] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    counters: Counters | None = None
    balanced: bool = False
    seconds: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(reply.prompt_tokens for reply in self.replies)

    def hit_tokens(self, tier: str) -> int:
        return sum(reply.hit_tokens[tier] for reply in self.replies)

    @property
    def computed_tokens(self) -> int:
        return sum(reply.computed_tokens for reply in self.replies)

    @property
    def reusable(self) -> int:
        return sum(self.reusable_tokens)

    @property
    def exact(self) -> bool:
        """Whether every answer was compared, and none was wrong."""
        return len(self.comparisons) == len(self.replies) > 0 and all(
            comparison.exact for comparison in self.comparisons
        )

    @property
    def tied_answers(self) -> int:
        return sum(1 for comparison in self.comparisons if comparison.ties)

    @property
    def dropped_tokens(self) -> int:
        assert self.counters is not None
        return sum(self.counters.dropped_tokens.values())

    def first_token_seconds_by_hit(self) -> dict[str, list[float]]:
        """Times to the first token, by the tier that served most of the prompt."""
        times: dict[str, list[float]] = {name: [] for name in (*TIERS, "computed")}
        for reply in self.replies:
            parts = {**reply.hit_tokens, "computed": reply.computed_tokens}
            times[max(parts, key=lambda name: parts[name])].append(reply.first_token_seconds)
        return times


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold, and what was found."""

    name: str
    holds: bool
    found: str


def check_act(result: ActResult) -> list[Check]:
    """What must hold in every act, and what this one is there to show."""
    name = result.act.name
    hits = {tier: result.hit_tokens(tier) for tier in TIERS}
    total = sum(hits.values()) + result.computed_tokens
    checks = [
        Check(
            f"{name}: prompt = device + host + storage + computed",
            total == result.prompt_tokens,
            f"{result.prompt_tokens} = {' + '.join(map(str, hits.values()))} + "
            f"{result.computed_tokens}",
        )
    ]
    assert result.counters is not None
    seen = {f"{tier}_hit": tokens for tier, tokens in hits.items()}
    seen["input"] = result.computed_tokens
    checks.append(
        Check(
            f"{name}: /metrics agrees with the clients' usage",
            result.counters.effective_tokens == seen,
            f"/metrics {_spell(result.counters.effective_tokens)}; usage {_spell(seen)}",
        )
    )
    checks.append(Check(f"{name}: the books balance", result.balanced, str(result.balanced)))
    wrong = [i for i, comparison in enumerate(result.comparisons) if not comparison.exact]
    worst = max((c.worst_difference for c in result.comparisons), default=float("nan"))
    checks.append(
        Check(
            f"{name}: every answer equals the one without a cache",
            result.exact,
            f"{len(result.comparisons) - len(wrong)} of {len(result.replies)} exact, largest "
            f"difference {worst:.1e} of the largest logit",
        )
    )
    tier = result.act.tier_to_show
    if tier is not None:
        checks.append(
            Check(
                f"{name}: {tier} hits are at least half of the reusable tokens",
                2 * hits[tier] >= result.reusable > 0,
                f"{hits[tier]} of {result.reusable}",
            )
        )
    return checks


def check_whole(results: Sequence[ActResult], exit_statuses: Sequence[int]) -> list[Check]:
    """What must hold over all acts."""
    answers = sum(len(result.replies) for result in results)
    ties = sum(result.tied_answers for result in results)
    return [
        Check(
            f"ties are at most {TIES_SHARE_MAX:.0%} of the answers",
            ties <= TIES_SHARE_MAX * answers,
            f"{ties} of {answers}",
        ),
        Check(
            "the server drained and exited 0 at every SIGTERM",
            bool(exit_statuses) and not any(exit_statuses),
            f"exit statuses {', '.join(map(str, exit_statuses))}",
        ),
    ]


def _spell(tokens: dict[str, int]) -> str:
    return ", ".join(f"{name} {tokens[name]}" for name in sorted(tokens))
