"""Messages keep their bytes, skip what they do not know, refuse what is out of bounds."""

from __future__ import annotations

import msgspec
import pytest

from talaria_common import wire
from talaria_common.wire import Message
from tests import golden

KINDS = {kind.__name__: kind for kind in golden.messages()}
RECORDED = golden.recorded()
REGENERATE = "run `python -m tests.golden` and read the difference"
DECODERS = {
    name: decoder
    for name, decoder in vars(wire).items()
    if isinstance(decoder, msgspec.msgpack.Decoder)
}


def test_every_message_has_golden_bytes() -> None:
    assert list(RECORDED) == list(KINDS), REGENERATE


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", ["least", "full"])
def test_bytes_are_golden(name: str, form: str) -> None:
    message = golden.example(KINDS[name], is_full=form == "full")
    assert wire.encode(message).hex() == RECORDED[name][form], REGENERATE


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", ["least", "full"])
def test_golden_bytes_decode_to_the_same_message(name: str, form: str) -> None:
    decoder = msgspec.msgpack.Decoder(KINDS[name])
    expected = golden.example(KINDS[name], is_full=form == "full")
    assert decoder.decode(bytes.fromhex(RECORDED[name][form])) == expected


@pytest.mark.parametrize("name", KINDS)
def test_json_round_trips(name: str) -> None:
    message = golden.example(KINDS[name], is_full=True)
    assert msgspec.json.decode(wire.encode_as(message, "json"), type=KINDS[name]) == message
    assert wire.encode_as(message, "msgpack") == wire.encode(message)


@pytest.mark.parametrize("name", KINDS)
def test_every_message_has_a_decoder(name: str) -> None:
    payload = wire.encode(golden.example(KINDS[name], is_full=True))
    if name == "CallStarted":  # for callers of the public API, in JSON
        assert wire.PUBLIC.decode(wire.encode_as(golden.example(KINDS[name], is_full=True), "json"))
        return
    assert any(wire.decode(decoder, payload) is not None for decoder in DECODERS.values())


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS.values()]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("name", KINDS)
def test_unknown_fields_are_skipped(name: str) -> None:
    fields = msgspec.msgpack.decode(bytes.fromhex(RECORDED[name]["full"]))
    fields["field_of_next_year"] = {"x": [1]}
    decoder = msgspec.msgpack.Decoder(KINDS[name])
    got = wire.decode(decoder, msgspec.msgpack.encode(fields))
    assert got == golden.example(KINDS[name], is_full=True)


UNREADABLE = {
    "unknown tag": msgspec.msgpack.encode({"type": "of_next_year"}),
    "tag of a wrong type": msgspec.msgpack.encode({"type": 1}),
    "not a map": msgspec.msgpack.encode([1, 2]),
    "no MessagePack": b"\xc1\xff",
    "empty": b"",
    "cut off": bytes.fromhex(RECORDED["RunCall"]["full"])[:-3],
    "nested without end": msgspec.msgpack.encode({"type": "cancel_call"}).replace(
        b"\x81", b"\x82", 1
    )
    + b"\xa1x"
    + b"\x91" * 100_000,
}


@pytest.mark.parametrize("case", UNREADABLE)
@pytest.mark.parametrize("decoder", DECODERS)
def test_unreadable_bytes_are_none(case: str, decoder: str) -> None:
    assert wire.decode(DECODERS[decoder], UNREADABLE[case]) is None


OUT_OF_BOUNDS: dict[str, tuple[type[Message], dict[str, object]]] = {
    "negative count": (wire.Delta, {"seq": -1}),
    "negative seconds": (wire.Granted, {"place_s": -0.1}),
    "unknown refusal": (wire.Refused, {"reason": "tired"}),
    "seconds as text": (wire.Granted, {"place_s": "1"}),
    "null where required": (wire.RunCall, {"session": None}),
    "an epoch that leaves no room for counting": (wire.SnapshotRequest, {"epoch": 2**31}),
    "a count beyond any sum": (wire.Snapshot, {"queued_calls": 2**63}),
    "endless seconds": (wire.CallSettled, {"ended_unix_s": float("inf")}),
    "an attempt below the first": (wire.Accepted, {"key": ["c", 0]}),
}


@pytest.mark.parametrize("case", OUT_OF_BOUNDS)
def test_values_out_of_bounds_are_refused(case: str) -> None:
    kind, change = OUT_OF_BOUNDS[case]
    fields = msgspec.msgpack.decode(bytes.fromhex(RECORDED[kind.__name__]["full"]))
    payload = msgspec.msgpack.encode(fields | change)
    assert wire.decode(msgspec.msgpack.Decoder(kind), payload) is None


def test_a_message_is_a_value() -> None:
    key = wire.CallKey("c", 2)
    assert str(key) == "c/2"
    assert sorted([wire.CallKey("c", 2), wire.CallKey("c", 1), wire.CallKey("b", 9)])[0] == (
        wire.CallKey("b", 9)
    )
    with pytest.raises(AttributeError):
        key.attempt = 3  # type: ignore[misc]


def test_the_total_cost_is_the_sum_of_its_terms() -> None:
    assert wire.CostTerms(load_s=1.0, kv_s=0.5, activate_s=0.25).total_s == 1.75


def test_docs_are_current() -> None:
    assert golden.DOCS.read_text() == golden.docs(), REGENERATE
