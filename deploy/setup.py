"""Makes .venv with everything Talaria needs; quick and offline once it is there. Standard library only.

    python3 deploy/setup.py [--force]

Phases: check the machine, create the environment, choose the PyTorch build, install with one pip
command, try it out. A stamp in .venv keeps what it was made from; while that is unchanged nothing
is done. `TORCH_INDEX` names the package index that PyTorch comes from (its CPU index saves
gigabytes on a machine without a GPU; PyTorch's install page lists them).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "talaria-setup.json"
LOG = VENV / "talaria-setup.log"
EXTRAS = "torch,catalog,dev"
TORCH = "torch>=2.13,<2.14"
DISK_GB = 4
SAY_EVERY_S = 15.0
BIG = re.compile(r"\((\d{2,}(?:\.\d+)? MB|\d+(?:\.\d+)? GB)\)")


def main() -> int:
    """Set up if needed; the exit code."""
    wanted = {
        "project": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
        "root": str(ROOT),
        "extras": EXTRAS,
        "torch_index": os.environ.get("TORCH_INDEX", ""),
    }
    if "--force" not in sys.argv and is_current(wanted):
        return 0
    began_s = time.monotonic()
    say("Setting up .venv: PyTorch, the libraries and the tools, from your package index.")
    say("About 1.3 GB on disk and 2 minutes (with a CUDA build of PyTorch 5 GB and longer).")
    check_machine()
    STAMP.unlink(missing_ok=True)
    create_venv()
    install(torch_choice(os.environ.get("TORCH_INDEX", "")))
    try_out()
    STAMP.write_text(json.dumps(wanted, indent=1) + "\n")
    say(f"Set up in {time.monotonic() - began_s:.0f} s.")
    return 0


def is_current(wanted: dict[str, str]) -> bool:
    """.venv was made from what is wanted now, and its Python still runs."""
    try:
        if json.loads(STAMP.read_text()) != wanted:
            return False
        return subprocess.run([PYTHON, "-c", ""], check=False, timeout=30).returncode == 0
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return False


def check_machine() -> None:
    """Stop early where it cannot work."""
    if sys.version_info < (3, 11):  # noqa: UP036 (whoever starts it may have an older one)
        fail(
            f"Python {platform.python_version()} is too old.",
            "install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11 ...",
        )
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < DISK_GB and not VENV.exists():
        fail(
            f"Only {free_gb:.1f} GB are free in {ROOT}.",
            f"make room for {DISK_GB} GB, or clone to another disk",
        )


def create_venv() -> None:
    """An environment whose Python runs; a broken one is made anew."""
    if PYTHON.exists():
        works = subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True, check=False)
        if works.returncode == 0:
            return
        shutil.rmtree(VENV)
    say("Creating .venv ...")
    done = subprocess.run(
        [sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        fail(
            "Python cannot create a virtual environment:\n"
            + (done.stdout + done.stderr).strip()[-800:],
            "install the venv module (Debian, Ubuntu: apt install python3-venv), then try again",
        )


def torch_choice(index: str) -> list[str]:
    """pip's arguments that choose the PyTorch build; tells what it will be."""
    if index:
        say(f"PyTorch: from TORCH_INDEX={index}")
        return ["--extra-index-url", index]
    has_gpu = has_nvidia()
    version = found_torch()
    if not version:
        return []  # the install itself will say what is wrong
    say(f"PyTorch: {version}{', for your NVIDIA GPU' if has_gpu and '+cpu' not in version else ''}")
    if has_gpu and "+cpu" in version:
        say("  This build does not use your NVIDIA GPU: set TORCH_INDEX to a CUDA index for one.")
    if not has_gpu and sys.platform == "linux" and "+" not in version:
        say("  This build brings CUDA libraries (gigabytes) that this machine has no use for:")
        say("  Ctrl-C, set TORCH_INDEX to PyTorch's CPU index and start again to save them.")
    return []


def has_nvidia() -> bool:
    """An NVIDIA driver answers."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"GPU" in done.stdout


def found_torch() -> str:
    """The version pip would install by itself; empty if it cannot tell."""
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--report", "-", TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
        version: str = json.loads(done.stdout)["install"][0]["metadata"]["version"]
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError):
        return ""
    return version


def install(torch_arguments: list[str]) -> None:
    """One pip command; its output goes to the log, its big steps to the terminal."""
    # --no-compile: most of what comes is never imported, the rest is compiled when it is.
    command = [str(PYTHON), "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
    command += [*torch_arguments, "--editable", f"{ROOT}[{EXTRAS}]"]
    say("Resolving and downloading ...")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    lines: list[str] = []
    progress = Progress()
    try:
        with LOG.open("w") as log:
            for line in process.stdout:
                log.write(line)
                lines.append(line.rstrip())
                if step := told(line):
                    progress.step(step)
                elif line.startswith("Collecting "):
                    progress.now = f"collecting {line.split()[1]}"
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        progress.is_over.set()
    if code:
        reason = "\n".join(line for line in lines if "ERROR" in line) or "\n".join(lines[-8:])
        fail(f"pip could not install everything:\n{reason[-2000:]}", advice(reason))


class Progress:
    """Says each step, and every 15 s that the last one goes on."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self._began_s = time.monotonic()
        self.now = "resolving"
        threading.Thread(target=self._remind, daemon=True).start()

    def step(self, step: str) -> None:
        self.now = step
        say(f"  {time.monotonic() - self._began_s:4.0f} s  {step}")

    def _remind(self) -> None:
        while not self.is_over.wait(SAY_EVERY_S):
            say(f"  {time.monotonic() - self._began_s:4.0f} s  still {self.now}")


def told(line: str) -> str:
    """What a line of pip means to who waits; empty for most."""
    line = line.strip()
    size = BIG.search(line)
    if line.startswith("Downloading ") and size:
        return f"downloading {line.split()[1].split('/')[-1].split('-')[0]} ({size[1]})"
    if line.startswith("Installing collected packages:"):
        return f"installing {line.count(',') + 1} packages"
    return ""


def advice(reason: str) -> str:
    """What to do about a failure of pip."""
    if "No space left" in reason:
        return "make room on the disk, then run the same command again"
    if "No matching distribution" in reason or "from versions: none" in reason:
        return (
            "check the network, a proxy's settings and `pip config list`; packages that pip "
            f"cannot see it cannot install. PyTorch needs Python 3.11 to 3.14 (this is "
            f"{platform.python_version()}); TORCH_INDEX names another index for it"
        )
    return f"see {LOG}, then run the same command again: finished downloads are kept"


def try_out() -> None:
    """The command starts, and the engine's library loads."""
    code = "import talaria_cli.main, torch; print(torch.__version__)"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        fail(
            "The installation does not start:\n" + done.stderr.strip()[-1500:],
            "remove .venv (`make clean`) and run the same command again",
        )


def say(text: str) -> None:
    """One line for the user, at once."""
    print(text, flush=True)


def fail(what: str, advice: str) -> None:
    """Say what went wrong and what to do, and stop."""
    print(f"\nSet-up failed. {what}\n\nWhat to do: {advice}.", file=sys.stderr, flush=True)
    raise SystemExit(1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nSet-up interrupted; the same command goes on where it stopped.", file=sys.stderr)
        sys.exit(130)
