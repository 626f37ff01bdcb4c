"""docs/formats.md tells every setting with its default, and every key of the replay document."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from talaria_admission.config import AdmissionConfig
from talaria_common.config import (
    SECTIONS,
    BusConfig,
    ModelEntry,
    PolicyConfig,
    TelemetryConfig,
)
from talaria_common.policies import POLICY_SETS, PolicySet
from talaria_gateway.config import GatewayConfig
from talaria_instance.config import InstanceConfig
from talaria_instance.engine.fake import FakeConfig
from talaria_instance.engine.torch.config import TorchConfig
from talaria_kvstore.config import KvstoreConfig
from talaria_router.config import RouterConfig
from talaria_sim.generate import SOURCES, Options
from talaria_sim.metrics.summary import summarise
from talaria_sim.records import RunRecord

DOC = (Path(__file__).resolve().parents[2] / "docs/formats.md").read_text(encoding="utf-8")

KINDS: dict[str, type[msgspec.Struct]] = {
    "bus": BusConfig,
    "telemetry": TelemetryConfig,
    "policy": PolicyConfig,
    "gateway": GatewayConfig,
    "router": RouterConfig,
    "admission": AdmissionConfig,
    "instance": InstanceConfig,
    "instance.torch": TorchConfig,
    "instance.fake": FakeConfig,
    "kvstore": KvstoreConfig,
    "[models]": ModelEntry,
}


def section(title: str) -> str:
    """Text below the heading that names `title`, up to the next heading."""
    found = re.search(rf"^#+ .*{re.escape(title)}.*\n((?:(?!^#).*\n)*)", DOC, re.M)
    assert found, f"docs/formats.md has no heading with {title!r}"
    return found[1]


def rows(text: str) -> dict[str, str]:
    """First and second cell of each table row."""
    return dict(re.findall(r"^\| `([\w.]+)` \| ([^|]*?) \|", text, re.M))


def default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    made: Any = field.default
    if made is msgspec.NODEFAULT:
        assert field.default_factory is not msgspec.NODEFAULT
        made = field.default_factory()
    return f"`{msgspec.json.encode(made).decode()}`"


def documented(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {f.name: default_text(f) for f in msgspec.structs.fields(kind)}


def test_every_section_is_checked_here() -> None:
    assert set(KINDS) == {*SECTIONS, "instance.torch", "instance.fake", "[models]"}


@pytest.mark.parametrize("name", KINDS)
def test_a_section_tells_its_keys_and_defaults(name: str) -> None:
    assert rows(section(f"`[{name}]`")) == documented(KINDS[name])


def test_the_switches_of_a_policy_set_are_told() -> None:
    switches = documented(PolicySet)
    del switches["name"]
    assert rows(section("Policy sets")) == switches
    for name in POLICY_SETS:
        assert f"`{name}`" in section("Policy sets")


def test_the_keys_of_generated_workloads_are_told() -> None:
    text = section("Generated")
    assert rows(text) == documented(Options)
    for name in SOURCES:
        assert f"`{name}`" in text


def test_the_keys_of_the_replay_document_are_told() -> None:
    entry = summarise(RunRecord(sessions=(), started_unix_s=0.0, wall_s=0.0))
    told = set(re.findall(r"`(\w+)`", section("One policy's entry")))
    assert entry.keys() <= told, sorted(entry.keys() - told)
