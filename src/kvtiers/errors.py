"""What can go wrong by misuse. Operating faults (slow, full, gone, corrupt) are outcomes instead.

KvtiersError
├── ConfigError            settings that contradict each other or the machine
├── InvalidTokens          a prompt that is not a sequence of token ids
├── UnknownName            a policy, pool, tier, model or store nobody registered
├── ProtocolError          a call in an order that the interface forbids; state unchanged
│   ├── LeaseEnded         a lease was used or ended a second time
│   └── UnknownOperation   an ack for a copy that was never ordered, or already ended
├── InvariantViolation     a book or a structure contradicts itself: a bug in kvtiers
├── StorageError           a store cannot be opened or was misused
│   └── StorageLocked      another process owns the directory
├── TraceError             a traffic trace that cannot be read
├── DecisionLogError       a decision log that cannot be read
├── ModelError             a model cannot be found, converted or served
├── InvalidRequest         a request that can never be served here
└── EngineBusy             a request that cannot be taken now: queue full, draining, stopped
"""

from __future__ import annotations

from collections.abc import Iterable


class KvtiersError(Exception):
    """Base of every error that kvtiers raises on purpose."""


class ConfigError(KvtiersError, ValueError):
    """Settings contradict each other or the machine."""


class InvalidTokens(KvtiersError, ValueError):
    """A prompt is not a flat sequence of token ids in [0, 2**31)."""


class UnknownName(KvtiersError, LookupError):
    """A name nobody registered; the message lists the known ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} '{name}'; known: {', '.join(sorted(known))}")


class ProtocolError(KvtiersError, RuntimeError):
    """A call in an order that the interface forbids. Nothing was changed."""


class LeaseEnded(ProtocolError):
    """A lease was used after its end, or ended a second time."""


class UnknownOperation(ProtocolError):
    """An acknowledgement for a copy that was never ordered, or has already ended."""


class InvariantViolation(KvtiersError, AssertionError):
    """A book or a structure contradicts itself. This is a bug in kvtiers: please report it."""


class StorageError(KvtiersError, RuntimeError):
    """A store cannot be opened or was misused."""


class StorageLocked(StorageError):
    """Another process owns the storage directory."""


class TraceError(KvtiersError, ValueError):
    """A traffic trace cannot be read; the message names the file and the line, if there is one."""


class DecisionLogError(KvtiersError, ValueError):
    """A decision log cannot be read; the message names the line where there is one."""


class ModelError(KvtiersError, RuntimeError):
    """A model cannot be found, converted or served."""


class InvalidRequest(KvtiersError, ValueError):
    """A request that can never be served here: no tokens, too long, impossible parameters."""


class EngineBusy(KvtiersError, RuntimeError):
    """A request that cannot be taken now: the queue is full, or the engine drains or stopped."""
