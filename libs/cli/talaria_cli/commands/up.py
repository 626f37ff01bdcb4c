"""`talaria up`: a whole deployment on this machine. IO."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from typing import Any, Final

import httpx

from talaria_cli import deployment as deployments
from talaria_cli import lifetime, ports
from talaria_cli.deployment import Deployment
from talaria_cli.failure import CommandFailed, UsageError
from talaria_cli.nats import OwnNats
from talaria_cli.output import ProgressLine, duration, say
from talaria_cli.processes import Supervisor
from talaria_cli.stack import Stack, members
from talaria_common import logs
from talaria_common.config import TelemetryConfig

READY_WITHIN_S: Final = 60.0
"""From the last service's start to the gateway's yes."""
DRAIN_WITHIN_S: Final = 40.0


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "up",
        help="serve the catalogue on this machine",
        description="Start a whole deployment: a NATS server (unless one is configured), gateway, "
        "router, admission, kvstore and instances. Prints `talaria ready url=... nats=...` when "
        "calls can be served; Ctrl-C or SIGTERM lets running calls end, then stops everything.",
    )
    parser.add_argument("--processes", action="store_true", help="one process per service")
    parser.add_argument(
        "--instances", type=int, default=1, metavar="N", help="instances (default 1)"
    )
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="HTTP port (default 8080; 0: any free one)")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    deployments.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    if args.parent is not None:
        lifetime.die_with_parent(args.parent)
    if args.instances < 1:
        raise UsageError("--instances must be at least 1")
    deployment = deployments.resolve(args, host=args.host, port=args.port)
    host = deployment.gateway.host
    port = ports.claim(host, deployment.gateway.port)
    deployment = deployment.changed(gateway={"host": host, "port": port})
    with deployments.lock(deployment):
        deployments.prepare(deployment, say)
        return lifetime.run(lambda: _serve(deployment, args.instances, args.processes))


async def _serve(deployment: Deployment, instances: int, in_processes: bool) -> int:
    stop = lifetime.Stop()
    logs.set_up(deployment.settings.section("telemetry", TelemetryConfig).log_level)
    async with contextlib.AsyncExitStack() as cleanup:
        nats_url = deployment.bus.url
        if not nats_url:
            nats_url = await cleanup.enter_async_context(OwnNats(deployment.data_dir / "nats"))
        stack = (Supervisor if in_processes else Stack)(deployment, nats_url)
        cleanup.push_async_callback(stack.stop)
        url = f"http://{ports.reachable(deployment.gateway.host)}:{deployment.gateway.port}"
        if await stop.unless(_start(stack, members(instances), url)):
            print(f"talaria ready url={url} nats={nats_url}", flush=True)
            await stop.event.wait()
        await stop.drain(stack.drain(), DRAIN_WITHIN_S)
    return stop.exit_code


async def _start(stack: Stack | Supervisor, wanted: list[tuple[str, str]], url: str) -> None:
    line = ProgressLine()
    progress = asyncio.create_task(_show(line, "starting services, loading models"))
    try:
        await stack.start(wanted)
        await _wait_ready(url)
    finally:
        progress.cancel()
        line.clear()


async def _show(line: ProgressLine, text: str) -> None:
    start_s = time.monotonic()
    while True:
        await asyncio.sleep(0.5)
        line.show(f"{text} ... {duration(time.monotonic() - start_s)}")


async def _wait_ready(url: str) -> None:
    """Poll the gateway until it says that calls can be served."""
    deadline_s = time.monotonic() + READY_WITHIN_S
    why = "no answer"
    async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
        while time.monotonic() < deadline_s:
            try:
                answer = await http.get(f"{url}/health/ready")
            except httpx.HTTPError as error:
                why = repr(error)
            else:
                if answer.status_code == 200:
                    return
                why = f"{answer.status_code} {answer.text[:300]}"
            await asyncio.sleep(0.05)
    raise CommandFailed(f"the gateway is not ready after {READY_WITHIN_S:g} s: {why}")
