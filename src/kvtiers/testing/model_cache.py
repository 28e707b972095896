"""The cache page by page, in plain Python, written to be obviously right.

Owns what the real cache decides where every copy ends well in the moment it is ordered and storage
plays no part: what matches, where a prompt comes from, what is resident in each tier, and whether
an attempt is granted. It knows no runs, slots, operations or books: a page is an object, an order
is a sort, and what could be counted is counted afresh each time.

    a page is in the cache            <=>  it is on device or on host
    a page's parent is on device      <=   the page is
    a page's parent is in the cache   <=   the page is
    a page's parent is held           <=   the page is

The age of a page is when it was last released; of pages released together the deeper is the older.
Under `lfu` pages that fewer requests used are older, in powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtiers.core.interface import Blocked, MatchLengths, Refused
from kvtiers.types import (
    TOKEN_BYTES,
    Attempt,
    BlockedOn,
    CacheConfig,
    Namespace,
    Retention,
    Tier,
    WritePolicy,
)

LFU_RANK_MAX = 15


@dataclass(eq=False)
class ModelPage:
    name: bytes
    """The namespace's digest, and all tokens from the root to the end of this page."""
    on_device: bool = False
    on_host: bool = False
    holders: int = 0
    """Leases and pins on it; each holds everything above it too."""
    released: int = 0
    """Moment of its last release: larger is younger."""
    uses: int = 0
    """Distinct requests that used it."""


@dataclass(eq=False)
class ModelLease:
    """A granted attempt: `pages` of its path are the tree's and held, `private` slots its own.

    Of the private slots `duplicates` hold pages that somebody else had published on device.
    """

    namespace: Namespace
    attempt: Attempt
    pages: list[ModelPage]
    private: int
    prompt_tokens: int
    hits: tuple[int, int]
    """Device and host hits, in tokens."""
    duplicates: int = 0
    committed: bool = False

    @property
    def capacity_pages(self) -> int:
        return len(self.pages) + self.private - self.duplicates


