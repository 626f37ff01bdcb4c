"""Starting `talaria up` as a user does, for the end-to-end tests. IO."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

READY = re.compile(r"^talaria ready url=(\S+)(?: nats=(\S+))?")


@dataclass
class Stack:
    """A running deployment, seen from outside."""

    process: subprocess.Popen[str]
    url: str
    nats_url: str
    log: list[str] = field(default_factory=list)

    def http(self, timeout_s: float = 30.0) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def child(self, *words: str) -> int:
        """Pid of the one live descendant whose command line holds all `words`."""
        found = [
            pid for pid, line in descendants(self.process.pid) if all(w in line for w in words)
        ]
        assert len(found) == 1, (words, found, descendants(self.process.pid))
        return found[0]

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log[-lines:])


def descendants(pid: int) -> list[tuple[int, str]]:
    """(pid, command line) of every process below `pid`, from /proc."""
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            stat = (entry / "stat").read_text()
            fields = stat.rsplit(")", 1)[1].split()
            if fields[0] == "Z":
                continue
            parents[int(entry.name)] = int(fields[1])
            lines[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    out: list[tuple[int, str]] = []
    for candidate in parents:
        above: int | None = candidate
        while above is not None and above != pid:
            above = parents.get(above)
        if above == pid and candidate != pid:
            out.append((candidate, lines.get(candidate, "")))
    return out


@contextlib.contextmanager
def running(
    *args: str, within_s: float = 120.0, config: str = "", env: dict[str, str] | None = None
) -> Iterator[Stack]:
    """`talaria up ARGS` on free ports with a data folder of its own; stopped with SIGTERM.

    `config` is the text of a talaria.toml.
    """
    with tempfile.TemporaryDirectory(prefix="talaria-e2e-") as data:
        command = [sys.executable, "-m", "talaria_cli.main", "up", "--port", "0"]
        command += ["--data", data, *args]
        if config:
            file = Path(data) / "given.toml"
            file.write_text(config)
            command += ["--config", str(file)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | (env or {}),
        )
        stack = Stack(process, "", "")
        ready = threading.Event()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                stack.log.append(line.rstrip())
                if found := READY.match(line):
                    stack.url, stack.nats_url = found[1], found[2] or ""
                    ready.set()
            ready.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            assert ready.wait(within_s), f"not ready within {within_s} s:\n{stack.tail()}"
            assert stack.url, f"`talaria up` ended with {process.poll()}:\n{stack.tail()}"
            yield stack
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reader.join(5)
            if process.stdout is not None:
                process.stdout.close()


def eventually(check: Callable[[], Any], within_s: float, why: str) -> Any:
    """Poll until `check` is true and return its value; fail with `why` after `within_s`."""
    end_s = time.monotonic() + within_s
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < end_s, f"not within {within_s} s: {why}"
        time.sleep(0.05)


def chat_body(model: str, text: str, **extra: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        **extra,
    }


def events(response: httpx.Response) -> Iterator[dict[str, Any] | str]:
    """Data of each SSE event: JSON objects, and the string `[DONE]`."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def in_flight(http: httpx.Client) -> float:
    """Calls that the engines hold, by the gateway's gauges."""
    text = http.get("/metrics").text
    values = re.findall(r"^talaria_calls_(?:running|waiting)(?:\{.*\})? (\S+)", text, re.M)
    return sum(float(v) for v in values)
