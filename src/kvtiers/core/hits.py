"""How a used prefix splits by tier: one pure function, used once per attempt."""

from __future__ import annotations

from typing import NamedTuple


class TierSplit(NamedTuple):
    """Tokens of a used prefix by the tier that is credited with them; they sum to the prefix."""

    device: int
    host: int
    storage: int


def split_cached_prefix_by_tier(
    prefix: int,
    host_hit: int,
    storage_hit: int,
    storage_start: int | None = None,
    *,
    host_is_storage: bool = False,
) -> TierSplit:
    """Split `prefix` used tokens by tier.

            0            prefix - host          prefix
            |--- device ---|------- host -------|
                     |-- storage span --|            [storage_start, storage_start + storage_hit)

    `host_hit` tokens at the end of the prefix were really loaded from host. The request's own
    prefetch brought `storage_hit` tokens from `storage_start` on (None: unknown, taken to lie at
    the end of the host part); they are credited to storage wherever they lie by now, also where
    another request has moved them on to the device. `host_is_storage` says that whatever came
    through host was read from storage (host is only a staging area).
    """
    host = min(prefix, max(host_hit, 0))
    if storage_start is None:
        storage = host if host_is_storage else min(host, max(storage_hit, 0))
        host -= storage
    else:
        start, end = storage_start, min(prefix, storage_start + max(storage_hit, 0))
        storage = max(0, end - start)
        in_host = max(0, end - max(start, prefix - host))
        host = 0 if host_is_storage else host - in_host
    return TierSplit(prefix - host - storage, host, storage)
