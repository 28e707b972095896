"""A seeded synthesiser of traffic: chats, agents with tool calls, and retrieval (RAG).

    chat    a system prompt shared by many; turns of user text, each prompt holding all before it
    agent   a long shared prompt of instructions and tools; many quick steps, each adding a tool's
            output, little text made
    rag     one turn: instructions, a few documents of Zipf popularity (most popular first, so
            that prefixes are shared), a question

Sessions begin as a Poisson process and interleave; a later turn follows the end of the earlier
one by a thinking time. The same spec gives the same requests, in order of arrival. Memory grows
with the sessions that are open, not with the length of the trace.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

import numpy as np
import numpy.typing as npt

from kvtiers.errors import ConfigError
from kvtiers.workload.request import TraceRequest
from kvtiers.workload.synth_paths import PathBook, PromptPath


class Kind(StrEnum):
    """What a session is; also the `kind` of its requests."""

    CHAT = "chat"
    AGENT = "agent"
    RAG = "rag"


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of one kind of session, in tokens, turns and seconds; medians where not exact.

    `system_prompts` different ones of `system_tokens` each (exact) are shared, by Zipf's law;
    a turn adds `input_tokens`, makes `output_tokens`, and the next follows `think_seconds` later.
    """

    system_prompts: int
    system_tokens: int
    turns: float
    input_tokens: float
    output_tokens: float
    think_seconds: float


SHAPES = {
    Kind.CHAT: Shape(20, 600, 4, 180, 250, 40.0),
    Kind.AGENT: Shape(5, 6_000, 12, 900, 120, 3.0),
    Kind.RAG: Shape(4, 300, 1, 60, 300, 1.0),
}

RAG_DOCUMENTS = 2_000
RAG_DOCUMENT_TOKENS = 900
RAG_DOCUMENTS_PER_PROMPT = 4
SECONDS_PER_OUTPUT_TOKEN = 0.02
"""How long the turn before takes; a trace has arrivals only, so the synthesiser assumes it."""


@dataclass(frozen=True, slots=True)
class SynthesisSpec:
    """What to make. Weights are shares of sessions; they need not sum to 1."""

    requests: int
    seed: int = 0
    sessions_per_second: float = 1.0
    block_tokens: int = 16
    chat: float = 0.6
    agent: float = 0.2
    rag: float = 0.2
    prompt_tokens_max: int = 128_000

    def __post_init__(self) -> None:
        weights = (self.chat, self.agent, self.rag)
        problems = []
        if self.requests < 1:
            problems.append(f"requests is {self.requests}; a trace has at least 1")
        if not self.sessions_per_second > 0:
            problems.append(
                f"sessions_per_second is {self.sessions_per_second}; it must be positive"
            )
        if min(weights) < 0 or not sum(weights) > 0:
            problems.append(f"weights are {weights}; they are >= 0 and one of them is positive")
        if self.block_tokens < 1:
            problems.append(f"block_tokens is {self.block_tokens}; a block has at least 1 token")
        longest_system = max(shape.system_tokens for shape in SHAPES.values())
        if self.prompt_tokens_max <= longest_system:
            problems.append(
                f"prompt_tokens_max is {self.prompt_tokens_max}; "
                f"the longest system prompt alone has {longest_system} tokens"
            )
        if problems:
            raise ConfigError("; ".join(problems))


@dataclass(slots=True)
class _Session:
    name: str
    kind: Kind
    path: PromptPath
    turns_left: int
    turn: int = 0


def synthesise(spec: SynthesisSpec) -> Iterator[TraceRequest]:
    """`spec.requests` requests in order of arrival, the first one at about 0 s."""
    return _Synthesiser(spec).requests()


