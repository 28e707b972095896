"""Groups of requests with one prompt (`n` answers): one prefills, the others fork from it.

Owns who leads and who waits for whom. It must not know the cache or the queue. Invariant: a
follower is in no queue; it leaves its group by being forked, by becoming the leader, or by ending.
"""

from __future__ import annotations

from kvtiers.errors import ProtocolError
from kvtiers.scheduling.request import Request


class ForkGroups:
    """Members of every group whose prompt is not computed yet, leader first."""

    def __init__(self) -> None:
        self._members: dict[int, list[Request]] = {}

    def join(self, request: Request) -> bool:
        """Put a new request into its group, if it has one; True when it must prefill itself."""
        if request.group is None:
            return True
        members = self._members.setdefault(request.group, [])
        if members:
            leader = members[0]
            if leader.prompt != request.prompt or leader.namespace != request.namespace:
                raise ProtocolError(
                    f"request {request.request_id} joins group {request.group} with another "
                    f"prompt or namespace than request {leader.request_id}; a group is n answers "
                    "to one prompt"
                )
        members.append(request)
        return len(members) == 1

    def prefilled(self, request: Request) -> list[Request]:
        """The leader's prompt is computed: dissolves its group and returns the followers."""
        members = self._members.get(request.group) if request.group is not None else None
        if not members or members[0] is not request:
            return []
        assert request.group is not None
        return self._members.pop(request.group)[1:]

    def leave(self, request: Request) -> Request | None:
        """A request has ended; returns the follower that must prefill in its place, if any."""
        members = self._members.get(request.group) if request.group is not None else None
        if not members or request not in members:
            return None
        assert request.group is not None
        led = members[0] is request
        members.remove(request)
        if not members:
            del self._members[request.group]
            return None
        return members[0] if led else None
