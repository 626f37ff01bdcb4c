"""`talaria up` and the commands around it, as processes, on the fake engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stacks import READY, Stack, chat_body, descendants, eventually, running

MODEL = "smollm2-135m"
TALARIA = [sys.executable, "-m", "talaria_cli.main"]


def talaria(
    *args: str, text: str | None = None, within_s: float = 90, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    return subprocess.run(
        [*TALARIA, *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=within_s,
        env=os.environ | (env or {}),
        check=False,
    )


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def all_gone(pids: list[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running("--engine", "fake") as stack:
        yield stack


def test_a_stack_in_one_process_answers(stack: Stack) -> None:
    with stack.http() as http:
        assert http.get("/health/ready").status_code == 200
        assert next(m["id"] for m in http.get("/v1/models").json()["data"]) == MODEL
        answer = http.post("/v1/chat/completions", json=chat_body(MODEL, "Hi", max_tokens=8))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
    assert not any(" serve " in line for _, line in descendants(stack.process.pid))


def test_chat_reads_one_message_a_line_and_keeps_the_history(stack: Stack) -> None:
    session = "terminal"
    done = talaria(
        *("chat", MODEL, "--url", stack.url, "--session", session, "--max-tokens", "6"),
        text="Hello\n\nAnd now?\n/quit\nnever sent\n",
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 2
    shown = talaria("sessions", session, "--url", stack.url, "--json")
    document = json.loads(shown.stdout)
    assert (document["id"], document["calls"]) == (session, 2)


def test_chat_takes_input_that_is_no_text(stack: Stack) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "talaria_cli.main", "chat", MODEL, "--url", stack.url],
        input=b"\xff\xfe\n",
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_sessions_and_models_are_tables_of_the_running_stack(stack: Stack) -> None:
    with stack.http() as http:
        headers = {"X-Session-ID": "listed"}
        http.post("/v1/chat/completions", json=chat_body(MODEL, "Hi"), headers=headers)
    listed = talaria("sessions", "--url", stack.url).stdout
    assert "listed" in listed
    assert "SCT s" in listed
    split = talaria("sessions", "listed", "--url", stack.url).stdout
    assert "decode" in split
    models = json.loads(talaria("models", "--url", stack.url, "--json").stdout)
    assert {row["id"] for row in models} >= {MODEL, "tiny-a", "tiny-b"}
    assert all("i-1" in row["residency"] for row in models), models
    # Configured here are torch models of the same ids.
    assert {(row["engine"], row["path"]) for row in models} == {("fake", None)}


def test_an_unknown_session_or_model_is_a_clear_failure(stack: Stack) -> None:
    missing = talaria("sessions", "nobody", "--url", stack.url)
    assert (missing.returncode, "nobody" in missing.stderr) == (1, True)
    wrong = talaria("chat", "tiny-c", "--url", stack.url, text="Hi\n")
    assert (wrong.returncode, "did you mean" in wrong.stderr) == (2, True)


def test_a_running_stack_can_be_replayed_against(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = talaria(
        *("replay", "gen:swe?sessions=3&calls=3&gap_max=0.2", "--token-scale", "0.1"),
        *("--url", stack.url, "--nats-url", stack.nats_url, "--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    entry = json.loads(file.read_text())["policies"]["as-served"]
    assert (entry["calls_finished"], entry["sessions_finished"]) == (9, 3)
    assert entry["slots"], "slots are heard on the bus"
    assert entry["continuations_covered"] == entry["continuations"] == 6


def test_each_policy_is_replayed_on_a_stack_of_its_own(tmp_path: Path) -> None:
    file, page = tmp_path / "deep/out.json", tmp_path / "deep/out.html"
    done = talaria(
        *("replay", "gen:swe?sessions=6&calls=3&gap_max=0.3", "--token-scale", "0.05"),
        *("--engine", "fake", "--policy", "talaria", "round-only"),
        *("--json", str(file), "--html", str(page)),
        env={"TALARIA_INSTANCE__T_TTFT_S": "3"},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert list(document["policies"]) == ["talaria", "round-only"]
    for entry in document["policies"].values():
        assert (entry["calls_finished"], entry["calls_failed"], entry["shed"]) == (18, 0, 0)
        assert entry["switches"] > 0
        # Calls of the fake engine are short and this machine is busy: three times the bound.
        assert entry["unattributed_share"] < 0.03
    assert document["policies"]["round-only"]["sp_admitted"] == 0
    assert "round-only" in done.stdout
    assert "<svg" in page.read_text()


def test_a_taken_port_is_told_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        start_s = time.monotonic()
        done = talaria("up", "--engine", "fake", "--port", str(port))
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "--port" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert time.monotonic() - start_s < 10


@pytest.mark.parametrize("processes", [(), ("--processes",)], ids=["one", "processes"])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["ctrl-c", "term"]
)
def test_a_signal_ends_everything(
    processes: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    with running("--engine", "fake", *processes) as stack:
        pids = [pid for pid, _ in descendants(stack.process.pid)]
        assert len(pids) == (6 if processes else 1)
        stack.process.send_signal(number)
        assert stack.process.wait(20) == code, stack.tail()
        eventually(lambda: all_gone(pids), 5, "no process is left")


@pytest.mark.parametrize("processes", [(), ("--processes",)], ids=["one", "processes"])
def test_a_second_signal_hurries_the_end_and_breaks_nothing(processes: tuple[str, ...]) -> None:
    body = chat_body(MODEL, "Hi", max_tokens=3000, ignore_eos=True, stream=True)
    with running("--engine", "fake", *processes) as stack, stack.http() as http:
        pids = [pid for pid, _ in descendants(stack.process.pid)]
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert next(answer.iter_lines())
            stack.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            stack.process.send_signal(signal.SIGTERM)
            assert stack.process.wait(10) == 0, stack.tail()
        assert not any("Traceback" in line for line in stack.log), stack.tail()
        eventually(lambda: all_gone(pids), 5, "no process is left")


@pytest.mark.parametrize("processes", [(), ("--processes",)], ids=["one", "processes"])
def test_a_killed_supervisor_leaves_no_process(processes: tuple[str, ...]) -> None:
    with running("--engine", "fake", *processes) as stack:
        pids = [pid for pid, _ in descendants(stack.process.pid)]
        stack.process.kill()
        eventually(lambda: all_gone(pids), 30, "no process is left")


def test_a_service_that_dies_is_started_again() -> None:
    with running("--engine", "fake", "--processes") as stack, stack.http() as http:
        before = stack.child("serve", "router")
        os.kill(before, signal.SIGKILL)
        eventually(lambda: not is_alive(before), 5, "the router has gone")
        eventually(
            lambda: any("serve router" in line for _, line in descendants(stack.process.pid)),
            10,
            "another router is there",
        )
        eventually(
            lambda: (
                http.post(
                    "/v1/chat/completions", json=chat_body(MODEL, "Hi", max_tokens=4)
                ).status_code
                == 200
            ),
            20,
            "calls are served again",
        )
        assert any("router-1" in line and "started again" in line for line in stack.log)


def test_a_service_that_cannot_start_ends_the_start() -> None:
    done = talaria(
        *("up", "--engine", "fake", "--port", "0", "--processes"),
        *("--nats-url", "nats://127.0.0.1:1"),
    )
    assert done.returncode == 1
    assert "nats://127.0.0.1:1" in done.stderr


def test_a_failed_start_says_only_why(tmp_path: Path) -> None:
    file = tmp_path / "given.toml"
    file.write_text("[instance.fake]\nblock_tokens = 0\n")
    done = talaria("up", "--engine", "fake", "--port", "0", "--config", str(file))
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "starting services" not in line]
    assert len(lines) == 1, done.stderr
    assert "block_tokens" in lines[0]


def test_a_service_can_be_served_on_its_own(stack: Stack) -> None:
    command = [*TALARIA, "serve", "instance", "--member", "i-9", "--engine", "fake"]
    process = subprocess.Popen(
        [*command, "--nats-url", stack.nats_url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert "talaria serving instance member=i-9" in process.stdout.readline()
        eventually(lambda: "i-9" in _residencies(stack), 10, "its models are seen")
    finally:
        process.terminate()
        process.wait(20)
        process.stdout and process.stdout.close()
    assert process.returncode == 0


def _residencies(stack: Stack) -> str:
    rows = json.loads(talaria("models", "--url", stack.url, "--json").stdout)
    return " ".join(row["residency"] for row in rows)


def test_the_ready_line_has_both_urls(stack: Stack) -> None:
    lines = [line for line in stack.log if READY.match(line)]
    assert len(lines) == 1
    assert "nats=nats://127.0.0.1:" in lines[0]
