"""TCP ports: is one free, which one is. IO."""

from __future__ import annotations

import socket

from talaria_cli.failure import CommandFailed


def claim(host: str, port: int) -> int:
    """`port` if it can be listened on, any free one for 0. Raises `CommandFailed` if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CommandFailed(
                f"cannot listen on {host}:{port}: {error.strerror}; "
                "stop what listens there, or choose another port with --port (0: any free one)"
            ) from error
        free: int = probe.getsockname()[1]
        return free


def reachable(host: str) -> str:
    """`host` as a client on this machine writes it into a URL."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    return f"[{'::1' if host == '::' else host}]" if ":" in host else host
