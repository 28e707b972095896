"""The waiting requests, sorted by policy.

Owns the order and, for policies that need it, the matched lengths behind it. It must not know
admission. Invariant: sorted by (rank, order of addition); each request is in it at most once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from kvtiers.scheduling.policies import Policy
from kvtiers.scheduling.request import Request

_Entry = tuple[float, int, Request]


class WaitingQueue:
    """Waiting requests, first to be admitted first.

    `matched_tokens` looks up how much of a request's prompt is cached; it is called only for
    policies whose rank depends on it.
    """

    def __init__(self, policy: Policy, matched_tokens: Callable[[Request], int]) -> None:
        self._policy = policy
        self._matched_tokens = matched_tokens
        self._sorted: list[_Entry] = []
        self._places: dict[int, tuple[float, int]] = {}
        self._numbers: dict[int, int] = {}
        self._next_number = 0
        self._rotation: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._places

    def __iter__(self) -> Iterator[Request]:
        """A snapshot in order: the queue may change while it is walked through."""
        return iter([entry[2] for entry in self._sorted])

    def first(self, count: int) -> list[Request]:
        """The first `count` requests in order."""
        return [entry[2] for entry in self._sorted[:count]]

    def add(self, request: Request) -> None:
        """Queue a request; one that comes back keeps its number, so ties go to the older one."""
        number = self._numbers.get(request.request_id)
        if number is None:
            number = self._next_number
            self._next_number += 1
            self._numbers[request.request_id] = number
        self._insert(request, number)
        if self._policy.uses_match:
            self._rotation[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Take a request out (admitted, or gone)."""
        self._take_out(request)
        self._rotation.pop(request.request_id, None)

    def forget(self, request: Request) -> None:
        """The request has ended and will not come back."""
        self._numbers.pop(request.request_id, None)

    def rematch(self, count: int) -> None:
        """Look up again the matched length of up to `count` requests, in rotation.

        The cache changes under a waiting request in both directions; a look-up costs microseconds,
        so a long queue is refreshed over several steps.
        """
        if not self._policy.uses_match:
            return
        for _ in range(min(count, len(self._rotation))):
            request_id = next(iter(self._rotation))
            request = self._rotation.pop(request_id)
            self._take_out(request)
            self._insert(request, self._numbers[request_id])
            self._rotation[request_id] = request

    def _insert(self, request: Request, number: int) -> None:
        matched = self._matched_tokens(request) if self._policy.uses_match else 0
        rank = self._policy.rank(request, matched)
        self._places[request.request_id] = (rank, number)
        insort(self._sorted, (rank, number, request))

    def _take_out(self, request: Request) -> None:
        place = self._places.pop(request.request_id)
        del self._sorted[bisect_left(self._sorted, place)]
