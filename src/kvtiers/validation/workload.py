"""What the clients of a validation ask: the demo's texts, in many conversations at once.

Half of the clients talk under the demo's system prompt, half under another one, so there are two
shared beginnings, each followed by one of eight texts that several clients bring, and then by what
only this conversation said. Each client holds several conversations and goes on with one of them
at random after a pause, so a conversation's KV is asked for again after short and after long times.

Pure data from a seed; the answers that conversations go on with are the server's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from kvtiers.demo.workload import QUESTIONS, ChatMessage, visitors
from kvtiers.errors import ConfigError
from kvtiers.planner.machines import StepCost

BUSY_SHARE = 0.6
"""Of the time that a paced workload keeps its machine busy. Requests then meet and wait; but near
saturation any error of speed becomes one of queueing, and a replay says little."""
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 1.0, 10.0
"""A slow machine may be busier than that, so that the run does not take for ever."""

# What one of these requests comes to, roughly: for the pace only.
_COMPUTED_TOKENS, _CONTEXT_TOKENS, _TOGETHER, _ANSWERED_SHARE = 105, 600, 4, 0.85

_OTHER_SYSTEM = """\
You prepare the evening broadcast of a local radio station. Listeners send in a short text about \
their town and a question about it. Write what the announcer should read out: one plain sentence, \
in the present tense where the text allows it, with every name, number and date as the text has \
it. Where the text gives no answer, write that the station will ask its listeners. Never mention \
the sender, never promise a prize, and never guess. Spell out numbers up to twelve. If two people \
are named, name the older one first. The announcer has ten seconds, so do not write more than \
thirty words, and do not use words that are hard to say aloud.\
"""


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """How much is asked. Requests in all: clients x conversations x turns."""

    clients: int = 8
    conversations: int = 3
    turns: int = 4
    pause_seconds: float | None = None
    """Mean of the exponentially distributed pause of a client before each request; None: as the
    machine's speed allows (`paced`)."""
    answer_tokens_max: int = 24
    text_characters_max: int | None = None
    """Cut texts and system prompts to this, for models of small context."""
    seed: int = 1

    @property
    def requests(self) -> int:
        return self.clients * self.conversations * self.turns

    def paced(self, cost: StepCost) -> WorkloadShape:
        """The same with a pause that keeps a machine of this cost busy for `BUSY_SHARE`."""
        if self.pause_seconds is not None:
            return self
        decode = cost.seconds(_TOGETHER, _TOGETHER * _CONTEXT_TOKENS, _TOGETHER * _CONTEXT_TOKENS)
        prefill = cost.prefill_seconds(_COMPUTED_TOKENS, _CONTEXT_TOKENS)
        answering = decode * self.answer_tokens_max * _ANSWERED_SHARE
        busy = prefill + answering / _TOGETHER
        pause = self.clients * busy / BUSY_SHARE - (prefill + answering)
        return replace(self, pause_seconds=min(PAUSE_SECONDS_MAX, max(PAUSE_SECONDS_MIN, pause)))


@dataclass(slots=True)
class Conversation:
    """One conversation and where it stands."""

    name: str
    text: str
    messages: list[ChatMessage]
    first_question: int
    asked: int = 0

    def ask(self) -> list[ChatMessage]:
        """The conversation with the next question at its end."""
        questions = QUESTIONS[self.name]
        question = questions[(self.first_question + self.asked) % len(questions)]
        content = question if self.asked else f"{self.text}\n\n{question}"
        self.asked += 1
        self.messages.append({"role": "user", "content": content})
        return list(self.messages)

    def hear(self, answer: str) -> None:
        """Go on from the server's answer."""
        self.messages.append({"role": "assistant", "content": answer})


@dataclass(slots=True)
class Client:
    """One client: before each request a pause in seconds, then a turn of a conversation."""

    conversations: list[Conversation]
    visits: list[tuple[float, int]] = field(default_factory=list)


def clients_of(shape: WorkloadShape) -> list[Client]:
    """The clients of a workload before their first request; equal for equal shapes."""
    rng = np.random.default_rng(shape.seed)
    cut = slice(shape.text_characters_max)
    by_name = {visitor.name: visitor for visitor in visitors()}
    names = list(by_name)
    system = next(iter(by_name.values())).messages[0]["content"]
    pause_seconds = shape.pause_seconds
    if pause_seconds is None:
        raise ConfigError("a workload needs its pause; let `paced` find one")
    clients = []
    for number in range(shape.clients):
        prompt = (system, _OTHER_SYSTEM)[number % 2]
        conversations = []
        for k in range(shape.conversations):
            name = names[(number // 2 + 3 * k) % len(names)]
            first = [{"role": "system", "content": prompt[cut]}]
            conversations.append(Conversation(name, by_name[name].text[cut], first, number + k))
        order = rng.permutation(np.repeat(np.arange(shape.conversations), shape.turns))
        pauses = rng.exponential(1.0, len(order)) * pause_seconds
        visits = [(float(pause), int(k)) for pause, k in zip(pauses, order, strict=True)]
        clients.append(Client(conversations, visits))
    return clients
