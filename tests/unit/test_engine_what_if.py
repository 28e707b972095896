"""The live what-if curve: imagined caches of other sizes, beside caches that were counted out."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from kvtiers.engine.what_if import WhatIf
from kvtiers.metrics.gauges import WhatIfSize
from kvtiers.types import Namespace, Retention, Tier, token_key

NAMESPACE = Namespace("m")
FOREVER = 1e12
"""A half-life of so many requests: all count alike."""

HALF, SAME, DOUBLE, FOURFOLD = WhatIfSize


def counted_out(prompts: list[list[int]], capacity_pages: int) -> float:
    """The token hit ratio of a plain LRU cache of paths of one-token pages."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    found = 0
    for prompt in prompts:
        paths = [tuple(prompt[: i + 1]) for i in range(len(prompt))]
        for path in paths:
            if path not in cache:
                break
            found += 1
        for path in reversed(paths):
            cache[path] = None
            cache.move_to_end(path)
        while len(cache) > capacity_pages:
            cache.popitem(last=False)
    return found / sum(map(len, prompts))


def conversations(seed: int, requests: int) -> list[list[int]]:
    """Prompts that grow, of a few users who come back now and then."""
    chance = random.Random(seed)
    histories = [[user] for user in range(12)]
    prompts = []
    for _ in range(requests):
        history = chance.choice(histories)
        history += [chance.randrange(1000) for _ in range(chance.randrange(1, 6))]
        prompts.append(list(history))
        if len(history) > 60:
            del history[5:]
    return prompts


def ask_all(what_if: WhatIf, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        what_if.ask(token_key(np.array(prompt)), NAMESPACE)


@pytest.mark.parametrize("seed", range(3))
def test_small_sizes_are_exact(seed: int) -> None:
    what_if = WhatIf(1, {Tier.DEVICE: 80}, Retention.INCLUSIVE, half_life_requests=FOREVER)
    prompts = conversations(seed, 400)
    ask_all(what_if, prompts)
    ratios = what_if.ratios()
    assert set(ratios) == {(Tier.DEVICE, size) for size in WhatIfSize}
    for size in WhatIfSize:
        expected = counted_out(prompts, round(80 * size.factor))
        assert ratios[Tier.DEVICE, size] == pytest.approx(expected)
    assert ratios[Tier.DEVICE, HALF] < ratios[Tier.DEVICE, FOURFOLD]


def test_a_sample_of_a_large_size_comes_close_to_the_known_curve() -> None:
    """The public trace, a block as a token: 21.16 % at 10,000 blocks, 4.45 % at 1,000."""
    trace = Path(__file__).parents[3] / "shared" / "data" / "mooncake_conversation.jsonl"
    if not trace.exists():
        pytest.skip("the public trace is not here")
    what_if = WhatIf(
        1,
        {Tier.DEVICE: 1_000, Tier.HOST: 10_000},
        Retention.INCLUSIVE,
        sampled_pages_max=2_000,
        half_life_requests=FOREVER,
    )
    with trace.open() as lines:
        for line in lines:
            what_if.ask(token_key(np.array(json.loads(line)["hash_ids"])), NAMESPACE)
    ratios = what_if.ratios()
    assert ratios[Tier.DEVICE, SAME] == pytest.approx(0.0445, abs=0.0002)  # not sampled
    assert ratios[Tier.HOST, SAME] == pytest.approx(0.2116, abs=0.01)


def test_inclusive_tiers_are_as_large_as_the_largest_and_exclusive_ones_as_their_sum() -> None:
    prompts = conversations(9, 400)
    sizes = {Tier.DEVICE: 40, Tier.HOST: 60, Tier.STORAGE: 200}
    by_retention = {}
    for retention in Retention:
        what_if = WhatIf(1, sizes, retention, half_life_requests=FOREVER)
        ask_all(what_if, prompts)
        by_retention[retention] = what_if.ratios()
    inclusive, exclusive = by_retention[Retention.INCLUSIVE], by_retention[Retention.EXCLUSIVE]
    assert inclusive[Tier.HOST, SAME] == pytest.approx(counted_out(prompts, 60))
    assert inclusive[Tier.HOST, HALF] == inclusive[Tier.DEVICE, SAME]  # 30 pages beside 40
    assert exclusive[Tier.HOST, SAME] == pytest.approx(counted_out(prompts, 100))
    assert exclusive[Tier.HOST, HALF] == pytest.approx(counted_out(prompts, 70))
    assert inclusive[Tier.STORAGE, SAME] == exclusive[Tier.STORAGE, SAME]


def test_answers_are_there_for_the_next_turn_and_tokens_of_no_whole_page_never_are() -> None:
    what_if = WhatIf(4, {Tier.DEVICE: 100}, Retention.INCLUSIVE, half_life_requests=FOREVER)
    turn = token_key(np.arange(4))
    what_if.ask(turn, NAMESPACE)
    what_if.use(turn + token_key(np.arange(50, 54)), NAMESPACE)
    what_if.ask(turn + token_key(np.arange(50, 56)), NAMESPACE)  # 8 of 10 tokens, after 0 of 4
    assert what_if.ratios()[Tier.DEVICE, SAME] == pytest.approx(8 / 14)
    what_if.ask(token_key(np.arange(3)), NAMESPACE)  # no whole page
    assert what_if.ratios()[Tier.DEVICE, SAME] == pytest.approx(8 / 14)


def test_two_namespaces_share_nothing() -> None:
    what_if = WhatIf(1, {Tier.DEVICE: 100}, Retention.INCLUSIVE)
    for name in ("a", "b"):
        what_if.ask(token_key(np.arange(10)), Namespace("m", salt=name))
    assert what_if.ratios()[Tier.DEVICE, SAME] == 0


def test_old_requests_fade() -> None:
    what_if = WhatIf(1, {Tier.DEVICE: 100}, Retention.INCLUSIVE, half_life_requests=10)
    for _ in range(200):
        what_if.ask(token_key(np.arange(10)), NAMESPACE)
    assert what_if.ratios()[Tier.DEVICE, SAME] == pytest.approx(1, abs=1e-4)
    for fresh in range(10):  # as many as now count half of all
        what_if.ask(token_key(np.arange(10) + 1000 * (fresh + 1)), NAMESPACE)
    assert what_if.ratios()[Tier.DEVICE, SAME] == pytest.approx(0.5, abs=0.01)
