"""Run a benchmark and put its output on a page of results, in a section of its own.

    python benchmarks/record.py PAGE "TITLE" -- python benchmarks/storage.py --pairs 5

The section is found again by its title and replaced; one that is new goes to the end. It says the
command (without directories of this machine), commit, date, machine and load, and has what the
benchmark printed to standard output. The exit status is the benchmark's, and a section is written
either way: a missed target belongs on the page.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def processor() -> str:
    """The processor's name, where the system tells."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        about = ""
    named = re.search(r"^model name\s*: (.+)$", about, re.MULTILINE)
    return named[1] if named else platform.machine()


def commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        asked, cwd=REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.strip()


def without_directories(command: list[str]) -> str:
    """The command as one would type it elsewhere: of absolute paths, the last part."""
    return " ".join(f"…/{Path(part).name}" if part.startswith("/") else part for part in command)


def replaced(page: str, title: str, section: str) -> str:
    """`page` with the section called `title` replaced by `section`, or with it at the end."""
    parts = re.split(r"(?m)^(?=## )", page)
    for i, part in enumerate(parts):
        if part.startswith(f"## {title}\n"):
            parts[i] = section + ("\n" if i + 1 < len(parts) else "")
            return "".join(parts)
    return page.rstrip("\n") + "\n\n" + section


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("title")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error('no benchmark given: end the line with "-- python benchmarks/..."')
    load = os.getloadavg()[0]
    at = commit()
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    about = (
        f"`{without_directories(command)}` at commit `{at}`, {datetime.now(UTC):%Y-%m-%d}: "
        f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, load "
        f"{load:.1f} at the start. Exit status {running.returncode}."
    )
    section = "\n".join([f"## {given.title}", "", about, "", "```", *lines, "```", ""])
    old = given.page.read_text() if given.page.exists() else "# Benchmark results\n"
    given.page.write_text(replaced(old, given.title, section))
    return running.returncode


if __name__ == "__main__":
    sys.exit(main())
