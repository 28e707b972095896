"""Conducts the demo: start the server, play the acts, stop it, check every answer, report."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from kvtiers.demo.books import is_balanced, read_counters, settle
from kvtiers.demo.checks import ActResult, Check, check_act, check_whole
from kvtiers.demo.client import DemoError, ask
from kvtiers.demo.exactness import Reusable, Turn, compare_conversation
from kvtiers.demo.report import as_json, print_checks, print_tables
from kvtiers.demo.server_process import ServerProcess
from kvtiers.demo.workload import ACTS, Act, Visitor, visitors
from kvtiers.engine.codec import TokenizerCodec
from kvtiers.engine.models import model_directory, models_dir
from kvtiers.engine.reference import ReferenceModel

PAGE_TOKENS = 16
DEVICE_PAGES = 144
HOST_PAGES = 640
CONTEXT_TOKENS = 2048
VISITORS_AT_ONCE = 3
REQUEST_SECONDS_MAX = 120.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line may ask for."""

    model: str
    corrupt_one_page: bool = False
    keep: bool = False


def run(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Play the demo and print it; the result as JSON-ready data, `passed` in it."""
    begun = time.perf_counter()
    directory = Path(tempfile.mkdtemp(prefix="kvtiers-demo-"))
    try:
        return _Demo(options, console, directory).play(begun)
    finally:
        if options.keep:
            console.print(f"storage and server logs are kept in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


class _Demo:
    """One run of the demo in a directory of its own."""

    def __init__(self, options: DemoOptions, console: Console, directory: Path) -> None:
        self._options = options
        self._console = console
        self._directory = directory
        self._visitors = visitors()
        self._reusable = Reusable(PAGE_TOKENS)
        self._turns: dict[str, list[tuple[ActResult, int]]] = {v.name: [] for v in self._visitors}
        self._exit_statuses: list[int] = []

    def play(self, begun: float) -> dict[str, Any]:
        console = self._console
        model_path = model_directory(self._options.model, models_dir(None))
        self._codec = TokenizerCodec(model_path, 0)
        console.print(
            "[bold]kvtiers demo[/]: one model, three tiers, every answer checked against the same "
            "model without a cache"
        )
        results: list[ActResult] = []
        server: ServerProcess | None = None
        try:
            with self._progress() as progress:
                for act in ACTS:
                    if server is not None and act.restart:
                        self._exit_statuses.append(server.stop())
                        server = None
                    if server is None:
                        server = self._start(progress)
                    results.append(self._play(act, server, progress))
                assert server is not None
                self._exit_statuses.append(server.stop())
                server = None
                self._compare(progress)
        finally:
            if server is not None:
                server.kill()
        checks = [check for result in results for check in check_act(result)]
        checks += check_whole(results, self._exit_statuses)
        print_tables(console, results)
        print_checks(console, checks)
        seconds = time.perf_counter() - begun
        self._conclude(checks, seconds)
        about = {"model": self._options.model, "dtype": "float32", "seconds": seconds}
        return as_json(results, checks, about)

    # ------------------------------------------------------------------ the server

    def _start(self, progress: Progress) -> ServerProcess:
        task = self._begin(progress, "start the server", 1)
        number = len(self._exit_statuses)
        server = ServerProcess(
            [
                self._options.model,
                *("--dtype", "float32", "--page-tokens", str(PAGE_TOKENS)),
                *("--device-pages", str(DEVICE_PAGES), "--host-pages", str(HOST_PAGES)),
                *("--storage", str(self._directory / "storage")),
                *("--context-tokens", str(CONTEXT_TOKENS), "--prefetch-policy", "wait_complete"),
                "--debug-hooks",
            ],
            self._directory / f"server-{number}.log",
        )
        try:
            server.wait_until_listening()
        except BaseException:
            server.kill()
            raise
        if not number:
            for line in server.decided():
                progress.console.print(f"  {line}", highlight=False)
        progress.advance(task)
        return server

    # ------------------------------------------------------------------ an act

    def _play(self, act: Act, server: ServerProcess, progress: Progress) -> ActResult:
        try:
            return asyncio.run(self._play_act(act, server.url, progress))
        except* (DemoError, httpx.HTTPError) as group:
            first = group.exceptions[0]
            why = str(first) or type(first).__name__
            raise DemoError(f"act '{act.name}' broke off: {why}\n{server.end_of_log()}") from first

    async def _play_act(self, act: Act, url: str, progress: Progress) -> ActResult:
        result = ActResult(act)
        task = self._begin(
            progress,
            f"act '{act.name}': {len(self._visitors)} visitors, {VISITORS_AT_ONCE} at once",
            len(self._visitors) * act.turns,
        )
        begun = time.perf_counter()
        async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS_MAX) as http:
            models = await http.get("/v1/models")
            model = models.raise_for_status().json()["data"][0]["id"]
            before = await read_counters(http)
            room = asyncio.Semaphore(VISITORS_AT_ONCE)

            async def visit(visitor: Visitor) -> None:
                async with room:
                    for _ in range(act.turns):
                        await self._ask(visitor, result, http, model)
                        progress.advance(task)

            async with asyncio.TaskGroup() as group:
                for visitor in self._visitors:
                    group.create_task(visit(visitor))
            await settle(http)
            result.seconds = time.perf_counter() - begun
            result.counters = (await read_counters(http)).since(before)
            result.balanced = await is_balanced(http)
            if self._options.corrupt_one_page and act is ACTS[0]:
                await self._corrupt(http, progress)
        return result

    async def _ask(
        self, visitor: Visitor, result: ActResult, http: httpx.AsyncClient, model: str
    ) -> None:
        messages = visitor.ask()
        prompt = self._codec.encode_chat(messages)
        reusable_tokens = self._reusable.of(prompt)
        reply = await ask(http, model, messages, f"{visitor.name}-{visitor.asked}")
        if reply.prompt_tokens != prompt.size:
            raise DemoError(
                f"the server counted {reply.prompt_tokens} prompt tokens, the demo {prompt.size}"
            )
        visitor.hear(reply.text)
        answer = np.asarray(reply.output_ids, np.int32)
        self._reusable.add(prompt, answer)
        self._turns[visitor.name].append((result, len(result.replies)))
        result.replies.append(reply)
        result.turns.append(Turn(prompt, answer, reply.logits))
        result.reusable_tokens.append(reusable_tokens)

    async def _corrupt(self, http: httpx.AsyncClient, progress: Progress) -> None:
        response = await http.post("/cache/debug/corrupt-host-page")
        if response.status_code != 200:
            raise DemoError(f"no page was damaged: {response.text}")
        progress.console.print(f"[yellow]damaged one host page on purpose: {response.json()}[/]")

    # ------------------------------------------------------------------ the comparison

    def _compare(self, progress: Progress) -> None:
        total = sum(len(places) for places in self._turns.values())
        task = self._begin(progress, "the same answers without a cache", total)
        reference = ReferenceModel.load(self._options.model)
        for places in self._turns.values():
            turns = [result.turns[position] for result, position in places]
            comparisons = compare_conversation(reference, turns, lambda: progress.advance(task))
            for (result, _), comparison in zip(places, comparisons, strict=True):
                result.comparisons.append(comparison)

    def _conclude(self, checks: list[Check], seconds: float) -> None:
        failed = sum(not check.holds for check in checks)
        verdict = (
            f"[bold red]{failed} of {len(checks)} checks failed[/]"
            if failed
            else f"[bold green]all {len(checks)} checks hold[/]"
        )
        self._console.print(f"{verdict} after {seconds:.0f} s", highlight=False)

    def _begin(self, progress: Progress, what: str, total: int) -> TaskID:
        if progress.disable:  # a log is told what begins, since no bar will show it
            self._console.print(what, highlight=False)
        return progress.add_task(what, total=total)

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
