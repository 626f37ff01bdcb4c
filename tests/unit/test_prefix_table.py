"""Which prompts an instance says that it could reuse."""

from __future__ import annotations

from talaria_common.wire import CallKey, HeldPrefix
from talaria_instance.engine.protocol import EngineCall, Locality
from talaria_instance.prefixes import LOOK_ALL_S, PrefixTable


class Engine:
    """Holds what it is told to, and counts the looks."""

    def __init__(self) -> None:
        self.held: dict[str, Locality] = {}
        self.looks: list[str] = []

    def locality(self, call: EngineCall) -> Locality:
        self.looks.append(call.key.call_id)
        return self.held.get(call.key.call_id, Locality())


def a_call(name: str) -> EngineCall:
    return EngineCall(key=CallKey(name), model="m", prompt_tokens=40, max_tokens=8, blocks_needed=3)


def a_table(*names: str, most: int = 8) -> tuple[PrefixTable, Engine]:
    engine = Engine()
    table = PrefixTable(most, engine.locality)
    for name in names:
        engine.held[name] = Locality(device_tokens=32)
        table.prompt(("", name, "m"), name.encode(), a_call(name))
    return table, engine


def test_a_reply_is_held_at_once_and_only_its_session_is_looked_at() -> None:
    table, engine = a_table("a", "b")
    table.held(0.0)
    engine.looks.clear()
    table.reply(("", "a", "m"), a_call("a"), b"reply", 5)
    held = table.held(0.1)
    assert HeldPrefix(b"reply", 37, "device") in held
    assert HeldPrefix(b"b", 32, "device") in held
    assert engine.looks == ["a"]


def test_all_sessions_are_looked_at_again_after_a_heartbeat() -> None:
    table, engine = a_table("a", "b")
    table.held(0.0)
    engine.held["b"] = Locality(device_tokens=16, host_tokens=16)
    del engine.held["a"]
    assert table.held(LOOK_ALL_S) == (HeldPrefix(b"b", 32, "host"),)


def test_the_reply_of_an_earlier_call_is_not_held() -> None:
    table, _ = a_table("a")
    table.reply(("", "a", "m"), a_call("another"), b"reply", 5)
    assert [p.digest for p in table.held(0.0)] == [b"a"]


def test_the_sessions_whose_prompt_is_oldest_are_forgotten_first() -> None:
    table, _ = a_table("a", "b", "c", most=2)
    assert [p.digest for p in table.held(0.0)] == [b"b", b"c"]
