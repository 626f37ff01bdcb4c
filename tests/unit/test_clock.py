"""Clocks for shells and for virtual time."""

from __future__ import annotations

import pytest

from talaria_common.clock import Clock, VirtualClock, WallClock


def test_virtual_time_moves_when_told_to() -> None:
    clock = VirtualClock(5.0, unix_s=1000.0)
    assert (clock.now_s(), clock.unix_s()) == (5.0, 1000.0)
    clock.advance(2.5)
    assert (clock.now_s(), clock.unix_s()) == (7.5, 1002.5)


def test_virtual_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        VirtualClock().advance(-0.1)


def test_wall_time_does_not_go_back_either() -> None:
    clock: Clock = WallClock()
    first = clock.now_s()
    assert clock.now_s() >= first
    assert clock.unix_s() > 1_700_000_000
