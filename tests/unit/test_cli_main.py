"""The `talaria` command line: usage, exit codes, small commands."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import pytest

from talaria_cli import entry, ports
from talaria_cli.commands.replay import parse_map
from talaria_cli.failure import CommandFailed, UsageError
from talaria_cli.main import COMMANDS, main, parser
from talaria_cli.output import ProgressLine, duration, table
from talaria_cli.stack import DRAIN_ORDER, SERVICES, members


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize("command", [c.__name__.rpartition(".")[2] for c in COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        parser().parse_args([command, "--help"])
    assert exit_.value.code == 0
    assert command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["replay", "nowhere"], "gen:swe"),
        (["replay", "gen:swee"], "did you mean 'swe'"),
        (["replay", "gen:swe", "--policy", "round"], "unknown policy"),
        (["replay", "gen:swe", "--policy", "talaria", "--policy", "talaria"], "twice"),
        (["replay", "gen:swe", "--policy", "talaria", "--url", "http://x"], "--url"),
        (["replay", "gen:swe", "--nats-url", "nats://x"], "goes with --url"),
        (["replay", "gen:swe", "--sessions", "0"], "--sessions"),
        (["replay", "gen:swe", "--token-scale", "0"], "--token-scale"),
        (["replay", "gen:swe", "--model-map", "m0"], "LABEL=ID"),
        (["up", "--instances", "0"], "--instances"),
        (["up", "--policy", "no-hkv"], "did you mean 'no-hkvr'"),
        (["up", "--models", ","], "name at least one of"),
        (["serve", "router"], "--nats-url"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    errors = capsys.readouterr().err.strip()
    assert words in errors
    assert len(errors.splitlines()) == 1
    assert errors.startswith(f"talaria {argv[0]}: ")


def test_a_folder_that_cannot_be_used_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["up", "--engine", "fake", "--port", "0", "--data", str(file)]) == 1
    assert capsys.readouterr().err == f"talaria up: {file}: File exists\n"


def test_ctrl_c_while_the_command_is_imported_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("talaria_cli.main.main", interrupted)
    assert entry.main() == 130
    assert capsys.readouterr().err == ""


def test_an_unknown_option_points_to_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["up", "--instanses", "2"])
    assert exit_.value.code == 2
    assert "talaria --help" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sessions", "chat"])
def test_without_a_stack_the_command_fails_and_says_how_to_start_one(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--url", "http://127.0.0.1:1"]) == 1
    assert "talaria up" in capsys.readouterr().err


def test_models_lists_the_catalogue_without_a_stack(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--engine", "fake", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == ["smollm2-135m", "tiny-a", "tiny-b"]
    assert rows[0].keys() == {"id", "engine", "path", "size", "context", "residency"}


def test_models_tells_what_is_not_prepared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TALARIA_CACHE", str(tmp_path / "empty"))
    assert main(["models"]) == 0
    out = capsys.readouterr()
    assert out.out.count("not prepared") == 3
    assert "talaria models --prepare" in out.err


def test_version_tells_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("talaria ")


def test_a_taken_port_is_refused_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommandFailed, match=f"{port}.*--port"):
            ports.claim("127.0.0.1", port)
    assert ports.claim("127.0.0.1", port) == port
    assert ports.claim("127.0.0.1", 0) > 0


@pytest.mark.parametrize(
    ("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.1.2.3", "10.1.2.3")]
)
def test_a_wildcard_address_is_reached_on_loopback(host: str, reached: str) -> None:
    assert ports.reachable(host) == reached


def test_a_model_map_is_pairs() -> None:
    assert parse_map("m0=a, m1=b/c") == {"m0": "a", "m1": "b/c"}
    with pytest.raises(UsageError):
        parse_map("m0=")


def test_a_deployment_has_every_service_once_and_n_instances() -> None:
    wanted = members(2)
    assert [m for s, m in wanted if s == "instance"] == ["i-1", "i-2"]
    assert {s for s, _ in wanted} == set(SERVICES) == set(DRAIN_ORDER)
    assert len({m for _, m in wanted}) == len(wanted)


def test_a_table_is_aligned() -> None:
    lines = table(("name", "s"), [["a", "1.5"], ["longer", "10.25"]]).splitlines()
    assert lines[2:] == ["a         1.5", "longer  10.25"]


def test_progress_without_a_terminal_is_sparse_lines() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream)
    line.show("first", now=True)
    line.show("too soon")
    line.clear()
    assert stream.getvalue() == "first\n"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.0, "59 s"), (185.0, "3 min 05 s")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
