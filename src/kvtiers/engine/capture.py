"""Logits kept for inspection: how exactness is checked from outside the engine.

Owns a bounded buffer of the logits behind each token of the requests that asked for it. Must not
know models or tensors of the device. When the buffer is full the oldest request's logits go first,
so an inspector that fetches each answer as it comes never misses one.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


class LogitsCapture:
    """Logits by scheduler request id and output index. Safe to call from any thread."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._rows: dict[int, dict[int, Logits]] = {}
        self._used_bytes = 0

    def want(self, request_id: int) -> None:
        """Keep what `record` is given for this request from now on."""
        with self._lock:
            self._rows[request_id] = {}

    def wants(self, request_id: int) -> bool:
        return request_id in self._rows

    def record(self, request_id: int, output_index: int, row: Logits) -> None:
        """Keep the logits that chose token `output_index`; a second time replaces the first."""
        with self._lock:
            rows = self._rows.get(request_id)
            if rows is None:
                return
            previous = rows.get(output_index)
            self._used_bytes += row.nbytes - (previous.nbytes if previous is not None else 0)
            rows[output_index] = row
            while self._used_bytes > self.budget_bytes and len(self._rows) > 1:
                self._forget(next(iter(self._rows)))

    def take(self, request_id: int) -> Logits | None:
        """The logits of a request in order, (tokens, vocabulary), once; None when not kept."""
        with self._lock:
            rows = self._rows.get(request_id)
            self._forget(request_id)
        if not rows:
            return None
        return np.stack([rows[index] for index in sorted(rows)])

    def _forget(self, request_id: int) -> None:
        rows = self._rows.pop(request_id, {})
        self._used_bytes -= sum(row.nbytes for row in rows.values())
