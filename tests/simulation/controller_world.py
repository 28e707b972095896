"""A small machine without a model: the real cache, controller, transfer and storage, real bytes.

The KV of a page is a function of every token up to its end, as a causal model's is. So whatever
page a lease is given, its right content is known, and one wrong byte is found: a page read before
it was written, a slot reused before its copy has ended, or another page passed off as this one.

Only the clock is virtual; the threads of transfer and storage are real, and so are their races.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from functools import cache as memoize
from hashlib import blake2b
from pathlib import Path

import numpy as np

from kvtiers.core.cache import UnifiedRadixCache
from kvtiers.core.interface import Blocked, LeaseView, Refused
from kvtiers.events import FactTuple
from kvtiers.metrics.ledger import Ledger
from kvtiers.runtime.controller import CacheController
from kvtiers.runtime.flights import Deadlines
from kvtiers.runtime.storage_worker import StorageWorker
from kvtiers.storage.file import FileStore
from kvtiers.storage.memory import MemoryStore
from kvtiers.storage.port import PageStore
from kvtiers.testing.faulty_store import FaultyStore
from kvtiers.testing.faulty_transfer import FaultyTransfer, GatedTransfer
from kvtiers.transfer.cpu import CpuTransfer
from kvtiers.transfer.pools import DevicePool, HostPool
from kvtiers.types import (
    CacheConfig,
    Namespace,
    PoolSpec,
    SlotState,
    StorageOp,
    Tier,
    WritePolicy,
    token_key,
)

LAYERS = 3
PLANE_BYTES = (40, 24)  # k and v
PAGE_TOKENS = 4
PAGE_KEY_BYTES = 4 * PAGE_TOKENS
SPACE = Namespace("simulated")


@memoize
def page_planes(prefix: bytes) -> tuple[bytes, ...]:
    """The KV of the page that ends with the prefix, by plane."""
    return tuple(
        blake2b(prefix, digest_size=size, person=bytes([plane])).digest()
        for plane, size in enumerate(PLANE_BYTES * LAYERS)
    )


@dataclass
class Request:
    request_id: int
    prompt: bytes
    key: bytes = b""
    ticket_id: int | None = None
    lease: LeaseView | None = None
    layers_checked: int = 0
    computed: bool = False
    outputs_left: int = 0


@dataclass
class World:
    """Drives one seed. `step` does one random thing; `settle` lets everything end and checks."""

    seed: int
    fail_rate: float = 0.0
    delay_polls_max: int = 0
    error_rate: float = 0.0
    loss_rate: float = 0.0
    corruption_rate: float = 0.0
    hangs: bool = False
    gates: bool = False
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    device_pages: int = 40
    host_pages: int = 56
    stored_pages: int = 120
    directory: Path | None = None  # a file store there; None: the memory store

    now: float = 0.0
    requests: list[Request] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)
    prompts: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        spec = PoolSpec("kv", sum(PLANE_BYTES) * LAYERS)
        self.device = DevicePool(
            spec,
            [np.zeros((self.device_pages, size), np.uint8) for size in PLANE_BYTES * LAYERS],
            [plane // 2 for plane in range(2 * LAYERS)],
        )
        host = HostPool.like(self.device, self.host_pages)
        self.config = CacheConfig(
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            page_tokens=PAGE_TOKENS,
            pools=(spec,),
            storage=True,
            write_policy=self.write_policy,
            prefetch_threshold_tokens=PAGE_TOKENS,
            prefetch_batch_pages=3,
            prefetch_timeout_base_seconds=0.5,
        )
        self.cache = UnifiedRadixCache(self.config)
        self.ledger = Ledger(
            PAGE_TOKENS, (spec,), self.device_pages, self.host_pages, ("memory", "file")
        )
        self.gate = GatedTransfer(CpuTransfer([self.device], [host], clock=self.clock))
        self.transfer = FaultyTransfer(
            self.gate, self.seed, fail_rate=self.fail_rate, delay_polls_max=self.delay_polls_max
        )
        page_bytes = spec.bytes_per_slot
        self.inner_store: PageStore
        if self.directory is None:
            self.inner_store = MemoryStore(page_bytes, self.stored_pages * page_bytes)
        else:
            self.inner_store = FileStore(self.directory, page_bytes, 4 << 20)
        self.store = FaultyStore(
            self.inner_store,
            self.seed,
            error_rate=self.error_rate,
            loss_rate=self.loss_rate,
            corruption_rate=self.corruption_rate,
        )
        self.worker = StorageWorker(
            {"kv": self.store},
            [host],
            page_tokens=PAGE_TOKENS,
            layout="simulated",
            read_threads=2,
            read_bytes=2 * 4096,
            write_bytes=2 * 4096,
            clock=self.clock,
        )
        self.controller = CacheController(
            self.cache,
            self._fold,
            self.transfer,
            self.worker,
            deadlines=Deadlines(backup=2, load_back=2, prefetch=2, store=2, lookup=1),
            clock=self.clock,
        )
        self._next_request = 0

    def clock(self) -> float:
        return self.now

    def _fold(self, facts: list[FactTuple]) -> None:
        self.ledger.fold(facts)

    def note(self, what: str) -> None:
        self.reached[what] = self.reached.get(what, 0) + 1

    # ------------------------------------------------------------------ one random step

    def step(self) -> None:
        self.now += self.random.uniform(0, 0.2)
        self._disturb()
        if len(self.requests) < 5 and self.random.random() < 0.6:
            self._arrive()
        for request in list(self.requests):
            if request.lease is None:
                self._admit(request)
            else:
                self._run(request)
        self.cache.tick(self.now)
        self.controller.pump()
        time.sleep(0)
        self.ledger.check()

    def _disturb(self) -> None:
        dice = self.random.random()
        if self.gates:
            if dice < 0.05:
                self.gate.shut()
            elif dice < 0.15:
                self.gate.release()
        if self.hangs:
            if 0.2 < dice < 0.23:
                ops = [StorageOp.EXISTS, StorageOp.READ, StorageOp.WRITE]
                self.store.hang(self.random.choice(ops))
            elif 0.3 < dice < 0.36:
                self.store.release()

    def _arrive(self) -> None:
        """A new prompt, or one that continues or repeats what was there before."""
        prompt = b""
        if self.prompts and self.random.random() < 0.75:
            known = self.random.choice(self.prompts)
            pages = self.random.randint(0, len(known) // PAGE_KEY_BYTES)
            prompt = known[: pages * PAGE_KEY_BYTES]
        fresh = [self.random.randrange(50) for _ in range(self.random.randint(1, 24))]
        prompt += token_key(fresh)
        request = Request(self._next_request, prompt, outputs_left=self.random.randint(0, 9))
        self._next_request += 1
        request.ticket_id = self.cache.prefetch(request.request_id, prompt, SPACE, self.now)
        self.requests.append(request)

    def _admit(self, request: Request) -> None:
        answer = self.cache.admit(
            request.request_id,
            request.prompt,
            SPACE,
            self.now,
            reserve_tokens=PAGE_TOKENS,
            ticket_id=request.ticket_id,
        )
        if isinstance(answer, Refused):
            if request.ticket_id is not None:
                self.cache.cancel_prefetch(request.ticket_id, self.now)
            self.requests.remove(request)
        elif isinstance(answer, Blocked):
            self.note(f"blocked on {answer.on}")
            if self.random.random() < 0.05:
                if request.ticket_id is not None:
                    self.cache.cancel_prefetch(request.ticket_id, self.now)
                self.requests.remove(request)
        else:
            request.lease = answer
            request.ticket_id = None
            request.key = request.prompt
            request.layers_checked = 0
            request.computed = False
            for tier in ("device", "host", "storage"):
                if getattr(answer.split, f"{tier}_hit"):
                    self.note(f"{tier} hit")
        self.controller.pump()

    def _run(self, request: Request) -> None:
        lease = request.lease
        assert lease is not None
        if lease.voided:
            self.note("voided")
            self.cache.abort(lease, self.now)
            request.lease = None
            return
        if request.layers_checked < LAYERS and not self._check_hits(request, lease):
            return
        if not request.computed:
            self._compute(lease, request.key, lease.shared_tokens)
            request.computed = True
        if lease.load_ops:
            return  # its hits are booked when its loads are acknowledged
        self.cache.commit(lease, request.key, len(request.key) // 4, self.now)
        self.check_pages(lease, request.key)
        if request.outputs_left and self._decode(request, lease):
            return
        ends = [self.cache.finish, self.cache.finish, self.cache.retract, self.cache.abort]
        end = self.random.choice(ends)
        end(lease, self.now)
        self.prompts.append(request.key)
        self.prompts = self.prompts[-40:]
        self.requests.remove(request)

    def _decode(self, request: Request, lease: LeaseView) -> bool:
        tokens = len(request.key) // 4
        if not self.cache.extend(lease, tokens + 1, self.now):
            return False
        request.outputs_left -= 1
        request.key += token_key([self.random.randrange(50)])
        self._compute(lease, request.key, tokens)
        return True

    # ------------------------------------------------------------------ what is in the pages

    def _check_hits(self, request: Request, lease: LeaseView) -> bool:
        """Read the layers of the pages that were granted, each once it is said to be there."""
        table = lease.block_table()
        while request.layers_checked < LAYERS:
            layer = request.layers_checked
            if not self.controller.wait_layer(lease.load_ops, layer, timeout_seconds=0.01):
                self.note("layer not there")
                return False
            for page in range(lease.shared_tokens // PAGE_TOKENS):
                self._check_page(request.key, page, int(table[page]), (2 * layer, 2 * layer + 1))
            request.layers_checked += 1
        return True

    def check_pages(self, lease: LeaseView, key: bytes) -> None:
        """Every complete page of a running request is what it was."""
        table = lease.block_table()
        for page in range(len(key) // PAGE_KEY_BYTES):
            self._check_page(key, page, int(table[page]), range(2 * LAYERS))

    def _check_page(
        self, key: bytes, page: int, slot: int, planes: range | tuple[int, int]
    ) -> None:
        expected = page_planes(key[: (page + 1) * PAGE_KEY_BYTES])
        for plane in planes:
            got = self.device.planes[plane][slot].tobytes()
            assert got == expected[plane], (
                f"seed {self.seed}: page {page} in device slot {slot} has wrong bytes in plane "
                f"{plane} at {self.now:.2f} s"
            )

    def _compute(self, lease: LeaseView, key: bytes, from_token: int) -> None:
        """What a forward pass does: write the KV of the lease's own positions."""
        table = lease.block_table()
        first = max(from_token, lease.shared_tokens) // PAGE_TOKENS
        for page in range(first, -(-len(key) // PAGE_KEY_BYTES)):
            content = page_planes(key[: (page + 1) * PAGE_KEY_BYTES])
            for plane, raw in enumerate(content):
                self.device.planes[plane][table[page]] = np.frombuffer(raw, np.uint8)

    # ------------------------------------------------------------------ the end

    def settle(self) -> None:
        """No more faults; everything ends; the books balance and no slot is left behind."""
        self.gate.release()
        self.store.release()
        for request in self.requests:
            if request.ticket_id is not None:
                self.cache.cancel_prefetch(request.ticket_id, self.now)
            if request.lease is not None:
                self.cache.abort(request.lease, self.now)
        self.requests.clear()
        assert self.controller.drain(30), self.controller.oldest_pending()
        assert self.controller.idle
        self.ledger.check()
        counted = self.cache.recount()
        assert self.ledger.audit(counted) == {}
        for tier in (Tier.DEVICE, Tier.HOST):
            for state in (SlotState.QUARANTINED, SlotState.RESERVED, SlotState.PRIVATE):
                assert counted.get((tier, state), 0) == 0, (tier, state)
        open_ends = {what: count for what, count in self.ledger.open_ends().items() if count}
        assert open_ends == {}, open_ends
        self.check_storage()
        assert self.controller.close(10)

    def check_storage(self) -> None:
        """Whatever storage holds under a page's name is that page."""
        buffer = memoryview(bytearray(self.device.spec.bytes_per_slot))
        for prompt in self.prompts:
            pages = len(prompt) // PAGE_KEY_BYTES
            refs = self.worker._names.refs("kv", SPACE, prompt, 0, pages)
            for page, ref in enumerate(refs):
                (outcome,) = self.inner_store.read_into([ref], [buffer])
                if outcome is None:
                    self.note("stored page checked")
                    expected = page_planes(prompt[: (page + 1) * PAGE_KEY_BYTES])
                    assert bytes(buffer) == b"".join(expected), f"seed {self.seed}, page {page}"