class _Synthesiser:
    def __init__(self, spec: SynthesisSpec) -> None:
        self.spec = spec
        self.rng = np.random.default_rng(spec.seed)
        self.book = PathBook(spec.block_tokens)
        self.systems = {
            kind: [self.book.new_segment() for _ in range(shape.system_prompts)]
            for kind, shape in SHAPES.items()
        }
        self.documents = [self.book.new_segment() for _ in range(RAG_DOCUMENTS)]
        weights = np.array([spec.chat, spec.agent, spec.rag], float)
        self.kind_shares = weights / weights.sum()
        self.system_shares = {k: _zipf(s.system_prompts, 1.0) for k, s in SHAPES.items()}
        self.document_shares = _zipf(RAG_DOCUMENTS, 0.9)

    def requests(self) -> Iterator[TraceRequest]:
        # (time, tie-break, session); None stands for the beginning of a new session
        events: list[tuple[float, int, _Session | None]] = [(0.0, 0, None)]
        numbers = count(1)
        made = 0
        while made < self.spec.requests:
            now, number, session = heapq.heappop(events)
            if session is None:
                gap = self.rng.exponential(1 / self.spec.sessions_per_second)
                heapq.heappush(events, (now + gap, next(numbers), None))
                session = self._begin(number)
            request, pause_seconds = self._turn(session, now)
            yield request
            made += 1
            if session.turns_left and session.path.tokens < self.spec.prompt_tokens_max:
                heapq.heappush(events, (now + pause_seconds, next(numbers), session))

    def _begin(self, number: int) -> _Session:
        kind = list(Kind)[self.rng.choice(len(Kind), p=self.kind_shares)]
        shape = SHAPES[kind]
        which = self.rng.choice(shape.system_prompts, p=self.system_shares[kind])
        path = self.book.append_shared(
            self.book.root, self.systems[kind][which], shape.system_tokens
        )
        if kind is Kind.RAG:
            path = self._with_documents(path)
        turns = 1 if shape.turns <= 1 else int(self.rng.geometric(1 / shape.turns))
        return _Session(f"s{number}", kind, path, turns)

    def _with_documents(self, path: PromptPath) -> PromptPath:
        chosen = self.rng.choice(
            RAG_DOCUMENTS, RAG_DOCUMENTS_PER_PROMPT, replace=False, p=self.document_shares
        )
        for document in sorted(chosen.tolist()):  # by popularity
            if path.tokens + RAG_DOCUMENT_TOKENS >= self.spec.prompt_tokens_max:
                break
            path = self.book.append_shared(path, self.documents[document], RAG_DOCUMENT_TOKENS)
        return path

    def _turn(self, session: _Session, now: float) -> tuple[TraceRequest, float]:
        shape = SHAPES[session.kind]
        room = self.spec.prompt_tokens_max - session.path.tokens
        prompt = self.book.append_fresh(
            session.path, min(self._tokens(shape.input_tokens), max(1, room))
        )
        output_tokens = self._tokens(shape.output_tokens)
        whole = self.book.append_fresh(prompt, output_tokens)
        session.turn += 1
        session.turns_left -= 1
        request = TraceRequest(
            arrival_seconds=now,
            input_tokens=prompt.tokens,
            output_tokens=output_tokens,
            block_ids=self.book.prompt_ids(prompt),
            block_tokens=self.spec.block_tokens,
            chat_id=session.name,
            turn=session.turn,
            kind=session.kind.value,
            output_block_ids=whole.whole_ids[len(prompt.whole_ids) :],
        )
        session.path = whole
        think_seconds = self.rng.exponential(shape.think_seconds)
        return request, output_tokens * SECONDS_PER_OUTPUT_TOKEN + think_seconds

    def _tokens(self, median: float) -> int:
        """A log-normal length around its median; its 95th percentile is about four times that."""
        return max(1, round(math.exp(self.rng.normal(math.log(median), 0.85))))


def _zipf(items: int, exponent: float) -> npt.NDArray[np.float64]:
    weights = np.arange(1, items + 1, dtype=np.float64) ** -exponent
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares
