"""`talaria serve NAME`: one service on its own. IO."""

from __future__ import annotations

import argparse
from typing import Any

from talaria_cli import deployment as deployments
from talaria_cli import lifetime, ports
from talaria_cli.commands.up import DRAIN_WITHIN_S
from talaria_cli.deployment import Deployment
from talaria_cli.failure import UsageError
from talaria_cli.output import say
from talaria_cli.stack import SERVICES, Stack


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "serve",
        help="run one service of a deployment",
        description="Run one service against an existing NATS server. Several members of a "
        "service have different names.",
    )
    parser.add_argument("name", choices=SERVICES, help="which service")
    parser.add_argument("--member", help="its name in the deployment (default: NAME-1, i-1)")
    parser.add_argument("--host", help="address the gateway listens on")
    parser.add_argument("--port", type=int, help="port the gateway listens on")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    deployments.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    if args.parent is not None:
        lifetime.die_with_parent(args.parent)
    deployment = deployments.resolve(args, host=args.host, port=args.port)
    if not deployment.bus.url:
        raise UsageError("no NATS server is configured: give --nats-url or [bus] url")
    if args.name == "gateway":
        port = ports.claim(deployment.gateway.host, deployment.gateway.port)
        deployment = deployment.changed(gateway={"port": port})
    if args.name == "instance":
        deployments.prepare(deployment, say)
    member = args.member or ("i-1" if args.name == "instance" else f"{args.name}-1")
    return lifetime.run(lambda: _serve(deployment, args.name, member))


async def _serve(deployment: Deployment, name: str, member: str) -> int:
    stop = lifetime.Stop()
    stack = Stack(deployment, deployment.bus.url)
    try:
        if await stop.unless(stack.start([(name, member)])):
            print(f"talaria serving {name} member={member}", flush=True)
            await stop.event.wait()
        await stop.drain(stack.drain(), DRAIN_WITHIN_S)
    finally:
        await stack.stop()
    return stop.exit_code
