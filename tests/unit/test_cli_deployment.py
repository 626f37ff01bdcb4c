"""What one deployment runs: command line over environment over file, and what is refused."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import pytest

from talaria_cli.deployment import lock, resolve, to_toml
from talaria_cli.failure import CommandFailed, UsageError
from talaria_common.config import ConfigError, Settings

OPTIONS = ("config", "data", "engine", "models", "policy", "nats_url", "otlp", "record")

FILE = """
[gateway]
port = 9001

[[models]]
id = "big/one"
path = "/models/one"
max_model_len = 4096

[[models]]
id = "two"
engine = "fake"
"""


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No talaria.toml lies around and no variable is set."""
    monkeypatch.chdir(tmp_path)
    for name in ("TALARIA_CONFIG", "TALARIA_GATEWAY__PORT", "TALARIA_POLICY__NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**(dict.fromkeys(OPTIONS) | given))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "given.toml"
    path.write_text(FILE)
    return str(path)


def test_without_anything_the_default_catalogue_is_served() -> None:
    deployment = resolve(options())
    assert [m.id for m in deployment.settings.models] == ["smollm2-135m", "tiny-a", "tiny-b"]
    assert deployment.is_default_catalogue
    assert deployment.uses_torch
    assert deployment.gateway.port == 8080


def test_the_fake_engine_keeps_the_ids_and_needs_no_files() -> None:
    models = resolve(options(engine="fake")).settings.models
    assert [m.id for m in models] == ["smollm2-135m", "tiny-a", "tiny-b"]
    assert {(m.engine, m.path) for m in models} == {("fake", "")}


def test_the_command_line_wins_over_the_environment_over_the_file(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve(options(config=file)).gateway.port == 9001
    monkeypatch.setenv("TALARIA_GATEWAY__PORT", "9002")
    assert resolve(options(config=file)).gateway.port == 9002
    assert resolve(options(config=file), port=0).gateway.port == 0
    assert resolve(options(config=file)).changed(gateway={"port": 9004}).gateway.port == 9004


def test_a_file_in_the_working_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "talaria.toml").write_text(FILE)
    assert resolve(options()).gateway.port == 9001


def test_models_can_be_chosen_and_a_wrong_one_names_the_nearest(file: str) -> None:
    chosen = resolve(options(config=file, models="two")).settings.models
    assert [m.id for m in chosen] == ["two"]
    with pytest.raises(UsageError, match="did you mean 'big/one'"):
        resolve(options(config=file, models="big/on"))


def test_an_entry_without_a_path_cannot_run_on_torch(file: str) -> None:
    with pytest.raises(UsageError, match="two has no path"):
        resolve(options(config=file, engine="torch"))


def test_a_wrong_policy_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="did you mean 'round-only'"):
        resolve(options(policy="round-onyl"))
    assert resolve(options(policy="no-sp+ring=static")).policy.ring == "static"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gatway]\nport = 1", "did you mean 'gateway'"),
        ("[gateway]\nprot = 1", "did you mean 'port'"),
        ("[gateway]\nport = 'many'", "port"),
        ("not toml", "given.toml"),
    ],
)
def test_a_wrong_file_is_a_config_error_that_names_the_place(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "given.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        _ = resolve(options(config=str(path)), port=None).gateway


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        resolve(options(config="nowhere.toml"))


def test_children_read_the_same_settings_from_the_written_file(file: str, tmp_path: Path) -> None:
    deployment = resolve(options(config=file, data=str(tmp_path / "data"), policy="no-sp"), port=1)
    written = Settings.load(deployment.write(), env={})
    assert written.models == deployment.settings.models
    assert tomllib.loads(deployment.write().read_text())["policy"] == {"name": "no-sp"}


def test_toml_keeps_every_kind_of_value() -> None:
    tables = {
        "gateway": {"host": 'a "quoted"\\ \n\u007f é', "port": 1, "share": 0.5, "on": True},
        "models": [{"id": "a", "names": ["x", "y"]}, {"id": "b", "more": {"k": 1}}],
    }
    assert tomllib.loads(to_toml(tables)) == tables


def test_a_data_folder_serves_one_deployment_at_a_time(tmp_path: Path) -> None:
    deployment = resolve(options(data=str(tmp_path / "data")))
    with lock(deployment), pytest.raises(CommandFailed, match="another talaria"):
        lock(deployment)
    lock(deployment).close()


def test_deployments_on_different_ports_keep_their_data_apart() -> None:
    folders = {resolve(options(), port=port).data_dir for port in (8080, 8081)}
    assert len(folders) == 2
