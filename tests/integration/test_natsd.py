"""The nats-server that Talaria starts itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from talaria_common import children
from talaria_common.bus import PAYLOAD_BYTES_MAX
from talaria_common.config import ConfigError
from talaria_common.errors import Rejected, Unavailable
from talaria_common.nats_bus import NatsBus
from talaria_common.natsd import NatsServer
from talaria_common.testing import eventually, find_free_port


async def test_it_listens_on_a_free_port_with_our_payload_limit(tmp_path: Path) -> None:
    first, second = NatsServer(tmp_path / "a").start(), NatsServer(tmp_path / "b").start()
    try:
        assert first.port != second.port
        bus = await NatsBus.connect(second.url)
        assert bus._client.max_payload == PAYLOAD_BYTES_MAX
        await bus.close()
    finally:
        first.stop()
        second.stop()


async def test_a_bucket_survives_stop_and_start_on_the_same_port(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, find_free_port()).start()
    url = server.url
    for n in range(2):
        bus = await NatsBus.connect(url)
        held = await (await bus.bucket("kept")).get("k")
        assert (held.value if held else None) == (b"1" if n else None)
        await (await bus.bucket("kept")).put("k", b"1")
        await bus.close()
        server.stop()
        server.stop()
        assert server.pid is None
        server.start()
        assert server.url == url
    server.stop()


def test_a_taken_port_names_the_port_and_the_setting(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = NatsServer(tmp_path, port, setting="--nats-port")
        with pytest.raises(ConfigError, match=rf"port {port} .* taken.*--nats-port"):
            server.start()
        assert server.pid is None


def test_a_data_folder_in_use_is_refused(tmp_path: Path) -> None:
    server = NatsServer(tmp_path).start()
    try:
        with pytest.raises(ConfigError, match="another talaria uses"):
            NatsServer(tmp_path).start()
        assert server.pid is not None
        assert _is_alive(server.pid)
    finally:
        server.stop()
    NatsServer(tmp_path).start().stop()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("in the way")
    with pytest.raises(Unavailable, match="does not start"):
        NatsServer(tmp_path).start()


PARENT = """
    import sys, time
    from talaria_common.natsd import NatsServer
    server = NatsServer(sys.argv[1]).start()
    print(server.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_no_server_outlives_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert _is_alive(pid)
    os.kill(parent.pid, how)
    parent.wait(5)
    await eventually(lambda: not _is_alive(pid), 5, "the server ends too")


async def test_a_child_outlives_the_thread_that_asked_for_it() -> None:
    spawned: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: spawned.append(children.spawn(["sleep", "60"])))
    thread.start()
    thread.join()
    (child,) = spawned
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.2)
    assert children.stop(child, 5) == -signal.SIGTERM
    assert children.stop(child, 5) == -signal.SIGTERM


def test_a_child_that_ignores_the_signal_is_killed() -> None:
    script = (
        "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    )
    read, write = os.pipe()
    child = children.spawn([sys.executable, "-c", script], output=write)
    os.close(write)
    with os.fdopen(read) as output:
        assert output.readline() == "1\n"
    assert children.stop(child, 0.05) == -signal.SIGKILL


async def test_connect_without_a_server_says_what_to_do() -> None:
    url = f"nats://secret:word@127.0.0.1:{find_free_port()}"
    with pytest.raises(
        Unavailable, match=r"no NATS server answers at nats://127.*\[bus\] url"
    ) as e:
        await NatsBus.connect(url, within_s=0.3)
    assert "word" not in str(e.value)


async def test_connect_with_a_wrong_password_is_refused_at_once(tmp_path: Path) -> None:
    from talaria_common.natsd import find_binary

    port = find_free_port()
    config = tmp_path / "auth.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\nauthorization {{ user: "u", password: "right" }}\n'
    )
    child = children.spawn([find_binary(), "-c", config], output=subprocess.DEVNULL)
    try:
        url = f"nats://127.0.0.1:{port}"
        bus = await NatsBus.connect(url, user="u", password="right")
        await bus.close()
        with pytest.raises(Rejected, match="unauthorised"):
            await NatsBus.connect(url, user="u", password="wrong", within_s=30)
    finally:
        children.stop(child, 5)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
