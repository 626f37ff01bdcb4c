"""The shell around a policy: one event at a time, effects in order, all of it recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from talaria_common.clock import VirtualClock
from talaria_common.errors import InvariantBroken
from talaria_common.service import Recorder, Shell
from talaria_common.wire import CallKey, CancelCall, Withdraw


def doubled(event: Any, now_s: float) -> list[Any]:
    return [(event, now_s), event]


def test_effects_are_performed_in_order_and_returned() -> None:
    done: list[Any] = []
    clock = VirtualClock(3.0)
    shell: Shell[Any] = Shell(doubled, done.append, clock)
    assert shell.apply("e") == [("e", 3.0), "e"]
    clock.advance(1.0)
    shell.apply("f")
    assert done == [("e", 3.0), "e", ("f", 4.0), "f"]


def test_an_effect_may_not_apply_an_event() -> None:
    def perform(effect: Any) -> None:
        shell.apply(effect)

    shell: Shell[Any] = Shell(doubled, perform, VirtualClock())
    with pytest.raises(InvariantBroken, match="inside an effect"):
        shell.apply("e")


def test_a_failed_effect_leaves_the_shell_usable() -> None:
    def fails(effect: Any) -> None:
        raise OSError("no")

    shell: Shell[Any] = Shell(doubled, fails, VirtualClock())
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            shell.apply("e")


def test_events_and_effects_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "router.jsonl"
    shell: Shell[Any] = Shell(
        lambda event, now_s: [Withdraw(key=CallKey(event.call_id, 2))],
        lambda effect: None,
        VirtualClock(1.5),
        Recorder(path),
    )
    shell.apply(CancelCall(call_id="c"))
    shell.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {
            "now_s": 1.5,
            "event": {"type": "cancel_call", "call_id": "c"},
            "effects": [{"type": "withdraw", "key": ["c", 2]}],
        }
    ]


def test_a_full_disk_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    done: list[Any] = []
    recorder = Recorder(Path("/dev/full"))
    shell: Shell[Any] = Shell(doubled, done.append, VirtualClock(), recorder)
    for _ in range(3):
        shell.apply("x" * 100_000)
    shell.close()
    assert len(done) == 6
    assert [r.getMessage() for r in caplog.records] == [
        "the recording /dev/full ends: No space left on device"
    ]
