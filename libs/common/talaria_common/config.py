"""Settings: `talaria.toml` and environment, section by section. IO (reads files, environment).

Each service has one frozen Struct with defaults and units; this module fills it from
`[section]` of the file, then from `TALARIA_<SECTION>__<FIELD>`. Unknown sections, keys and
variables are refused with the nearest known name.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from talaria_common.errors import Rejected

ENV_PREFIX: Final = "TALARIA_"
SECTIONS: Final = (
    "bus",
    "telemetry",
    "policy",
    "gateway",
    "router",
    "admission",
    "instance",
    "kvstore",
)

S = TypeVar("S", bound=msgspec.Struct)


class ConfigError(Rejected):
    """A setting is wrong; the text names it, its place and the nearest valid one."""

    def __init__(self, detail: str) -> None:
        super().__init__("invalid_request", detail)


class BusConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach NATS."""

    url: str = ""
    """Empty: `talaria up` starts a nats-server of its own."""
    user: str = ""
    password: str = ""


class TelemetryConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logs and traces."""

    otlp_endpoint: Annotated[str, Meta(pattern="^(https?://.+)?$")] = ""
    """Base URL of an OTLP/HTTP collector, for example http://127.0.0.1:4318; empty: no traces."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of sessions that are traced."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    record_dir: str = ""
    """Folder for decision recordings (docs/formats.md); empty: none."""


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which policy set is in force."""

    name: str = "talaria"


class ModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model of the catalogue."""

    id: Annotated[str, Meta(min_length=1, max_length=200)]
    path: str = ""
    """A Hugging Face folder (config.json, *.safetensors, tokenizer.json); unused by the fake engine."""
    engine: Literal["torch", "fake"] = "torch"
    max_model_len: Annotated[int, Meta(ge=0)] = 0
    """Context in tokens; 0: what the model's config says."""
    chat_template: str = ""
    """A Jinja file, or a name that ships with the torch engine (`hermes`); empty: the model's own."""
    weight_bytes: Annotated[int, Meta(ge=0)] = 0
    """For the fake engine's model of a switch; 0: 500 MB."""


class Settings:
    """All settings of one deployment."""

    def __init__(self, tables: Mapping[str, Any], env: Mapping[str, str], source: str) -> None:
        self._tables = tables
        self._source = source
        self._env: dict[str, dict[str, str]] = {}
        for name, table in tables.items():
            if name not in (*SECTIONS, "models"):
                raise ConfigError(f"{source}: unknown section {_near(name, (*SECTIONS, 'models'))}")
            if name in SECTIONS and not isinstance(table, dict):
                raise ConfigError(f"{source}: {name} must be a table: [{name}]")
        for variable, value in env.items():
            section, separator, field = variable.removeprefix(ENV_PREFIX).partition("__")
            if not variable.startswith(ENV_PREFIX) or not separator:
                continue
            if section.lower() not in SECTIONS:
                raise ConfigError(f"{variable}: unknown section {_near(section.lower(), SECTIONS)}")
            self._env.setdefault(section.lower(), {})[field.lower()] = value

    @classmethod
    def load(cls, path: str | Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
        """Read `path` (default: $TALARIA_CONFIG, else ./talaria.toml if it is there)."""
        env = os.environ if env is None else env
        chosen = path or env.get("TALARIA_CONFIG") or ""
        if not chosen and Path("talaria.toml").is_file():
            chosen = "talaria.toml"
        if not chosen:
            return cls({}, env, "(defaults)")
        try:
            tables = tomllib.loads(Path(chosen).read_text())
        except FileNotFoundError as error:
            raise ConfigError(f"no such file: {chosen}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{chosen}: {error}") from error
        return cls(tables, env, str(chosen))

    def section(self, name: str, kind: type[S], overrides: Mapping[str, Any] | None = None) -> S:
        """`[name]` as a `kind`; environment over file, `overrides` (command line) over both."""
        values: dict[str, Any] = dict(self._tables.get(name, {}))
        values |= self._env.get(name, {})
        values |= {k: v for k, v in (overrides or {}).items() if v is not None}
        for field in values:
            if field not in kind.__struct_fields__:
                known = _near(field, kind.__struct_fields__)
                is_of_env = field in self._env.get(name, {})
                where = f"{ENV_PREFIX}{name}__{field}".upper() if is_of_env else self._source
                raise ConfigError(f"{where}: [{name}] has no key {known}")
        return _convert(values, kind, f"{self._source}: [{name}]")

    @property
    def models(self) -> tuple[ModelEntry, ...]:
        """The catalogue, `[[models]]` in file order."""
        entries = self._tables.get("models", [])
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise ConfigError(f"{self._source}: models must be tables: [[models]]")
        out: list[ModelEntry] = []
        for n, entry in enumerate(entries):
            for field in entry:
                if field not in ModelEntry.__struct_fields__:
                    known = _near(field, ModelEntry.__struct_fields__)
                    raise ConfigError(f"{self._source}: [[models]] {n + 1} has no key {known}")
            out.append(_convert(entry, ModelEntry, f"{self._source}: [[models]] {n + 1}"))
        ids = [m.id for m in out]
        for model in ids:
            if ids.count(model) > 1:
                raise ConfigError(f"{self._source}: model {model!r} is listed twice")
        return tuple(out)


def _convert(values: Mapping[str, Any], kind: type[S], where: str) -> S:
    try:
        return msgspec.convert(dict(values), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _near(name: str, known: Iterable[str]) -> str:
    known = list(known)
    match = difflib.get_close_matches(name, known, n=1)
    return f"{name!r}; did you mean {match[0]!r}?" if match else f"{name!r} (known: {known})"
