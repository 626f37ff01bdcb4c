"""The tree is what pyproject.toml says, and imports go the way they may."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HATCH = PROJECT["tool"]["hatch"]["build"]
PACKAGES = sorted(
    str(path.parent.relative_to(ROOT))
    for top in ("libs", "services")
    for path in (ROOT / top).glob("*/talaria_*/__init__.py")
)
SERVICES = ("gateway", "router", "admission", "instance", "kvstore")
CORE_NAMES = ["policy", "state", "scheduler", "retention", "ledger", "chain", "policies", "perf"]
BANNED = set(PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"])
HEAVY = ("torch", "vllm", "lmcache", "transformers", "numpy")


def test_pyproject_lists_every_package() -> None:
    assert len(PACKAGES) >= 9
    assert sorted(HATCH["targets"]["wheel"]["packages"]) == PACKAGES
    assert sorted(HATCH["dev-mode-dirs"]) == sorted(str(Path(p).parent) for p in PACKAGES)
    assert sorted(PROJECT["tool"]["mypy"]["mypy_path"]) == sorted(HATCH["dev-mode-dirs"])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_typed_and_says_what_it_is(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))


def _modules(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def _imported(path: Path) -> set[str]:
    """Top-level names of all modules that a file imports, lazily or not."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
    return found


CORE = [path for path in _modules("libs", "services") if path.stem in CORE_NAMES]


def test_the_ban_in_pyproject_covers_the_core_files() -> None:
    (pattern,) = (
        key
        for key, rules in PROJECT["tool"]["ruff"]["lint"]["per-file-ignores"].items()
        if "TID251" in rules
    )
    assert pattern == "!**/{" + ",".join(CORE_NAMES) + "}.py"
    assert {"chain", "policies"} <= {path.stem for path in CORE}


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_decisions_are_pure(path: Path) -> None:
    assert not _imported(path) & BANNED


def test_common_imports_no_service() -> None:
    for path in _modules("libs/common"):
        ours = {name for name in _imported(path) if name.startswith("talaria_")}
        assert ours <= {"talaria_common"}, path


@pytest.mark.parametrize("service", SERVICES)
def test_services_do_not_import_each_other(service: str) -> None:
    others = {f"talaria_{name}" for name in SERVICES if name != service}
    for path in _modules(f"services/{service}"):
        assert not _imported(path) & others, path


@pytest.mark.parametrize("service", ["gateway", "router", "admission"])
def test_services_without_a_model_import_no_heavy_library(service: str) -> None:
    code = (
        f"import sys, talaria_{service}.main\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
