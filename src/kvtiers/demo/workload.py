"""What the visitors read and ask: eight texts, four questions each, one shared system prompt.

Pure data and one small state machine. A visitor's first message brings the text, later ones only
ask; the conversation goes on with the answers that the server really gave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from typing import TypeAlias

ChatMessage: TypeAlias = dict[str, str]

QUESTIONS: dict[str, tuple[str, str, str, str]] = {
    "lighthouse": (
        "When was the lighthouse lit for the first time?",
        "Who was the first keeper?",
        "What did the lamp burn before electric light?",
        "How many cracks are there in the slate now?",
    ),
    "mill": (
        "What was the mill before it made paper?",
        "What is the watermark of the paper?",
        "Who built the first machine?",
        "What is in the building now?",
    ),
    "orchard": (
        "How many trees were planted at first?",
        "Which kind of apple did best?",
        "When may people pick the apples?",
        "Who does the grafting?",
    ),
    "clock": (
        "How many faces does the clock have?",
        "Why does the marsh face lose time?",
        "What is written on the bell?",
        "On which days are the works wound?",
    ),
    "ferry": (
        "Who hung the first rope?",
        "What was the toll at first?",
        "What was the boat called?",
        "When was the bridge opened?",
    ),
    "school": (
        "What is written over the door?",
        "How many pupils did Miss Farrow have?",
        "What did the surveyor find from the maps?",
        "When was the school closed?",
    ),
    "observatory": (
        "Who put the telescope on the roof?",
        "How many stars did they watch?",
        "What did Cecily notice in 1901?",
        "Who won the barrel of beer?",
    ),
    "market": (
        "On which day is the market held?",
        "How long is the pole?",
        "What may not be sold in the market?",
        "How many stalls are there today?",
    ),
}


@dataclass(frozen=True, slots=True)
class Act:
    """One act: every visitor asks `turns` questions; before it the server may be restarted."""

    name: str
    turns: int
    restart: bool
    tier_to_show: str | None
    """The tier whose hits must be at least half of the act's reusable tokens."""


ACTS = (
    Act("fill", turns=2, restart=False, tier_to_show=None),
    Act("return", turns=1, restart=False, tier_to_show="host"),
    Act("restart", turns=1, restart=True, tier_to_show="storage"),
)


@dataclass(slots=True)
class Visitor:
    """One conversation and where it stands."""

    name: str
    text: str
    messages: list[ChatMessage] = field(default_factory=list)
    asked: int = 0

    def ask(self) -> list[ChatMessage]:
        """The conversation with the next question at its end."""
        question = QUESTIONS[self.name][self.asked]
        content = question if self.asked else f"{self.text}\n\n{question}"
        self.asked += 1
        self.messages.append({"role": "user", "content": content})
        return list(self.messages)

    def hear(self, answer: str) -> None:
        """Go on from the server's answer."""
        self.messages.append({"role": "assistant", "content": answer})


def visitors() -> list[Visitor]:
    """All visitors before their first question."""
    system = {"role": "system", "content": _read("system")}
    return [Visitor(name, _read(name), [dict(system)]) for name in QUESTIONS]


def _read(name: str) -> str:
    text = resources.files("kvtiers.demo").joinpath("texts", f"{name}.txt").read_text("utf-8")
    return text.strip()
