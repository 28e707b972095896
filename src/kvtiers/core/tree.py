"""The compressed radix tree: runs of pages below one root per namespace. Structure only.

A run is a stretch of pages without a branch. It has its tokens and one slot array per tier:

    page of the run   0        hs      d            he = n
    device slots      |------------------|
    host slots                 |---------------------|

    on device: the prefix [0, d)          on host: one interval [hs, he)
    no hole:   d == n  or  (hs <= d and he == n)
    a page in no tier does not exist:  n == max(d, he)

so matching, splitting and trimming cost O(1) per run, never per page. A split makes the *upper*
half the new object; the lower half keeps its identity, so whoever names a page range on the path of
a run (`Operation`) is not disturbed by it.

Tokens are compared (`startswith`, a memcmp without a copy), never only hashed. They lie inside the
prompt that brought them, as long as that is at most twice as large: copying each prompt into the
tree was a sixth of the whole cache work, and most are never asked for again. A run that is asked
for again gets bytes of its own at its first whole match.

This file knows nothing of leases, recency or policies beyond carrying their per-run integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtiers.core.ghost_table import DIGEST_BYTES
from kvtiers.types import TOKEN_BYTES, Namespace, SlotArray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtiers.core.operations import Operation

NO_SLOTS: SlotArray = np.empty(0, np.int32)

_FIRST_STRIDE = 2048  # tokens compared at once when looking for the first difference


class Run:
    """A stretch of pages without a branch. See the module's drawing for the intervals."""

    __slots__ = (
        "backup",  # the operation that copies pages of this run to host, or None
        "children",  # first page's bytes -> run
        "copy_failed",  # the last try to save this run to host failed: do not wait for another
        "device_pages",  # d
        "device_slots",  # d slots; n while `load` is filling [d, n)
        "digests",  # page digests of the whole run, computed when first needed
        "host_end",  # he
        "host_slots",  # he - hs slots
        "host_start",  # hs
        "load",  # the operation that copies pages [d, n) to device, or None
        "locks",  # own leases + locked children
        "page_bytes",
        "pages",  # n
        "parent",
        "source",  # bytes in which its n pages of int32 tokens lie; of a root, its namespace
        "source_from",  # where in there they begin
        "stamp",  # when the run was last released: larger is younger
        "start",  # pages between the root and this run
        "store",  # the operation that stores pages of this run, or None
        "store_failed",  # the last try to store this run failed: do not wait for another
        "stored_pages",  # the leading pages that storage has acknowledged (a hint)
        "uses",  # distinct requests that used it, where the policy asks
    )

    def __init__(
        self,
        source: bytes,
        source_from: int,
        page_bytes: int,
        parent: Run | None,
        start: int,
        pages: int,
    ) -> None:
        self.source = source
        self.source_from = source_from
        self.page_bytes = page_bytes
        self.parent: Run = parent  # type: ignore[assignment]  # only a root has none
        self.start = start
        self.pages = pages
        self.children: dict[bytes, Run] = {}
        self.device_pages = 0
        self.device_slots = NO_SLOTS
        self.host_start = 0
        self.host_end = 0
        self.host_slots = NO_SLOTS
        self.locks = 0
        self.uses = 0
        self.stamp = 0
        self.stored_pages = 0
        self.backup: Operation | None = None
        self.load: Operation | None = None
        self.store: Operation | None = None
        self.copy_failed = False
        self.store_failed = False
        self.digests: bytes | None = None

    @property
    def key(self) -> bytes:
        """The run's tokens as int32 bytes; of a root, the digest of its namespace."""
        if self.parent is None:
            return self.source
        begin = self.source_from
        return self.source[begin : begin + self.pages * self.page_bytes]

    @property
    def end(self) -> int:
        """Pages between the root and the end of this run."""
        return self.start + self.pages

    def path(self) -> list[Run]:
        """The runs from below the root down to this one."""
        runs = []
        run = self
        while run.parent is not None:
            runs.append(run)
            run = run.parent
        runs.reverse()
        return runs


class Match:
    """Where a prompt leaves the tree.

    `pages` leading pages match; the last of them is page `pages_in_run` of `run`. The first
    `device_pages` are on device.
    """

    __slots__ = ("device_pages", "pages", "pages_in_run", "run")

    def __init__(self, run: Run, pages_in_run: int, pages: int, device_pages: int) -> None:
        self.run = run
        self.pages_in_run = pages_in_run
        self.pages = pages
        self.device_pages = device_pages


