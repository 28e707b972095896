"""One seed's scenario: configuration, faults and traffic, all drawn from the seed.

Owns the ranges. Tiers are tiny, so that everything is scarce: from one page up, host smaller than,
equal to and larger than device, no host, no storage.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvtiers.testing.simulation.carrier import NO_FAULTS, Faults
from kvtiers.types import (
    CacheConfig,
    CopyCosts,
    PoolSpec,
    PrefetchPolicy,
    Retention,
    StoreOn,
    WritePolicy,
)

FAULTS: dict[str, Faults] = {
    "calm": NO_FAULTS,
    "slow": Faults(delay_seconds_max=6.0, slow_rate=0.2),
    "failing": Faults(delay_seconds_max=3.0, slow_rate=0.05, fail_rate=0.2, lookup_fail_rate=0.1),
    "late": Faults(
        delay_seconds_max=3.0, slow_rate=0.05, fail_rate=0.05, late_rate=0.25, hang_rate=0.2
    ),
    "bad link": Faults(delay_seconds_max=8.0, slow_rate=0.1, fail_rate=0.5, late_rate=0.05),
    "forgetful": Faults(delay_seconds_max=2.0, slow_rate=0.1, loss_rate=0.05, corruption_rate=0.05),
    "storm": Faults(
        delay_seconds_max=4.0,
        slow_rate=0.1,
        fail_rate=0.2,
        late_rate=0.15,
        hang_rate=0.3,
        loss_rate=0.03,
        corruption_rate=0.1,
        lookup_fail_rate=0.2,
    ),
}
"""Profiles of what goes wrong. Copies take seconds, and so does a step: about one."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one run is about.

    `busy_rate` is how often a due event happens before anything else, `evict_weight` how often the
    device is emptied by command (all of an action's weights sum to about 1): then prompts come
    back from host, and meet on the way.
    """

    config: CacheConfig
    profile: str
    quota_pages: int | None
    waiting_max: int
    live_max: int
    reuse_rate: float
    busy_rate: float
    evict_weight: float

    @property
    def faults(self) -> Faults:
        return FAULTS[self.profile]

    def __str__(self) -> str:
        c = self.config
        storage = f"storage (at most {self.quota_pages} pages)" if c.storage else "no storage"
        return (
            f"pages of {c.page_tokens}, device {c.device_pages}, host {c.host_pages}, {storage}, "
            f"{c.write_policy}, {c.retention}, store on {c.store_on}, {c.eviction}, prefetch "
            f"{c.prefetch_policy}, faults: {self.profile}"
        )


def draw(rng: random.Random) -> Scenario:
    """A scenario; every combination has a chance."""
    pick = rng.choice
    device = pick((1, 2, 3, 8, 8, 20, 20, 40))
    half = max(1, device // 2)
    host = pick((0, 1, half, half, device, 2 * device + 1, 4 * device, 4 * device, 100))
    policy = pick(list(WritePolicy))
    retention = pick(list(Retention)) if policy is WritePolicy.WRITE_BACK else Retention.INCLUSIVE
    evict_weight = pick((0.03, 0.03, 0.15))
    if evict_weight > 0.1:  # what the device loses must be somewhere
        device, host = pick((8, 20, 40)), pick((40, 100, 160))
    storage = bool(host) and rng.random() < 0.75
    page_tokens = pick((1, 4, 4, 16))
    followers = (PoolSpec("draft", 3, follows="kv"),) if rng.random() < 0.3 else ()
    low = pick((0.1, 0.5))
    config = CacheConfig(
        device_pages=device,
        host_pages=host,
        page_tokens=page_tokens,
        pools=(PoolSpec("kv", 8), *followers),
        storage=storage,
        write_policy=policy,
        retention=retention,
        store_on=pick(list(StoreOn)),
        eviction=pick(("lru", "lru", "lfu")),
        prefetch_policy=pick(list(PrefetchPolicy)),
        prefetch_threshold_tokens=pick((1, 1, 2 * page_tokens)),
        prefetch_timeout_base_seconds=pick((0.0, 5.0, 50.0)),
        prefetch_batch_pages=pick((1, 2, 64)),
        prefetch_in_flight_share=pick((0.3, 0.5, 1.0)),
        load_back_threshold_tokens=pick((1, 1, 1, 2 * page_tokens)),
        copy_costs=CopyCosts(3.0, 1.0, 1.0) if rng.random() < 0.1 else CopyCosts(),
        backup_in_flight_pages=pick((2, 8, 1 << 30, 1 << 30)),
        store_in_flight_pages=pick((3, 4096)),
        cleaner_low=low,
        cleaner_high=min(1.0, low + pick((0.1, 0.4))),
        ghost_pages=pick((None, None, 0, 5)),
        last_token_rule=rng.random() < 0.85,
    )
    return Scenario(
        config,
        profile=pick(list(FAULTS)),
        quota_pages=pick((None, None, 10, 60)),
        waiting_max=pick((2, 6, 12)),
        live_max=pick((3, 6, 12)),
        reuse_rate=pick((0.5, 0.8, 0.95)),
        busy_rate=pick((0.3, 0.6, 0.9)),
        evict_weight=evict_weight,
    )
