"""What both kinds of bus promise (talaria_common.bus), one test for NATS and the in-memory one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from talaria_common.bus import (
    PAYLOAD_BYTES_MAX,
    Bus,
    BusDown,
    KvChange,
    Msg,
    NoResponders,
    RequestTimeout,
    TooLarge,
    WrongRevision,
)
from talaria_common.memory_bus import MemoryBroker
from talaria_common.nats_bus import NatsBus
from talaria_common.natsd import NatsServer
from talaria_common.testing import eventually


class World:
    """One kind of bus: connections to it, and its loss and return."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Bus]],
        down: Callable[[], None],
        up: Callable[[], None],
    ) -> None:
        self._connect = connect
        self.down = down
        self.up = up
        self.buses: list[Bus] = []

    async def connect(self) -> Bus:
        bus = await self._connect()
        self.buses.append(bus)
        return bus


def _memory_world() -> World:
    broker = MemoryBroker()

    async def connect() -> Bus:
        return broker.connect()

    return World(connect, broker.down, broker.up)


def _nats_world(server: NatsServer) -> World:
    async def connect() -> Bus:
        return await NatsBus.connect(server.url)

    def up() -> None:
        server.start()

    return World(connect, server.kill, up)


@pytest.fixture(params=["memory", "nats"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        made = _memory_world()
    else:
        made = _nats_world(request.getfixturevalue("nats_server"))
    yield made
    for bus in made.buses:
        await bus.close()


@pytest.fixture(params=["memory", "nats"])
async def mortal_world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """A world of the test's own, which it may take down."""
    if request.param == "memory":
        made = _memory_world()
        yield made
        for bus in made.buses:
            await bus.close()
        return
    server = NatsServer(tmp_path / "nats").start()
    made = _nats_world(server)
    yield made
    for bus in made.buses:
        await bus.close()
    server.stop()


def subject() -> str:
    return f"test.{uuid.uuid4().hex}"


class Heard:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[Msg] = []

    async def __call__(self, message: Msg) -> None:
        self.messages.append(message)

    @property
    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages]

    async def wait(self, count: int) -> list[bytes]:
        await eventually(lambda: len(self.messages) >= count, 5, f"{count} messages")
        return self.payloads


async def test_messages_of_one_publisher_arrive_in_order_and_one_at_a_time(world: World) -> None:
    sender, receiver = await world.connect(), await world.connect()
    topic, got, inside = subject(), [], 0

    async def slow(message: Msg) -> None:
        nonlocal inside
        assert inside == 0
        inside += 1
        await asyncio.sleep(0)
        got.append(int(message.payload))
        inside -= 1

    await receiver.subscribe(topic, slow)
    await receiver.barrier()
    for n in range(200):
        await sender.publish(topic, str(n).encode())
    await eventually(lambda: len(got) == 200, 5, "all messages")
    assert got == list(range(200))


@pytest.mark.parametrize(
    ("pattern", "name", "is_heard"),
    [
        ("{}.a.b", "{}.a.b", True),
        ("{}.a.b", "{}.a", False),
        ("{}.*.b", "{}.x.b", True),
        ("{}.*", "{}.a.b", False),
        ("{}.>", "{}.a.b", True),
        ("{}.>", "{}", False),
        ("{}.a.*", "{}.a", False),
    ],
)
async def test_wildcards_match_tokens(
    world: World, pattern: str, name: str, is_heard: bool
) -> None:
    bus, base, heard, end = await world.connect(), subject(), Heard(), Heard()
    await bus.subscribe(pattern.format(base), heard)
    await bus.subscribe("end." + base, end)
    await bus.publish(name.format(base), b"1")
    await bus.publish("end." + base, b"")
    await end.wait(1)
    await bus.barrier()
    assert len(heard.messages) == int(is_heard)


async def test_one_member_of_a_queue_group_gets_each_message(world: World) -> None:
    sender, left, right, plain = [await world.connect() for _ in range(4)]
    topic, by_left, by_right, by_all = subject(), Heard(), Heard(), Heard()
    await left.subscribe(topic, by_left, queue="group")
    await right.subscribe(topic, by_right, queue="group")
    await plain.subscribe(topic, by_all)
    for bus in (left, right, plain):
        await bus.barrier()
    for n in range(60):
        await sender.publish(topic, str(n).encode())
    await by_all.wait(60)
    await eventually(lambda: len(by_left.messages) + len(by_right.messages) == 60, 5, "all taken")
    assert sorted(by_left.payloads + by_right.payloads) == sorted(by_all.payloads)
    assert by_left.messages
    assert by_right.messages


async def test_request_gets_the_answer_with_its_headers(world: World) -> None:
    asker, answerer = await world.connect(), await world.connect()
    topic = subject()

    async def answer(message: Msg) -> None:
        assert message.headers == {"trace": "x"}
        await answerer.publish(message.reply, message.payload + b"!", headers={"k": "v"})

    await answerer.subscribe(topic, answer)
    await answerer.barrier()
    got = await asker.request(topic, b"hi", timeout_s=2, headers={"trace": "x"})
    assert (got.payload, dict(got.headers), got.is_no_responders) == (b"hi!", {"k": "v"}, False)


async def test_an_empty_answer_is_an_answer(world: World) -> None:
    bus, topic = await world.connect(), subject()

    async def answer(message: Msg) -> None:
        await bus.publish(message.reply, b"")

    await bus.subscribe(topic, answer)
    assert (await bus.request(topic, b"", timeout_s=2)).payload == b""


async def test_request_without_responders_fails_at_once(world: World) -> None:
    bus = await world.connect()
    async with asyncio.timeout(1):
        with pytest.raises(NoResponders):
            await bus.request(subject(), b"", timeout_s=30)


async def test_request_without_answer_times_out(world: World) -> None:
    bus, topic = await world.connect(), subject()
    await bus.subscribe(topic, Heard())
    with pytest.raises(RequestTimeout, match=topic):
        await bus.request(topic, b"", timeout_s=0.05)


async def test_many_requests_get_their_own_answers(world: World) -> None:
    bus, topic = await world.connect(), subject()
    held: list[Msg] = []

    async def answer_backwards(message: Msg) -> None:
        held.append(message)
        if len(held) == 50:
            for kept in reversed(held):
                await bus.publish(kept.reply, kept.payload)

    await bus.subscribe(topic, answer_backwards)
    asked = [bus.request(topic, str(n).encode(), timeout_s=5) for n in range(50)]
    answers = await asyncio.gather(*asked)
    assert [answer.payload for answer in answers] == [str(n).encode() for n in range(50)]


async def test_a_handler_may_make_requests(world: World) -> None:
    bus, front, back = await world.connect(), subject(), subject()

    async def inner(message: Msg) -> None:
        await bus.publish(message.reply, b"deep")

    async def outer(message: Msg) -> None:
        answer = await bus.request(back, b"", timeout_s=2)
        await bus.publish(message.reply, answer.payload)

    await bus.subscribe(back, inner)
    inbox, heard = bus.new_inbox(), Heard()

    async def through(message: Msg) -> None:
        heard.messages.append(await bus.request(front, b"", timeout_s=2))

    await bus.subscribe(front, outer)
    await bus.listen(inbox, through)
    await bus.publish(inbox, b"go")
    assert await heard.wait(1) == [b"deep"]


async def test_publish_with_reply_and_no_responders_tells_the_reply_subject(world: World) -> None:
    bus, gone, heard = await world.connect(), subject(), Heard()
    inbox = bus.new_inbox()
    await bus.listen(inbox, heard)
    await bus.publish(gone, b"token", reply=f"{inbox}.2")
    await heard.wait(1)
    (message,) = heard.messages
    assert message.is_no_responders
    assert message.subject == f"{inbox}.2"
    assert message.payload == b""


async def test_an_inbox_has_interest_while_its_connection_lives(world: World) -> None:
    owner, sender, heard = await world.connect(), await world.connect(), Heard()
    inbox, answers = owner.new_inbox(), sender.new_inbox()
    await owner.listen(inbox, Heard())
    await sender.listen(answers, heard)
    await sender.publish(inbox, b"token", reply=answers)
    await sender.barrier()
    assert heard.messages == []
    await owner.close()

    async def is_told() -> bool:  # the server learns of the end of a connection by and by
        await sender.publish(inbox, b"token", reply=answers)
        await sender.barrier()
        return bool(heard.messages)

    await eventually(is_told, 5, "no responders")
    assert heard.messages[0].is_no_responders


async def test_a_handler_that_raises_keeps_its_subscription(world: World) -> None:
    bus, topic, heard = await world.connect(), subject(), Heard()

    async def picky(message: Msg) -> None:
        if message.payload == b"bad":
            raise ValueError("bad")
        if message.payload == b"cut":
            raise asyncio.CancelledError  # of a task that it waited for
        await heard(message)

    await bus.subscribe(topic, picky)
    for payload in (b"bad", b"cut", b"good"):
        await bus.publish(topic, payload)
    assert await heard.wait(1) == [b"good"]
    assert bus.handler_errors == 2  # type: ignore[attr-defined]


async def test_listen_hears_its_inbox_and_one_token_below(world: World) -> None:
    owner, sender = await world.connect(), await world.connect()
    mine, other = Heard(), Heard()
    inbox, second = owner.new_inbox(), owner.new_inbox()
    assert inbox != second
    await owner.listen(inbox, mine)
    await owner.listen(second, other)
    for name in (inbox, f"{inbox}.2", second, f"{inbox}.2.x"):
        await sender.publish(name, name.encode())
    await other.wait(1)
    assert await mine.wait(2) == [inbox.encode(), f"{inbox}.2".encode()]
    assert other.payloads == [second.encode()]


async def test_a_slow_listener_holds_up_nobody(world: World) -> None:
    bus, topic, heard, release = await world.connect(), subject(), Heard(), asyncio.Event()

    async def stuck(message: Msg) -> None:
        await release.wait()

    async def answer(message: Msg) -> None:
        await bus.publish(message.reply, b"ok")

    slow, fast = bus.new_inbox(), bus.new_inbox()
    await bus.listen(slow, stuck)
    await bus.listen(fast, heard)
    await bus.subscribe(topic, answer)
    await bus.publish(slow, b"")
    await bus.publish(fast, b"quick")
    assert await heard.wait(1) == [b"quick"]
    assert (await bus.request(topic, b"", timeout_s=2)).payload == b"ok"
    release.set()


async def test_nothing_arrives_after_unsubscribe(world: World) -> None:
    bus, topic, before, after = await world.connect(), subject(), Heard(), Heard()
    inbox = bus.new_inbox()
    subscription = await bus.subscribe(topic, before)
    listening = await bus.listen(inbox, before)
    for _ in range(2):
        await subscription.unsubscribe()
        await listening.unsubscribe()
    await bus.subscribe(topic, after)
    await bus.publish(inbox, b"x")
    await bus.publish(topic, b"x")
    await after.wait(1)
    assert before.messages == []


async def test_listen_refuses_a_foreign_subject(world: World) -> None:
    bus, other = await world.connect(), await world.connect()
    with pytest.raises(ValueError, match="not an inbox of this connection"):
        await bus.listen(other.new_inbox(), Heard())


async def test_after_a_barrier_other_connections_see_the_subscription(world: World) -> None:
    """A flush alone lost about one in 40 of these on NATS."""
    asker, answerer = await world.connect(), await world.connect()

    async def answer(message: Msg) -> None:
        await answerer.publish(message.reply, message.payload)

    for n in range(100):
        topic = subject()
        await answerer.subscribe(topic, answer)
        await answerer.barrier()
        got = await asker.request(topic, str(n).encode(), timeout_s=2)
        assert got.payload == str(n).encode()


async def test_a_large_payload_arrives_whole(world: World) -> None:
    bus, topic, heard = await world.connect(), subject(), Heard()
    body = bytes(range(256)) * (6 * 2**20 // 256)
    await bus.subscribe(topic, heard)
    await bus.publish(topic, body)
    assert (await heard.wait(1))[0] == body


async def test_a_payload_over_the_limit_is_refused_with_the_limit(world: World) -> None:
    bus = await world.connect()
    with pytest.raises(TooLarge, match=str(PAYLOAD_BYTES_MAX)):
        await bus.publish(subject(), bytes(PAYLOAD_BYTES_MAX + 1))
    assert bus.is_connected


async def test_close_lets_handlers_end_and_sends_what_they_publish(world: World) -> None:
    bus, other = await world.connect(), await world.connect()
    topic, results, heard, started = subject(), subject(), Heard(), asyncio.Event()

    async def work(message: Msg) -> None:
        started.set()
        await asyncio.sleep(0.05)
        await bus.publish(results, message.payload)

    await other.subscribe(results, heard)
    await other.barrier()
    await bus.subscribe(topic, work)
    await bus.barrier()
    for n in range(3):
        await other.publish(topic, str(n).encode())
    await started.wait()
    await bus.close()
    assert await heard.wait(3) == [b"0", b"1", b"2"]


async def test_close_is_idempotent_and_final(world: World) -> None:
    bus = await world.connect()
    await asyncio.gather(bus.close(), bus.close())
    await bus.close()
    assert not bus.is_connected
    with pytest.raises(BusDown):
        await bus.publish(subject(), b"")
    with pytest.raises(BusDown):
        await bus.request(subject(), b"", timeout_s=1)
    with pytest.raises(BusDown):
        await bus.subscribe(subject(), Heard())


# --- buckets ------------------------------------------------------------------------------------


def bucket_name() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


async def test_bucket_gives_back_what_was_put(world: World) -> None:
    bus, name = await world.connect(), bucket_name()
    bucket = await bus.bucket(name)
    assert await bucket.get("k") is None
    first = await bucket.put("k", b"1")
    second = await bucket.put("k", b"2")
    assert second > first
    assert await bucket.get("k") == KvChange("k", b"2", second)
    assert await (await (await world.connect()).bucket(name)).get("k") is not None


async def test_bucket_put_with_a_revision_is_compare_and_set(world: World) -> None:
    bucket = await (await world.connect()).bucket(bucket_name())
    first = await bucket.put("k", b"1", revision=0)
    with pytest.raises(WrongRevision):
        await bucket.put("k", b"x", revision=0)
    second = await bucket.put("k", b"2", revision=first)
    with pytest.raises(WrongRevision):
        await bucket.put("k", b"x", revision=first)
    assert await bucket.get("k") == KvChange("k", b"2", second)


async def test_bucket_delete_makes_room_for_a_first_write(world: World) -> None:
    bucket = await (await world.connect()).bucket(bucket_name())
    first = await bucket.put("k", b"1", revision=0)
    await bucket.delete("k")
    assert await bucket.get("k") is None
    assert await bucket.put("k", b"2", revision=0) > first


async def test_watch_tells_what_is_there_then_none_then_changes(world: World) -> None:
    bus = await world.connect()
    bucket = await bus.bucket(bucket_name())
    await bucket.put("a", b"old")
    await bucket.put("gone", b"x")
    await bucket.delete("gone")
    last_a = await bucket.put("a", b"1")
    last_b = await bucket.put("b", b"2")
    watch = bucket.watch()
    seen = [await anext(watch) for _ in range(3)]
    assert seen == [KvChange("a", b"1", last_a), KvChange("b", b"2", last_b), None]
    new = await bucket.put("b", b"3")
    assert await anext(watch) == KvChange("b", b"3", new)
    await bucket.delete("a")
    change = await anext(watch)
    assert change is not None
    assert (change.key, change.value) == ("a", None)


async def test_watch_of_an_empty_bucket_starts_with_none(world: World) -> None:
    bucket = await (await world.connect()).bucket(bucket_name())
    assert await anext(bucket.watch()) is None


# --- loss and return of the bus -----------------------------------------------------------------


async def test_loss_is_told_and_nothing_is_accepted_meanwhile(mortal_world: World) -> None:
    bus, events = await mortal_world.connect(), []
    bus.on_disconnect(lambda: events.append("lost"))
    bus.on_reconnect(lambda: events.append("back"))
    bucket = await bus.bucket(bucket_name())
    mortal_world.down()
    await eventually(lambda: events == ["lost"], 3, "the loss is told")
    assert not bus.is_connected
    async with asyncio.timeout(1):
        with pytest.raises(BusDown):
            await bus.publish(subject(), b"")
        with pytest.raises(BusDown):
            await bus.request(subject(), b"", timeout_s=30)
        with pytest.raises(BusDown):
            await bucket.get("k")
        with pytest.raises(BusDown):
            await bus.barrier()
    mortal_world.up()
    await eventually(lambda: events == ["lost", "back"], 3, "the return is told")
    assert bus.is_connected


async def test_an_open_request_ends_with_the_connection(mortal_world: World) -> None:
    bus, topic = await mortal_world.connect(), subject()
    await bus.subscribe(topic, Heard())
    asking = asyncio.ensure_future(bus.request(topic, b"", timeout_s=60))
    await asyncio.sleep(0)
    await bus.barrier()
    mortal_world.down()
    async with asyncio.timeout(3):
        with pytest.raises(BusDown):
            await asking


async def test_everything_works_again_after_the_return(mortal_world: World) -> None:
    bus, other = await mortal_world.connect(), await mortal_world.connect()
    topic, during, heard, below = subject(), subject(), Heard(), Heard()
    inbox = bus.new_inbox()

    async def answer(message: Msg) -> None:
        await bus.publish(message.reply, message.payload)

    await bus.subscribe(topic, answer)
    await bus.listen(inbox, below)
    bucket = await bus.bucket("kept")
    revision = await bucket.put("k", b"1")
    await bus.barrier()
    for _ in range(2):
        mortal_world.down()
        await eventually(lambda: not bus.is_connected and not other.is_connected, 3, "lost")
        await bus.subscribe(during, heard)
        mortal_world.up()
        await eventually(lambda: bus.is_connected and other.is_connected, 3, "back")
    assert (await other.request(topic, b"again", timeout_s=2)).payload == b"again"
    await other.publish(during, b"x")
    assert await heard.wait(2) == [b"x", b"x"]  # it subscribed twice
    await other.publish(f"{inbox}.1", b"y")
    assert await below.wait(1) == [b"y"]
    assert await bucket.get("k") == KvChange("k", b"1", revision)
    await bucket.put("k", b"2", revision=revision)
    with pytest.raises(NoResponders):
        await other.request(subject(), b"", timeout_s=2)


async def test_watch_goes_on_after_the_return_and_repeats_nothing(mortal_world: World) -> None:
    watcher, writer = await mortal_world.connect(), await mortal_world.connect()
    seen: list[KvChange | None] = []

    async def follow() -> None:
        async for change in (await watcher.bucket("kept")).watch():
            seen.append(change)  # noqa: PERF401

    bucket = await writer.bucket("kept")
    await bucket.put("a", b"1")
    await bucket.put("b", b"1")
    following = asyncio.ensure_future(follow())
    await eventually(lambda: len(seen) == 3, 5, "the first listing")
    mortal_world.down()
    await eventually(lambda: not (watcher.is_connected or writer.is_connected), 3, "lost")
    mortal_world.up()
    await eventually(lambda: writer.is_connected, 3, "back")
    changed = await bucket.put("b", b"2")
    await bucket.delete("a")
    await eventually(lambda: len(seen) >= 5, 5, "the changes")
    await bucket.put("end", b"")
    await eventually(lambda: seen[-1] is not None and seen[-1].key == "end", 5, "the end")
    told = [(c.key, c.value) for c in seen[3:-1] if c]
    assert sorted(told) == [("a", None), ("b", b"2")]
    assert KvChange("b", b"2", changed) in seen
    following.cancel()


async def test_a_closed_connection_stays_closed_through_a_return(mortal_world: World) -> None:
    bus, events = await mortal_world.connect(), []
    bus.on_disconnect(lambda: events.append("lost"))
    bus.on_reconnect(lambda: events.append("back"))
    await bus.close()
    mortal_world.down()
    mortal_world.up()
    other = await mortal_world.connect()
    await other.barrier()
    assert events == []
    assert not bus.is_connected


async def test_close_while_the_bus_is_away_returns_soon(mortal_world: World) -> None:
    bus = await mortal_world.connect()
    await bus.subscribe(subject(), Heard())
    mortal_world.down()
    await eventually(lambda: not bus.is_connected, 3, "lost")
    async with asyncio.timeout(2):
        await bus.close()
