"""Settings come from file, environment and command line; mistakes are named with the nearest fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from talaria_common.config import (
    BusConfig,
    ConfigError,
    ModelEntry,
    PolicyConfig,
    Settings,
    TelemetryConfig,
)

FILE = """
[bus]
url = "nats://file:4222"
[telemetry]
sample_ratio = 0.5
[[models]]
id = "a"
path = "/m/a"
[[models]]
id = "b"
engine = "fake"
"""


def load(tmp_path: Path, text: str, env: dict[str, str] | None = None) -> Settings:
    path = tmp_path / "talaria.toml"
    path.write_text(text)
    return Settings.load(path, env or {})


def test_defaults_hold_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.load(env={})
    assert settings.section("bus", BusConfig) == BusConfig()
    assert settings.models == ()


def test_a_file_in_the_working_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talaria.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert Settings.load(env={}).section("bus", BusConfig).url == "nats://file:4222"


def test_command_line_goes_over_environment_over_file(tmp_path: Path) -> None:
    env = {"TALARIA_BUS__URL": "nats://env:4222", "TALARIA_BUS__USER": "env"}
    settings = load(tmp_path, FILE, env)
    bus = settings.section("bus", BusConfig, {"url": "nats://line:4222", "user": None})
    assert bus == BusConfig(url="nats://line:4222", user="env")


def test_values_of_the_environment_are_converted(tmp_path: Path) -> None:
    env = {"TALARIA_TELEMETRY__SAMPLE_RATIO": "0.25", "TALARIA_TELEMETRY__LOG_LEVEL": "debug"}
    telemetry = load(tmp_path, FILE, env).section("telemetry", TelemetryConfig)
    assert (telemetry.sample_ratio, telemetry.log_level) == (0.25, "debug")


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(FILE)
    settings = Settings.load(env={"TALARIA_CONFIG": str(tmp_path / "other.toml"), "HOME": "/"})
    assert settings.section("bus", BusConfig).url == "nats://file:4222"


def test_models_keep_the_order_of_the_file(tmp_path: Path) -> None:
    models = load(tmp_path, FILE).models
    assert models == (ModelEntry(id="a", path="/m/a"), ModelEntry(id="b", engine="fake"))


MISTAKES = {
    "unknown section": ("[buss]\n", r"unknown section 'buss'; did you mean 'bus'\?"),
    "unknown key": ('[bus]\nurll = "x"\n', r"\[bus\] has no key 'urll'; did you mean 'url'\?"),
    "key like no other": ("[bus]\nqqq = 1\n", r"'qqq' \(known: \['url', 'user', 'password'\]\)"),
    "wrong type": ("[telemetry]\nsample_ratio = []\n", r"\[telemetry\]: Expected `float`"),
    "out of bounds": ("[telemetry]\nsample_ratio = 2.0\n", r"\[telemetry\]: .*<= 1"),
    "unknown model key": (
        '[[models]]\nid = "a"\npaht = ""\n',
        r"models.* 1 has no key 'paht'.*path",
    ),
    "model without id": ('[[models]]\npath = "x"\n', r"missing required field `id`"),
    "unknown engine": ('[[models]]\nid = "a"\nengine = "gpu"\n', r"\[\[models\]\] 1: .*gpu"),
    "model twice": ('[[models]]\nid = "a"\n[[models]]\nid = "a"\n', r"'a' is listed twice"),
    "models no list": ("[models]\n", r"models must be tables"),
    "models no tables": ("models = [1]\n", r"models must be tables"),
    "section no table": ("bus = 1\n", r"bus must be a table: \[bus\]"),
    "section in a list": ("[[bus]]\n", r"bus must be a table: \[bus\]"),
    "collector without a scheme": (
        '[telemetry]\notlp_endpoint = "localhost:4318"\n',
        r"\[telemetry\]: .*otlp_endpoint",
    ),
    "not TOML": ("[bus\n", r"talaria.toml"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, case: str) -> None:
    text, message = MISTAKES[case]

    def read_all() -> None:
        settings = load(tmp_path, text)
        settings.section("bus", BusConfig)
        settings.section("telemetry", TelemetryConfig)
        assert settings.models

    with pytest.raises(ConfigError, match=message):
        read_all()


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("TALARIA_BUSS__URL", "TALARIA_BUSS__URL: unknown section 'buss'; did you mean 'bus'"),
        ("TALARIA_BUS__ULR", r"^invalid_request: TALARIA_BUS__ULR: \[bus\] has no key 'ulr'; did"),
    ],
)
def test_an_unknown_variable_is_refused(tmp_path: Path, variable: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, FILE, {variable: "x"}).section("bus", BusConfig)


@pytest.mark.parametrize("variable", ["TALARIA_URL", "TALARIA_API_KEY", "OTHER__THING"])
def test_other_variables_are_left_alone(tmp_path: Path, variable: str) -> None:
    assert load(tmp_path, FILE, {variable: "x"}).section("policy", PolicyConfig) == PolicyConfig()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file: .*gone\.toml"):
        Settings.load(tmp_path / "gone.toml", {})
