"""Who is computing a prefix that a waiting request needs too.

Owns an index of the prefilling requests by the first page they have not published yet. It must
not know queues or budgets beyond what it is told.

When to wait. Prompt `W` is cached up to `matched`; leader `L` is computing the same tokens up to
`shared`. Let `ahead` be the prefill tokens that will be computed before `L` reaches `shared`, and
`backlog` all that were admitted before `W` would be. In steps of `budget` tokens:

    by waiting     W's own part begins in step  ceil(ahead / budget) + 1
    by computing   W reaches `shared` in step   ceil((backlog + shared - matched) / budget)

Waiting saves `shared - matched` tokens of compute and costs the difference in steps, each worth
`share_step_cost_tokens`. `W` waits exactly when it saves more than it costs. It holds nothing
meanwhile and lets others pass; a leader that ends, fails or is preempted ends the wait, and after
`share_leaders_max` leaders the request is admitted whatever is being computed.

Pages that are being *loaded* need no such rule: `admit` joins the copy and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvtiers.scheduling.request import Request
from kvtiers.types import TOKEN_BYTES

_PageKey = tuple[bytes, bytes]


class PrefixesInCompute:
    """Prefilling requests, found by the next page they will publish."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._by_page: dict[_PageKey, list[Request]] = {}
        self._page_of: dict[int, _PageKey] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def update(self, request: Request) -> None:
        """A request began to prefill, or published more of its prompt."""
        self.discard(request)
        key = self._page_key(request, request.computed_tokens // self._page_tokens)
        if key is not None:
            self._by_page.setdefault(key, []).append(request)
            self._page_of[request.request_id] = key

    def discard(self, request: Request) -> None:
        """A request has no unpublished page left, or gave up its lease."""
        key = self._page_of.pop(request.request_id, None)
        if key is not None:
            requests = self._by_page[key]
            requests.remove(request)
            if not requests:
                del self._by_page[key]

    def leader(self, request: Request, matched_tokens: int) -> tuple[Request, int] | None:
        """The request that computes the longest part of this one's prompt past `matched_tokens`.

        Returns it with the shared length in tokens (whole pages from the root), or None. Since
        every prefilling request's published pages match, only one whose next page is this
        request's next page can share anything.
        """
        key = self._page_key(request, matched_tokens // self._page_tokens)
        if key is None:
            return None
        best: tuple[Request, int] | None = None
        for other in self._by_page.get(key, ()):
            shared = self._shared_tokens(request, other, matched_tokens)
            if shared > matched_tokens and (best is None or shared > best[1]):
                best = (other, shared)
        return best

    def _page_key(self, request: Request, page: int) -> _PageKey | None:
        start = page * self._page_bytes
        content = request.key[start : start + self._page_bytes]
        if len(content) < self._page_bytes:
            return None
        return (request.namespace.digest, content)

    def _shared_tokens(self, one: Request, other: Request, from_tokens: int) -> int:
        """Common prefix in whole pages; the part before `from_tokens` is compared as one block."""
        skip = from_tokens * TOKEN_BYTES
        if one.key[:skip] != other.key[:skip]:
            return 0
        # The last token of the waiting prompt is computed in any case (it chooses the answer).
        length = min(one.tokens - 1, other.tokens) - from_tokens
        a = np.frombuffer(one.key, dtype="<i4", count=length, offset=skip)
        b = np.frombuffer(other.key, dtype="<i4", count=length, offset=skip)
        differs = a != b
        common = from_tokens + (int(differs.argmax()) if differs.any() else length)
        return common // self._page_tokens * self._page_tokens


def waiting_is_cheaper(
    *,
    shared_tokens: int,
    matched_tokens: int,
    ahead_tokens: int,
    backlog_tokens: int,
    budget_tokens: int,
    step_cost_tokens: int,
) -> bool:
    """The rule of this module: whether to wait for the leader costs less than to compute."""
    saved = shared_tokens - matched_tokens
    begins = -(-ahead_tokens // budget_tokens) + 1
    computed = -(-(backlog_tokens + saved) // budget_tokens)
    return saved > step_cost_tokens * max(0, begins - computed)


def tokens_ahead(prefilling: Iterable[Request], leader: Request, shared_tokens: int) -> int:
    """Prefill tokens that are computed, in order of admission, until `leader` is at `shared`."""
    ahead = 0
    for request in prefilling:
        if request is leader:
            break
        ahead += request.tokens - request.computed_tokens
    return ahead + max(0, shared_tokens - leader.computed_tokens)
