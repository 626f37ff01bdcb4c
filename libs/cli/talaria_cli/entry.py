"""The installed `talaria` script: Ctrl-C is quiet even while the command is still being imported. IO."""

from __future__ import annotations


def main() -> int:
    """Import the command and run it; returns its exit code."""
    try:
        from talaria_cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130
