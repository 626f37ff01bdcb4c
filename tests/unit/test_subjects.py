"""Ids become subject tokens that never meet."""

from __future__ import annotations

import re

import pytest

from talaria_common import subjects

TOKEN = re.compile(r"[A-Za-z0-9_=-]+")
NAMES = ["i-1", "a.b", "a/b", "a b", "*", ">", "a=2eb", "a..b", "é", "$SYS", "org/model:v1.5"]


@pytest.mark.parametrize("name", NAMES)
def test_a_slug_is_one_subject_token(name: str) -> None:
    assert TOKEN.fullmatch(subjects.slug(name))


def test_plain_names_stay_readable() -> None:
    assert subjects.slug("smollm2-135m") == "smollm2-135m"
    assert subjects.slug("qwen/q.5") == "qwen=2fq=2e5"


def test_slugs_of_different_names_differ() -> None:
    assert len({subjects.slug(name) for name in NAMES}) == len(NAMES)


PAIRS = {
    "cancel": (subjects.cancel("c.1"), subjects.ANY_CANCEL),
    "ended": (subjects.call_ended("c.1"), subjects.ANY_CALL_ENDED),
    "settled": (subjects.call_settled("c.1"), subjects.ANY_CALL_SETTLED),
    "snapshot": (subjects.snapshot("i.1"), subjects.ANY_SNAPSHOT),
    "kv": (subjects.kv_events("i.1"), subjects.ANY_KV),
    "slot": (subjects.slots("i.1"), subjects.ANY_SLOT),
}


@pytest.mark.parametrize("case", PAIRS)
def test_every_event_is_heard_by_its_wildcard(case: str) -> None:
    one, every = PAIRS[case]
    pattern = every.replace(".", r"\.").replace("*", r"[^.]+")
    assert re.fullmatch(pattern, one)
    others = [wildcard for name, (_, wildcard) in PAIRS.items() if name != case]
    for other in others:
        assert not re.fullmatch(other.replace(".", r"\.").replace("*", r"[^.]+"), one)


def test_commands_of_one_instance_differ() -> None:
    made = [
        subjects.run("i"),
        subjects.body_part("i"),
        subjects.attempt("i"),
        subjects.instance_kv("i"),
        subjects.snapshot_request("i"),
    ]
    assert len(set(made)) == len(made)
    assert all(subject.startswith("talaria.v1.cmd.instance.i.") for subject in made)
