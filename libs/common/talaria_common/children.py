"""Child processes that do not outlive this one. IO.

On Linux the kernel ends the child (SIGTERM) when this process ends in whatever way, kill -9
included. It does so when the *thread* that started the child ends, so that a thread is kept for
each child. The child has a session of its own: Ctrl-C in a terminal reaches this process alone,
which then stops its children in order.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

# Runs in the child before the program: 1 is PR_SET_PDEATHSIG, 15 SIGTERM. The parent may have
# gone before the call, which the kernel would not tell any more.
_SHIM: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def spawn(
    argv: Sequence[str | Path],
    *,
    output: IO[Any] | int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program that ends with this process; `output` gets its stdout and stderr.

    Raises OSError if it cannot be started. Any thread may call it.
    """
    command = [str(part) for part in argv]
    if sys.platform == "linux":
        import os

        command = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command]
    started = threading.Event()
    result: list[subprocess.Popen[bytes] | OSError] = []

    def keep() -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=None if env is None else dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        except OSError as error:
            result.append(error)
            started.set()
            return
        result.append(process)
        started.set()
        process.wait()

    threading.Thread(target=keep, name=f"keeps {Path(argv[0]).name}", daemon=True).start()
    started.wait()
    match result[0]:
        case OSError() as error:
            raise error
        case process:
            return process


def stop(process: subprocess.Popen[bytes], within_s: float) -> int:
    """End a child: SIGTERM, after `within_s` SIGKILL. Its exit status; idempotent."""
    if process.poll() is None:
        process.terminate()
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()
