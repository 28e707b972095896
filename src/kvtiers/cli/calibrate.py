"""`kvtiers calibrate`: measure a live server, for replays whose seconds can be trusted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import typer

from kvtiers.errors import ConfigError
from kvtiers.planner.calibrate import Experiment
from kvtiers.planner.calibrate import calibrate as measure
from kvtiers.planner.machines import calibration_document

_TIMEOUT_SECONDS = 600.0
_CEILING = re.compile(r'^\S*link_ceiling_bytes_per_second\{[^}]*path="(\w+)"[^}]*\} (\S+)$', re.M)


def calibrate(
    url: Annotated[str, typer.Argument(help="A live server, e.g. http://127.0.0.1:8000.")],
    out: Annotated[Path, typer.Option(help="Calibration file to write, ending in .json.")] = Path(
        "calibration.json"
    ),
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, as the context allows.")
    ] = "64,128,256,512,1024",
    vocab_tokens: Annotated[
        int, typer.Option(help="Prompts are random token ids below this.")
    ] = 1_000,
    repeats: Annotated[int, typer.Option(help="Measurements of each, the best counts.")] = 3,
    api_key: Annotated[str | None, typer.Option(envvar="KVTIERS_API_KEY")] = None,
) -> None:
    """Measure prefill, decode and links of a live server into a calibration file.

    Sends prompts of random tokens, alone and four at a time; best on a server that is otherwise
    idle. `kvtiers replay --machine FILE` and `kvtiers plan --machine FILE` use the result.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"'{url}' is not the address of a server; write http://HOST:PORT")
    try:
        sizes = [int(part) for part in lengths.split(",")]
    except ValueError:
        raise ConfigError(f"lengths '{lengths}' are not whole numbers with commas") from None
    experiment = Experiment(sizes, vocab_tokens, repeats, seed=time.time_ns() % (1 << 32))
    server = _HttpServer(url.rstrip("/"), api_key)
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    machine = measure(server, experiment, urlsplit(url).netloc, f"{when} UTC at {url}")
    out.write_text(json.dumps(calibration_document(machine), indent=2) + "\n")
    cost = machine.cost
    typer.echo(
        f"prefill of 1,000 tokens {cost.prefill_seconds(1_000):.3f} s, decode step at 1,000 "
        f"tokens of context {cost.seconds(1, 1_000, 1_000) * 1e3:.1f} ms\nwritten to {out}"
    )


class _HttpServer:
    """A server behind its OpenAI-compatible API and its metrics."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        models = json.loads(self._ask("/v1/models"))
        self._model: str = models["data"][0]["id"]

    def complete(self, prompt: Sequence[int], max_tokens: int) -> None:
        answer = json.loads(
            self._ask(
                "/v1/completions",
                {
                    "model": self._model,
                    "prompt": list(prompt),
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            )
        )
        made = answer["usage"]["completion_tokens"]
        if made != max_tokens:
            raise ConfigError(
                f"{self._url} made {made} tokens where {max_tokens} were asked for; decode speed "
                "cannot be told from that"
            )

    def link_ceilings(self) -> dict[str, float]:
        return {path: float(value) for path, value in _CEILING.findall(self._ask("/metrics"))}

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, self._headers)
        try:
            with urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
                text: str = answer.read().decode()
                return text
        except HTTPError as error:
            detail = error.read().decode(errors="replace")[:300]
            raise ConfigError(f"{self._url}{path} answers {error.code}: {detail}") from error
        except (URLError, OSError) as error:
            raise ConfigError(f"{self._url}{path} does not answer: {error}") from error
