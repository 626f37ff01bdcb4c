"""`talaria models`: the catalogue. IO."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import httpx

from talaria_cli import deployment as deployments
from talaria_cli import endpoint
from talaria_cli.output import print_json, say, table
from talaria_common.config import ModelEntry


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "models",
        help="list the catalogue",
        description="List the models of the catalogue: id, engine, path, size, context, and where "
        "their weights are (from the running stack if there is one, else from the disk).",
    )
    parser.add_argument("--prepare", action="store_true", help="make what is not there yet")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--url", help=f"a running stack (default: {endpoint.DEFAULT_URL})")
    parser.add_argument(
        "--config", metavar="FILE", help="settings (default: ./talaria.toml if there)"
    )
    parser.add_argument("--engine", choices=("torch", "fake"), help="engine of all models")
    parser.set_defaults(
        run=run, data=None, models=None, policy=None, nats_url=None, otlp=None, record=None
    )


def run(args: argparse.Namespace) -> int:
    """Print one row per model."""
    deployment = deployments.resolve(args)
    if args.prepare:
        deployments.prepare(deployment, say)
    served = _served(args.url)
    # A stack may serve other models under these ids: what it says goes before what is configured.
    local = [m for m in deployment.settings.models if _is_same(m, served.get(m.id))]
    rows = [_row(model, served) for model in local]
    known = {row["id"] for row in rows}
    rows += [_served_row(entry) for name, entry in served.items() if name not in known]
    if args.json:
        print_json(rows)
        return 0
    head = ("id", "engine", "path", "size", "context", "residency")
    print(table(head, [[_text(key, row[key]) for key in head] for row in rows], left=3))
    if any(row["residency"] == "not prepared" for row in rows):
        say("prepare the missing models with `talaria models --prepare`")
    return 0


def _served(url: str | None) -> dict[str, dict[str, Any]]:
    """What a running stack says of its models; nothing without one, unless it was asked for."""
    with endpoint.client(url or endpoint.DEFAULT_URL, timeout_s=3) as http:
        if url is not None:
            entries = endpoint.get(http, "/v1/models")["data"]
        else:
            try:
                answer = http.get("/v1/models")
                entries = answer.json()["data"] if answer.status_code == 200 else []
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                entries = []
    return {str(entry["id"]): entry for entry in entries if isinstance(entry, dict)}


def _is_same(model: ModelEntry, entry: dict[str, Any] | None) -> bool:
    """The running stack, if it lists the id at all, serves it by the engine that is configured."""
    return entry is None or entry.get("engine", model.engine) == model.engine


def _row(model: ModelEntry, served: dict[str, dict[str, Any]]) -> dict[str, Any]:
    entry = served.get(model.id, {})
    size = _weight_bytes(Path(model.path)) if model.path else model.weight_bytes or None
    on_disk = "prepared" if model.engine == "fake" or size else "not prepared"
    return {
        "id": model.id,
        "engine": model.engine,
        "path": model.path or None,
        "size": size,
        "context": entry.get("max_model_len") or model.max_model_len or None,
        "residency": _residency(entry) or on_disk,
    }


def _served_row(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": entry["id"],
        "engine": entry.get("engine"),
        "path": None,
        "size": None,
        "context": entry.get("max_model_len"),
        "residency": _residency(entry) or "served",
    }


def _residency(entry: dict[str, Any]) -> str | None:
    value = entry.get("residency")
    if isinstance(value, dict):
        return ", ".join(f"{tier} on {instance}" for instance, tier in sorted(value.items()))
    return str(value) if value else ("served" if entry else None)


def _weight_bytes(folder: Path) -> int | None:
    """Bytes of a model folder's weights; None if there are none."""
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return total or None


def _text(key: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.0f} MB" if key == "size" else str(value)