class Tree:
    """All namespaces' runs. `epoch` changes with every change of structure or residency."""

    __slots__ = ("epoch", "namespaces", "page_bytes", "page_tokens", "roots", "run_count")

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.page_bytes = page_tokens * 4
        self.roots: dict[bytes, Run] = {}
        self.namespaces: dict[bytes, Namespace] = {}
        self.run_count = 0
        self.epoch = 0

    def root(self, namespace: Namespace) -> Run:
        """The root of a namespace; made when first asked for. A root is locked for ever."""
        root = self.roots.get(namespace.digest)
        if root is None:
            root = Run(namespace.digest, 0, self.page_bytes, None, 0, 0)
            self.roots[namespace.digest] = root
            root.locks = 1
            self.namespaces[namespace.digest] = namespace
        return root

    def match(self, root: Run, key: bytes, end: int) -> Match:
        """The longest prefix of `key[:end]` (whole pages) in the tree.

        Changes nothing but where a run's tokens lie: its first whole match gives it its own.
        """
        page_bytes = self.page_bytes
        run = root
        position = device = pages = in_run = 0
        while position < end:
            child = run.children.get(key[position : position + page_bytes])
            if child is None:
                break
            n = child.pages
            run_bytes, rest = n * page_bytes, end - position
            source = child.source
            if run_bytes > rest:
                is_whole = False
            elif len(source) == run_bytes:
                is_whole = key.startswith(source, position)
            else:
                # Prompts that part within the run differ in its last page: no need to copy them.
                begin = child.source_from
                last = run_bytes - page_bytes
                is_whole = source.startswith(
                    key[position + last : position + run_bytes], begin + last
                )
                if is_whole:
                    own = key[position : position + run_bytes]
                    is_whole = source.startswith(own, begin)
                    if is_whole:
                        child.source, child.source_from = own, 0
            if is_whole:
                in_run = n
            else:
                in_run = min(self.common_pages(child, key, position), rest // page_bytes)
            if device == pages:
                on_device = child.device_pages
                device += on_device if on_device < in_run else in_run
            run = child
            pages += in_run
            position += in_run * page_bytes
            if in_run < n:
                break
        return Match(run, in_run, pages, device)

    def common_pages(self, run: Run, key: bytes, offset: int) -> int:
        """Whole pages that a run and `key[offset:]` share."""
        count = min(run.pages * self.page_bytes, len(key) - offset) // TOKEN_BYTES
        ours = np.frombuffer(run.source, np.int32, count, run.source_from)
        theirs = np.frombuffer(key, np.int32, count, offset)
        low, stride = 0, _FIRST_STRIDE
        while low < count:
            differs = ours[low : low + stride] != theirs[low : low + stride]
            first = int(differs.argmax())
            if differs[first]:
                return (low + first) // self.page_tokens
            low += stride
            stride *= 4
        return count // self.page_tokens

    def add_child(self, parent: Run, key: bytes, pages: int) -> Run:
        """A new run below `parent`: the next `pages` pages of the prompt `key` on its path.

        The caller fills in its residency.
        """
        page_bytes = self.page_bytes
        start = parent.start + parent.pages
        begin = start * page_bytes
        source, source_from = _part(key, begin, pages * page_bytes)
        child = Run(source, source_from, page_bytes, parent, start, pages)
        parent.children[key[begin : begin + page_bytes]] = child
        self.run_count += 1
        self.epoch += 1
        return child

    def split(self, lower: Run, pages: int) -> Run:
        """Cut `lower` after `pages` pages; returns the new upper half, which has its parent."""
        page_bytes = self.page_bytes
        source, begin = lower.source, lower.source_from
        cut = begin + pages * page_bytes
        parent = lower.parent
        upper = Run(*_part(source, begin, cut - begin), page_bytes, parent, lower.start, pages)
        parent.children[source[begin : begin + page_bytes]] = upper
        upper.children = {source[cut : cut + page_bytes]: lower}
        lower_bytes = (lower.pages - pages) * page_bytes
        lower.source, lower.source_from = _part(source, cut, lower_bytes)
        lower.parent = upper
        lower.start += pages
        lower.pages -= pages

        device = lower.device_pages
        slots = lower.device_slots  # longer than `device` while a load fills the rest
        upper.device_pages = min(device, pages)
        upper.device_slots = slots[:pages]
        lower.device_pages = max(0, device - pages)
        lower.device_slots = slots[pages:]

        start, end, host = lower.host_start, lower.host_end, lower.host_slots
        if end <= pages:
            upper.host_start, upper.host_end, upper.host_slots = start, end, host
            lower.host_start = lower.host_end = 0
            lower.host_slots = NO_SLOTS
        elif start >= pages:
            lower.host_start, lower.host_end = start - pages, end - pages
        else:
            upper.host_start, upper.host_end = start, pages
            upper.host_slots = host[: pages - start]
            lower.host_start, lower.host_end = 0, end - pages
            lower.host_slots = host[pages - start :]

        upper.stored_pages = min(lower.stored_pages, pages)
        lower.stored_pages -= upper.stored_pages
        upper.uses = lower.uses
        upper.stamp = lower.stamp
        upper.copy_failed = lower.copy_failed
        upper.store_failed = lower.store_failed
        if lower.digests is not None:
            upper.digests = lower.digests[: pages * DIGEST_BYTES]
            lower.digests = lower.digests[pages * DIGEST_BYTES :]
        if lower.backup or lower.load or lower.store:
            _share_operations(upper, lower)
        self.run_count += 1
        self.epoch += 1
        return upper

    def join(self, upper: Run, lower: Run) -> None:
        """Make `upper` and its only child `lower` one run again; `lower` keeps its identity."""
        n = upper.pages
        parent = upper.parent
        lower.source, lower.source_from = upper.key + lower.key, 0
        lower.parent = parent
        lower.start = upper.start
        parent.children[lower.source[: self.page_bytes]] = lower
        lower.device_slots = np.concatenate((upper.device_slots, lower.device_slots))
        lower.device_pages += upper.device_pages
        if upper.host_end > upper.host_start:
            if lower.host_end > lower.host_start:
                lower.host_slots = np.concatenate((upper.host_slots, lower.host_slots))
                lower.host_end += n
            else:
                lower.host_slots = upper.host_slots
                lower.host_end = upper.host_end
            lower.host_start = upper.host_start
        elif lower.host_end > lower.host_start:
            lower.host_start += n
            lower.host_end += n
        lower.stored_pages += upper.stored_pages
        lower.pages += n
        lower.digests = None
        self.run_count -= 1
        self.epoch += 1

    def unlink(self, run: Run) -> None:
        """Take a run without pages out of the tree, and its root if that has become empty."""
        parent = run.parent
        begin = run.source_from
        del parent.children[run.source[begin : begin + self.page_bytes]]
        self.run_count -= 1
        self.epoch += 1
        if parent.parent is None:
            self.drop_empty_root(parent)

    def drop_empty_root(self, root: Run) -> None:
        """Forget a root that has neither children nor leases, so that namespaces do not pile up."""
        if root.parent is not None or root.children or root.locks > 1:
            return
        if self.roots.get(root.source) is root:
            del self.roots[root.source]
            del self.namespaces[root.source]
            self.epoch += 1

    def trim(self, run: Run) -> None:
        """After residency shrank: pages in no tier do not exist. Unlinks a run without pages."""
        n = run.device_pages
        if run.host_end > n:
            n = run.host_end
        if n == run.pages:
            return
        run.pages = n
        if run.stored_pages > n:
            run.stored_pages = n
        if not n:
            self.unlink(run)
            return
        if run.digests is not None:
            run.digests = run.digests[: n * DIGEST_BYTES]
        run.source, run.source_from = _part(run.source, run.source_from, n * self.page_bytes)

    def walk(self) -> Iterator[Run]:
        """Every run, parents before children."""
        stack = [run for root in self.roots.values() for run in root.children.values()]
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())


def _part(source: bytes, begin: int, size_bytes: int) -> tuple[bytes, int]:
    """Bytes that `source[begin : begin + size_bytes]` lies in, and where; at most twice as many."""
    if len(source) <= 2 * size_bytes:
        return source, begin
    return source[begin : begin + size_bytes], 0


def _share_operations(upper: Run, lower: Run) -> None:
    """After a split, each half is held by the operations whose page range reaches into it."""
    for name in ("backup", "load", "store"):
        operation: Operation | None = getattr(lower, name)
        if operation is not None:
            if operation.first_page < upper.end:
                setattr(upper, name, operation)
            if operation.end_page <= lower.start:
                setattr(lower, name, None)
                if operation.run is lower:  # nothing holds it any more: it may be gone tomorrow
                    operation.run = upper
