"""How a command fails. Pure."""

from __future__ import annotations


class CommandFailed(Exception):
    """The command could not do its work; the text says what to do next. Exit code 1."""


class UsageError(Exception):
    """The command line asks for something that does not exist or does not go together. Exit code 2."""
