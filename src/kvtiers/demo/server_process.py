"""The server as a child process: started on a free port, stopped by SIGTERM, its log kept."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvtiers.demo.client import DemoError
from kvtiers.server.launch import LISTENING

START_SECONDS_MAX = 180.0
STOP_SECONDS_MAX = 60.0
LOG_LINES_SHOWN = 15


class ServerProcess:
    """`kvtiers serve` with `arguments`; the log (both streams) goes to `log_path`."""

    def __init__(self, arguments: Sequence[str], log_path: Path) -> None:
        self._log_path = log_path
        command = [sys.executable, "-m", "kvtiers.cli", "serve", *arguments, "--port", "0"]
        with log_path.open("wb") as log:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self.url = ""

    def wait_until_listening(self) -> None:
        """Returns when the server takes requests; `url` is known then."""
        give_up = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < give_up:
            for line in self._log_path.read_text("utf-8", "replace").splitlines():
                if line.startswith(LISTENING):
                    self.url = line.removeprefix(LISTENING).strip()
                    return
            if self._child.poll() is not None:
                raise DemoError(f"the server ended while it started:\n{self.end_of_log()}")
            time.sleep(0.05)
        raise DemoError(
            f"the server was not ready after {START_SECONDS_MAX:g} s:\n{self.end_of_log()}"
        )

    def decided(self) -> list[str]:
        """What the server said it decided, before it began to listen."""
        lines = self._log_path.read_text("utf-8", "replace").splitlines()
        said = (line for line in lines if line.split(" ", 1)[0] in _DECISION_WORDS)
        return list(said)

    def stop(self) -> int:
        """SIGTERM, wait for the drain, and return the exit status."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
        try:
            return self._child.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            raise DemoError(
                f"the server did not end within {STOP_SECONDS_MAX:g} s of SIGTERM:\n"
                f"{self.end_of_log()}"
            ) from None

    def kill(self) -> None:
        """End the child whatever it does; for the way out of an error."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()

    def end_of_log(self) -> str:
        """The last lines the server wrote."""
        lines = self._log_path.read_text("utf-8", "replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])


_DECISION_WORDS = frozenset(
    ("model", "kv", "device", "host", "storage", "policy", "link", "limits", "warning:")
)
