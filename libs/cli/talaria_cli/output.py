"""What the commands print: tables, progress, figures. IO (writes to the terminal)."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, TextIO

import msgspec

SPARSE_S: Final = 10.0
"""Interval of progress lines where there is no terminal."""
LIVE_S: Final = 0.2


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Columns aligned, the first `left` to the left, the others to the right."""
    widths = [max(len(row[n]) for row in [list(head), *map(list, rows)]) for n in range(len(head))]
    lines: list[str] = []
    for row in (head, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if n < left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def print_json(value: Any) -> None:
    """`value` as indented JSON on stdout."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def say(text: str) -> None:
    """A line for people, on stderr: stdout is for results."""
    print(text, file=sys.stderr, flush=True)


class ProgressLine:
    """One line that changes in place on a terminal; elsewhere a line now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_live = self._stream.isatty()
        self._shown_s = 0.0
        self._has_line = False

    def show(self, text: str, *, now: bool = False) -> None:
        """Show `text`, unless the last one was shown a moment ago."""
        at_s = time.monotonic()
        if not now and at_s - self._shown_s < (LIVE_S if self._is_live else SPARSE_S):
            return
        self._shown_s = at_s
        if self._is_live:
            columns = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{text[:columns]}")
            self._has_line = True
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Take the live line away."""
        if self._has_line:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._has_line = False


def duration(seconds: float) -> str:
    """`12 s` or `3 min 05 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
