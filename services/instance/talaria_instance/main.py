"""Builds an instance from its context. IO."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from talaria_common.config import ConfigError, ModelEntry, TelemetryConfig
from talaria_common.service import Context, Service
from talaria_instance.config import InstanceConfig
from talaria_instance.engine.protocol import Engine
from talaria_instance.service import InstanceService
from talaria_instance.sink import LoopSink

S = TypeVar("S", bound=msgspec.Struct)


def create(context: Context) -> Service:
    """The instance `context.member`, with a fresh boot id."""
    config = context.settings.section("instance", InstanceConfig)
    models = context.settings.models
    sink = LoopSink()
    engine = build_engine(context, config, models, sink)
    record_dir = context.settings.section("telemetry", TelemetryConfig).record_dir
    record_to = Path(record_dir) / f"{context.member}.scheduler.jsonl" if record_dir else None
    return InstanceService(
        context,
        config=config,
        engine=engine,
        sink=sink,
        models=tuple(model.id for model in models),
        boot_id=secrets.token_hex(8),
        record_to=record_to,
    )


def build_engine(
    context: Context, config: InstanceConfig, models: tuple[ModelEntry, ...], sink: LoopSink
) -> Engine:
    """The engine that the settings name; the modules of the others are not imported."""
    kinds = {model.engine for model in models} if config.engine == "auto" else {config.engine}
    if not models:
        raise ConfigError("[[models]]: an instance needs at least one model")
    if len(kinds) > 1:
        raise ConfigError("[[models]]: one instance runs one engine, not torch and fake")
    keeps = context.policy.host_kv
    if "fake" in kinds:
        from talaria_instance.engine.fake import FakeConfig, FakeEngine

        fake = engine_settings(config.fake, FakeConfig, "instance.fake", keeps_finished_kv=keeps)
        return FakeEngine(models, fake, sink, context.clock)
    from talaria_instance.engine.torch.config import TorchConfig
    from talaria_instance.engine.torch.engine import TorchEngine

    torch = engine_settings(config.torch, TorchConfig, "instance.torch", keeps_finished_kv=keeps)
    return TorchEngine(models, torch, sink)


def engine_settings(
    table: Mapping[str, Any], kind: type[S], name: str, *, keeps_finished_kv: bool
) -> S:
    """`[name]` as a `kind`; a policy without host KV overrides the table."""
    values = dict(table) if keeps_finished_kv else {**table, "keep_finished_kv": False}
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[{name}]: {error}") from error
