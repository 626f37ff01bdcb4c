"""What one deployment runs: settings, catalogue, folders. IO (reads files, environment).

The command line wins over the environment, which wins over the file. The result can be written as
a talaria.toml, so that child processes see the same settings.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from talaria_cli.failure import CommandFailed, UsageError
from talaria_common.config import (
    ENV_PREFIX,
    BusConfig,
    ConfigError,
    ModelEntry,
    PolicyConfig,
    Settings,
)
from talaria_common.policies import PolicySet, policy_set
from talaria_gateway.config import GatewayConfig
from talaria_sim.workload import near

WRITTEN: Final = "deployment.toml"
FAKE_CONTEXT: Final = 32_768


@dataclass(frozen=True)
class Deployment:
    """Settings with everything resolved, and where to keep data."""

    tables: Mapping[str, Any]
    env: Mapping[str, str]
    source: str
    data_dir: Path
    is_default_catalogue: bool
    """The models are those that the project prepares itself."""

    @property
    def settings(self) -> Settings:
        return Settings(self.tables, self.env, self.source)

    @property
    def policy(self) -> PolicySet:
        """The policy set in force. Raises `UsageError` for an unknown one."""
        try:
            return policy_set(self.settings.section("policy", PolicyConfig).name)
        except ValueError as error:
            raise UsageError(str(error)) from error

    @property
    def bus(self) -> BusConfig:
        return self.settings.section("bus", BusConfig)

    @property
    def gateway(self) -> GatewayConfig:
        return self.settings.section("gateway", GatewayConfig)

    @property
    def uses_torch(self) -> bool:
        return any(model.engine == "torch" for model in self.settings.models)

    def changed(self, **sections: Mapping[str, Any]) -> Deployment:
        """With these values in force whatever file and environment say."""
        tables, env = _merged(self.tables, self.env, sections)
        return Deployment(tables, env, self.source, self.data_dir, self.is_default_catalogue)

    def write(self) -> Path:
        """The settings as a talaria.toml in the data folder."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        path = self.data_dir / WRITTEN
        path.write_text(to_toml(self.tables), encoding="utf-8")
        return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `resolve` reads."""
    parser.add_argument(
        "--config", metavar="FILE", help="settings (default: ./talaria.toml if there)"
    )
    parser.add_argument("--data", metavar="DIR", help="folder for what is kept between runs")
    parser.add_argument("--engine", choices=("torch", "fake"), help="engine of all models")
    parser.add_argument(
        "--models", metavar="ID,..", help="serve only these models of the catalogue"
    )
    parser.add_argument("--policy", metavar="SPEC", help="policy set, for example round-only")
    parser.add_argument("--nats-url", metavar="URL", help="an existing NATS server")
    parser.add_argument("--otlp", metavar="URL", help="OTLP/HTTP collector for traces")
    parser.add_argument("--record", metavar="DIR", help="record every decision into this folder")


def resolve(
    args: argparse.Namespace, *, host: str | None = None, port: int | None = None
) -> Deployment:
    """The deployment that the command line, environment and file describe together."""
    env = {k: v for k, v in os.environ.items() if k.startswith(ENV_PREFIX)}
    tables, source = _read(args.config or env.get("TALARIA_CONFIG"))
    tables, env = _merged(
        tables,
        env,
        {
            "bus": {"url": args.nats_url},
            "telemetry": {"otlp_endpoint": args.otlp, "record_dir": args.record},
            "policy": {"name": args.policy},
            "gateway": {"host": host, "port": port},
        },
    )
    given = Settings(tables, env, source).models
    models = _chosen(given or _default_models(), args.models, args.engine)
    tables = dict(tables) | {"models": [_table(model) for model in models]}
    deployment = Deployment(tables, env, source, Path("."), is_default_catalogue=not given)
    data_dir = Path(args.data) if args.data else _state_dir(deployment.gateway.port)
    resolved = Deployment(tables, env, source, data_dir.absolute(), not given)
    _ = resolved.policy, resolved.bus  # Refused now, not by a service later.
    return resolved


def prepare(deployment: Deployment, progress: Callable[[str], None]) -> None:
    """Make the default catalogue's models if they are needed and not there yet."""
    if deployment.is_default_catalogue and deployment.uses_torch:
        try:
            from talaria_instance import catalog
        except ImportError as error:
            raise CommandFailed(
                f"{error}; install the torch extra, or use --engine fake"
            ) from error
        catalog.prepare_default(catalog.default_cache(), progress)


def lock(deployment: Deployment) -> IO[str]:
    """Hold the data folder until the file is closed. Raises `CommandFailed` if another process does."""
    deployment.data_dir.mkdir(parents=True, exist_ok=True)
    handle = (deployment.data_dir / "lock").open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise CommandFailed(
            f"another talaria uses {deployment.data_dir}; stop it or choose another --data folder"
        ) from error
    return handle


def to_toml(tables: Mapping[str, Any]) -> str:
    """Sections of scalars and arrays of tables as TOML; JSON's strings are TOML's."""
    lines: list[str] = []
    for name, value in tables.items():
        for table in value if isinstance(value, list) else [value]:
            lines.append(f"[[{name}]]" if isinstance(value, list) else f"[{name}]")
            lines += [f"{key} = {_toml_value(item)}" for key, item in table.items()]
            lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    # DEL is the one character that JSON leaves alone and TOML forbids.
    return json.dumps(value).replace("\x7f", "\\u007f")


def _read(path: str | None) -> tuple[dict[str, Any], str]:
    chosen = path or ("talaria.toml" if Path("talaria.toml").is_file() else None)
    if chosen is None:
        return {}, "(defaults)"
    try:
        tables = tomllib.loads(Path(chosen).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{chosen}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{chosen}: {error}") from error
    return tables, chosen


def _merged(
    tables: Mapping[str, Any], env: Mapping[str, str], sections: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, str]]:
    merged, left = dict(tables), dict(env)
    for section, values in sections.items():
        given = {key: value for key, value in values.items() if value is not None}
        if given:
            merged[section] = dict(merged.get(section, {})) | given
        for key in given:
            for variable in [v for v in left if v.lower() == f"talaria_{section}__{key}"]:
                del left[variable]
    return merged, left


def _default_models() -> tuple[ModelEntry, ...]:
    from talaria_instance import catalog

    return catalog.default_entries(catalog.default_cache())


def _chosen(
    models: tuple[ModelEntry, ...], wanted: str | None, engine: str | None
) -> tuple[ModelEntry, ...]:
    ids = [model.id for model in models]
    names = [name.strip() for name in wanted.split(",") if name.strip()] if wanted else ids
    if wanted and not names:
        raise UsageError(f"--models: name at least one of {', '.join(ids)}")
    for name in names:
        if name not in ids:
            raise UsageError(f"--models: no model {near(name, ids)}")
    kept = [model for model in models if model.id in names]
    if engine == "fake":
        return tuple(
            ModelEntry(
                id=model.id,
                engine="fake",
                max_model_len=model.max_model_len or FAKE_CONTEXT,
                weight_bytes=model.weight_bytes,
            )
            for model in kept
        )
    if engine == "torch" and (fakes := [model.id for model in kept if not model.path]):
        raise UsageError(f"--engine torch: {', '.join(fakes)} has no path in the configuration")
    if engine == "torch":
        kept = [msgspec.structs.replace(model, engine="torch") for model in kept]
    return tuple(kept)


def _table(model: ModelEntry) -> dict[str, Any]:
    table: dict[str, Any] = msgspec.to_builtins(model)
    return table


def _state_dir(port: int) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "talaria" / f"up-{port}"
