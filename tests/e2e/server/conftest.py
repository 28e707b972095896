"""A tiny random model in a directory, and servers on it: real processes on 127.0.0.1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

torch = pytest.importorskip("torch", reason="needs kvtiers[serve]")

START_SECONDS_MAX = 120.0
STOP_SECONDS_MAX = 60.0
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(directory: Path, seed: int = 0) -> Path:
    """A Llama of two layers with random float32 weights; every byte is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(directory)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(alphabet) + len(special),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


class RunningServer:
    """`kvtiers serve` as a child process."""

    def __init__(self, arguments: list[str], log_path: Path) -> None:
        self.log_path = log_path
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with log_path.open("wb") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "kvtiers.cli", "serve", *arguments, "--port", "0"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self.url = self._wait()
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.model = "tiny"

    def _wait(self) -> str:
        give_up = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < give_up and self.child.poll() is None:
            for line in self.log().splitlines():
                if line.startswith("listening on "):
                    return line.removeprefix("listening on ")
            time.sleep(0.05)
        self.kill()
        raise AssertionError(f"the server did not start:\n{self.log()}")

    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(STOP_SECONDS_MAX)

    def kill(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(STOP_SECONDS_MAX)

    def state(self) -> dict:
        return self.http.get("/cache/state").raise_for_status().json()

    def ledger(self) -> dict:
        return self.http.get("/cache/ledger").raise_for_status().json()

    def wait_until_quiet(self, seconds: float = 30.0) -> dict:
        """The state once no request and no copy is left."""
        give_up = time.monotonic() + seconds
        while True:
            state = self.state()
            busy = state["running_requests"] + state["waiting_requests"]
            busy += sum(copy["in_flight_tokens"] for copy in state["copies"].values())
            if not busy:
                return state
            assert time.monotonic() < give_up, f"still busy after {seconds} s: {state}"
            time.sleep(0.05)


StartServer = Callable[..., RunningServer]

SMALL = [
    *("--page-tokens", "16", "--device-pages", "96", "--host-pages", "256"),
    *("--context-tokens", "1024", "--max-batch-tokens", "256", "--debug-hooks"),
]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start_server(tiny_model: Path, tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers that are gone, whatever happens, when the test is over."""
    running: list[RunningServer] = []

    def start(*arguments: str, model: Path | None = None) -> RunningServer:
        log_path = tmp_path / f"server-{len(running)}.log"
        server = RunningServer([str(model or tiny_model), *SMALL, *arguments], log_path)
        running.append(server)
        return server

    yield start
    for server in running:
        server.http.close()
        server.kill()


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for all tests of a module, with all three tiers."""
    directory = tmp_path_factory.mktemp("server")
    running = RunningServer(
        [str(tiny_model), *SMALL, "--storage", str(directory / "storage")], directory / "log"
    )
    yield running
    running.http.close()
    running.kill()
