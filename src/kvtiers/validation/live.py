"""The live side: many clients ask one server at the same time, and its books are read at the end.

Owns the clients and nothing of the server; it talks to it over HTTP only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from kvtiers.demo.books import is_balanced, settle
from kvtiers.errors import KvtiersError
from kvtiers.validation.counts import Counts, counts_of_exposition
from kvtiers.validation.workload import Client, WorkloadShape, clients_of

REQUEST_SECONDS_MAX = 300.0


class RunBrokeOff(KvtiersError, RuntimeError):
    """A run of a validation could not be carried out to its end."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What a server was asked and what its books said at the end."""

    counts: Counts
    kv_bytes_per_token: int
    concurrent_max: int
    """Most requests that were under way at one moment."""
    seconds: float
    balanced: bool


def play(url: str, shape: WorkloadShape, answered: Callable[[], None]) -> LiveRun:
    """Play a whole workload against a fresh server; `answered` is called after each answer.

    Raises `RunBrokeOff` when the server refuses or fails a request, or does not answer.
    """
    try:
        return asyncio.run(_play(url, shape, answered))
    except* (RunBrokeOff, httpx.HTTPError) as group:
        first = group.exceptions[0]
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        why = str(first) or type(first).__name__
        raise RunBrokeOff(f"the workload broke off: {why}") from first


async def _play(url: str, shape: WorkloadShape, answered: Callable[[], None]) -> LiveRun:
    begun = time.perf_counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS_MAX, limits=limits) as http:
        models = await http.get("/v1/models")
        model = models.raise_for_status().json()["data"][0]["id"]
        crowd = _Crowd(http, model, shape.answer_tokens_max, answered)
        async with asyncio.TaskGroup() as group:
            for client in clients_of(shape):
                group.create_task(crowd.serve(client))
        await settle(http)
        state = (await http.get("/cache/state")).raise_for_status().json()
        if state["recording"]["problem"]:
            raise RunBrokeOff(f"the server could not record: {state['recording']['problem']}")
        metrics = (await http.get("/metrics")).raise_for_status().text
        return LiveRun(
            counts=counts_of_exposition(metrics),
            kv_bytes_per_token=int(state["kv_bytes_per_token"]),
            concurrent_max=crowd.concurrent_max,
            seconds=time.perf_counter() - begun,
            balanced=await is_balanced(http),
        )


class _Crowd:
    """Clients that share one connection pool, and how many of them wait at a time."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        model: str,
        answer_tokens_max: int,
        answered: Callable[[], None],
    ) -> None:
        self.concurrent_max = 0
        self._http = http
        self._model = model
        self._answer_tokens_max = answer_tokens_max
        self._answered = answered
        self._concurrent = 0

    async def serve(self, client: Client) -> None:
        """All visits of one client, one after another."""
        for pause_seconds, number in client.visits:
            await asyncio.sleep(pause_seconds)
            conversation = client.conversations[number]
            self._concurrent += 1
            self.concurrent_max = max(self.concurrent_max, self._concurrent)
            conversation.hear(await self._ask(conversation.ask()))
            self._concurrent -= 1
            self._answered()

    async def _ask(self, messages: list[dict[str, str]]) -> str:
        body = {
            "model": self._model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self._answer_tokens_max,
        }
        response = await self._http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise RunBrokeOff(f"the server refused a question: {_reason(response)}")
        text: str = response.json()["choices"][0]["message"]["content"]
        return text


def _reason(response: httpx.Response) -> str:
    """What the server says of an error, without the JSON around it."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {response.status_code}"