@dataclass
class ModelCache:
    config: CacheConfig
    pages: dict[bytes, ModelPage] = field(default_factory=dict)
    leases: list[ModelLease] = field(default_factory=list)
    moment: int = 0

    # ---- looking

    def match(self, key: bytes, namespace: Namespace) -> MatchLengths:
        found = self._known(key, namespace)
        usable = min(len(found), self._usable_limit(len(key) // TOKEN_BYTES))
        return MatchLengths(min(_leading_on_device(found), usable), usable, len(found))

    def resident(self, tier: Tier) -> set[bytes]:
        """Names of the pages that a tier holds."""
        on = _on_device if tier is Tier.DEVICE else _on_host
        return {page.name for page in self.pages.values() if on(page)}

    def free_pages(self, tier: Tier) -> int:
        if tier is Tier.HOST:
            return self.config.host_pages - len(self.resident(tier))
        private = sum(lease.private for lease in self.leases)
        return self.config.device_pages - len(self.resident(tier)) - private

    def _names(self, key: bytes, namespace: Namespace) -> list[bytes]:
        """Names of all whole pages of a key, from the root down."""
        page_bytes = self.config.page_tokens * TOKEN_BYTES
        return [namespace.digest + key[:end] for end in range(page_bytes, len(key) + 1, page_bytes)]

    def _known(self, key: bytes, namespace: Namespace) -> list[ModelPage]:
        """The leading pages of a key that are in the cache."""
        found: list[ModelPage] = []
        for name in self._names(key, namespace):
            if name not in self.pages:
                break
            found.append(self.pages[name])
        return found

    def _usable_limit(self, prompt_tokens: int) -> int:
        last = 1 if self.config.last_token_rule and prompt_tokens else 0
        return (prompt_tokens - last) // self.config.page_tokens

    # ---- the life of a request

    def admit(
        self,
        key: bytes,
        namespace: Namespace,
        *,
        reserve_tokens: int = 0,
        attempt: Attempt = Attempt.FIRST,
    ) -> ModelLease | Blocked | Refused:
        page_tokens = self.config.page_tokens
        prompt_tokens = len(key) // TOKEN_BYTES
        total = -(-(prompt_tokens + reserve_tokens) // page_tokens)
        if total > self.config.device_pages:
            return Refused(total, self.config.device_pages)
        held = self._known(key, namespace)
        device = _leading_on_device(held)
        limit = self._usable_limit(prompt_tokens)
        if device < len(held):
            del held[max(limit, device) :]  # the last page is not loaded to be computed again
        self._hold(held)
        if len(held) > device and not self._is_worth_loading(len(held) - device):
            self._release(held)
            del held[device:]
            self._hold(held)
        need = total - device
        if not self._make_device_room(need):
            self._release(held)
            return Blocked(BlockedOn.DEVICE_CAPACITY)
        for page in held:
            page.on_device = True
        hit = min(len(held), limit)
        hits = (min(hit, device) * page_tokens, max(0, hit - device) * page_tokens)
        lease = ModelLease(namespace, attempt, held, total - len(held), prompt_tokens, hits)
        self.leases.append(lease)
        if attempt is Attempt.FIRST:
            for page in held:
                page.uses += 1
            if self.config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
                self._back_up(held)
        return lease

    def _is_worth_loading(self, pages: int) -> bool:
        tokens = pages * self.config.page_tokens
        return (
            tokens >= self.config.load_back_threshold_tokens
            and not self.config.copy_costs.copying_loses(pages, tokens)
        )

    def extend(self, lease: ModelLease, tokens: int) -> bool:
        more = -(-tokens // self.config.page_tokens) - lease.capacity_pages
        if more <= 0:
            return True
        if not self._make_device_room(more):
            return False
        lease.private += more
        return True

    def fork(self, lease: ModelLease) -> ModelLease | Blocked:
        page_tokens = self.config.page_tokens
        held = lease.pages[: self._usable_limit(lease.prompt_tokens)]
        need = lease.capacity_pages - len(held)
        self._hold(held)
        if not self._make_device_room(need):
            self._release(held)
            return Blocked(BlockedOn.DEVICE_CAPACITY)
        hits = (len(held) * page_tokens, 0)
        fork = ModelLease(lease.namespace, Attempt.FORK, held, need, lease.prompt_tokens, hits)
        self.leases.append(fork)
        return fork

    def commit(self, lease: ModelLease, key: bytes, computed_tokens: int) -> None:
        """Publish what is complete. The first publisher wins; the other keeps its slot private."""
        lease.committed = True
        computed = key[: computed_tokens * TOKEN_BYTES]
        unpublished = self._names(computed, lease.namespace)[len(lease.pages) :]
        for name in unpublished:
            page = self.pages.get(name)
            if page is None:
                page = self.pages[name] = ModelPage(name)
            if lease.attempt is Attempt.FIRST:
                page.uses += 1
            if page.on_device:
                lease.duplicates += 1
            else:
                page.on_device = True
                lease.private -= 1
            page.holders += 1
            lease.pages.append(page)
        if unpublished and self.config.write_policy is not WritePolicy.WRITE_BACK:
            self._back_up(lease.pages)

    def end(self, lease: ModelLease) -> None:
        """Finished, retracted or aborted: what was published stays, the rest is free again."""
        self.leases.remove(lease)
        self._release(lease.pages)

    # ---- holding

    def pin(self, key: bytes, namespace: Namespace) -> list[ModelPage]:
        """Hold what is there of a key; `unpin` what this returns."""
        pages = self._known(key, namespace)
        self._hold(pages)
        return pages

    def unpin(self, pages: Sequence[ModelPage]) -> None:
        self._release(pages)

    def _hold(self, pages: Iterable[ModelPage]) -> None:
        for page in pages:
            page.holders += 1

    def _release(self, pages: Sequence[ModelPage]) -> None:
        for page in reversed(pages):
            page.holders -= 1
            if not page.holders:
                self.moment += 1
                page.released = self.moment

    def _age(self, page: ModelPage) -> tuple[int, int]:
        """Smaller leaves first."""
        if self.config.eviction == "lfu":
            return min(page.uses.bit_length(), LFU_RANK_MAX), page.released
        return 0, page.released

    def _by_age(self, wanted: Callable[[ModelPage], bool]) -> list[ModelPage]:
        """Pages that nobody holds, oldest first."""
        pages = [page for page in self.pages.values() if not page.holders and wanted(page)]
        return sorted(pages, key=self._age)

    # ---- device gives up pages

    def _make_device_room(self, need: int) -> bool:
        missing = need - self.free_pages(Tier.DEVICE)
        if missing > len(self._by_age(_on_device)):
            return False
        self.evict(Tier.DEVICE, missing)
        return True

    def evict(self, tier: Tier, pages: int) -> int:
        """Free up to `pages` pages of a tier, oldest first; returns how many."""
        give_up = self._give_up_on_device if tier is Tier.DEVICE else self._give_up_on_host
        freed = 0
        while freed < pages and give_up():
            freed += 1
        return freed

    def _give_up_on_device(self) -> bool:
        oldest = self._by_age(_on_device)[:1]
        for page in oldest:
            if page.on_host or self._save(page):
                page.on_device = False
            else:
                self._drop(page)
        return bool(oldest)

    def _save(self, page: ModelPage) -> bool:
        """Copy a page that leaves the device to host, if the policy and the space there say so."""
        selective = self.config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        if not self.config.host_pages or (selective and page.uses < 2):
            return False
        if not self.free_pages(Tier.HOST) and not self._give_up_on_host(than=page):
            return False
        page.on_host = True
        return True

    def _below(self, page: ModelPage) -> list[ModelPage]:
        return [
            each
            for each in self.pages.values()
            if each is not page and each.name.startswith(page.name)
        ]

    def _drop(self, page: ModelPage) -> None:
        """Forget a page and all that hangs below it."""
        for gone in [page, *self._below(page)]:
            assert not gone.holders
            del self.pages[gone.name]

    # ---- host gives up pages

    def _back_up(self, path: Sequence[ModelPage]) -> None:
        """Copy the end of a path that host lacks, parents first, as much as can have room."""
        wanted = list(path)
        if self.config.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            while wanted and wanted[-1].uses < 2 and not wanted[-1].on_host:
                wanted.pop()
        missing: list[ModelPage] = []
        while wanted and not wanted[-1].on_host:
            missing.insert(0, wanted.pop())
        while self.free_pages(Tier.HOST) < len(missing) and self._give_up_on_host():
            pass
        for page in missing[: self.free_pages(Tier.HOST)]:
            page.on_host = True

    def _give_up_on_host(self, than: ModelPage | None = None) -> bool:
        """Give up one page of host; for a page that comes down (`than`) only a mirror or an older.

        Inclusive: the oldest. Exclusive: the youngest mirror, and without mirrors the oldest.
        """
        mirrors = self._by_age(lambda page: page.on_host and page.on_device)
        if mirrors and self.config.retention is Retention.EXCLUSIVE:
            leaving = mirrors[-1:]
        else:
            leaving = self._by_age(_on_host)[:1]
            if than is not None:
                leaving = [page for page in leaving if self._age(page) < self._age(than)]
        for page in leaving:
            page.on_host = False
            if not page.on_device:
                self._drop(page)
        return bool(leaving)

    # ---- commands

    def flush(self, tier: Tier) -> int:
        """Remove what nobody holds from a tier, and what hangs below what is gone from both."""
        before = len(self.resident(tier))
        for page in self._by_age(_on_device if tier is Tier.DEVICE else _on_host):
            if page.name not in self.pages:
                continue
            if tier is Tier.DEVICE:
                page.on_device = False
            else:
                page.on_host = False
            if not page.on_device and not page.on_host:
                self._drop(page)
        return before - len(self.resident(tier))


def _on_device(page: ModelPage) -> bool:
    return page.on_device


def _on_host(page: ModelPage) -> bool:
    return page.on_host


def _leading_on_device(path: Sequence[ModelPage]) -> int:
    count = 0
    for page in path:
        if not page.on_device:
            break
        count += 1
    return count
