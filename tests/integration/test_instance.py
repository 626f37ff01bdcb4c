"""The instance service on a bus in memory with the fake engine: calls, refusals, cancels."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from talaria_common import chain, subjects
from talaria_common.testing import eventually
from talaria_common.wire import (
    RUN_REPLY,
    STREAM,
    Accepted,
    CallKey,
    CancelAttempt,
    Delta,
    Ended,
    EndReason,
    FirstToken,
    Refused,
    SnapshotRequest,
    Withdraw,
    Working,
    encode,
)

from .instance_peers import INSTANCE, world

LONG = {"max_tokens": 2000, "ignore_eos": True}


# --- a call's life ------------------------------------------------------------------------------


async def test_an_accepted_call_streams_and_ends_once(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        accepted = await it.peer.run("c1", body={"max_tokens": 20, "ignore_eos": True})
        assert isinstance(accepted, Accepted)
        assert accepted.prompt_tokens > 0
        ended = await it.peer.end_of("c1")
        assert (ended.reason, ended.finish_reason) == (EndReason.FINISHED, "length")
        assert ended.usage.completion_tokens == 20
        assert ended.usage.prompt_tokens == accepted.prompt_tokens
        heard = it.peer.heard[CallKey("c1")]
        assert heard.tokens == 20
        assert heard.text
        assert [m.seq for m in heard.messages] == list(range(1, ended.seq + 1))
        assert len(it.peer.ended) == 1


async def test_call_ended_goes_out_before_ended(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.peer.watch()
        run = await it.peer.a_run("c1", body={"max_tokens": 3})
        await it.peer.send(run)
        await it.peer.end_of("c1")
        call_ended = subjects.call_ended("c1")
        await eventually(lambda: call_ended in it.peer.subjects, why="CallEnded")
        last_to_inbox = max(n for n, s in enumerate(it.peer.subjects) if s == run.inbox)
        assert it.peer.subjects.index(call_ended) < last_to_inbox


async def test_parts_add_up_to_the_calls_wall_time(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        await it.peer.run("c1", body={"max_tokens": 50, "ignore_eos": True})
        ended = await it.peer.end_of("c1")
        wall_s = loop.time() - before_s
        parts = ended.parts
        total_s = parts.queue_s + parts.switch_s + parts.restore_s + parts.prefill_s
        total_s += parts.decode_s
        assert total_s <= wall_s
        assert total_s == pytest.approx(wall_s, abs=0.1)
        assert parts.switch_s > 0.005  # 100 MB at 10 GB/s
        assert parts.decode_s > 0.05
        assert ended.ttft_s is not None
        assert ended.ttft_s < total_s


async def test_the_reply_digest_extends_the_callers_chain(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        run = await it.peer.a_run("c1", body={"max_tokens": 5, "ignore_eos": True})
        await it.peer.send(run)
        await it.peer.end_of("c1")
        message = {"role": "assistant", "content": it.peer.heard[CallKey("c1")].text}
        assert run.tail is not None
        assert it.peer.ended[0].reply == chain.extend(run.tail.digest, message)


async def test_a_reply_with_a_tool_call_is_chained_as_the_caller_will_send_it(
    tmp_path: Path,
) -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": "look",
                "parameters": {
                    "type": "object",
                    "properties": {"where": {"enum": ["up", "down"]}},
                    "required": ["where"],
                },
            },
        }
    ]
    async with world(tmp_path) as it:
        body = {"tools": tools, "tool_choice": "required"}
        run = await it.peer.a_run("c1", body=body, tools=tools)
        await it.peer.send(run)
        ended = await it.peer.end_of("c1")
        assert ended.finish_reason == "tool_calls"
        deltas = [m for m in it.peer.heard[CallKey("c1")].messages if isinstance(m, Delta)]
        pieces = [d for m in deltas for d in m.tool_calls]
        name = "".join(d.name or "" for d in pieces)
        arguments = "".join(d.arguments for d in pieces)
        call = {"function": {"name": name, "arguments": arguments}}
        text = it.peer.heard[CallKey("c1")].text
        message = {"role": "assistant", "content": text or None, "tool_calls": [call]}
        assert run.tail is not None
        assert it.peer.ended[0].reply == chain.extend(run.tail.digest, message)


async def test_json_inboxes_get_json(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        run = await it.peer.a_run("c1", body={"max_tokens": 2}, encoding="json")
        got: list[bytes] = []
        inbox = it.peer.bus.new_inbox()

        async def keep(message: object) -> None:
            got.append(message.payload)  # type: ignore[attr-defined]

        await it.peer.bus.listen(inbox, keep)
        await it.peer.send(msgspec.structs.replace(run, inbox=inbox))
        await eventually(lambda: got and b'"ended"' in got[-1], why="the end")
        assert all(line.startswith(b"{") for line in got)


async def test_the_placing_gateway_hears_of_tokens_that_go_elsewhere(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        notify = subjects.gateway_notify("g")
        await it.peer.run("c1", body={"max_tokens": 5}, notify=notify)
        await eventually(lambda: len(it.peer.notices) == 2, why="two notices")
        first, last = it.peer.notices
        assert isinstance(first, FirstToken)
        assert isinstance(last, Ended)


async def test_a_silent_stream_shows_that_somebody_works(tmp_path: Path) -> None:
    async with world(tmp_path, fake={"prefill_fixed_s": 0.8}, working_every_s=0.2) as it:
        await it.peer.run("c1", body={"max_tokens": 2})
        await it.peer.end_of("c1")
        states = [m.state for m in it.peer.heard[CallKey("c1")].messages if isinstance(m, Working)]
        assert "running" in states
        seqs = [m.seq for m in it.peer.heard[CallKey("c1")].messages]
        assert seqs == list(range(1, len(seqs) + 1))


async def test_tokens_are_coalesced(tmp_path: Path) -> None:
    async with world(tmp_path, fake={"decode_step_s": 0.001}, coalesce_s=0.05) as it:
        await it.peer.run("c1", body={"max_tokens": 200, "ignore_eos": True})
        await it.peer.end_of("c1")
        heard = it.peer.heard[CallKey("c1")]
        assert heard.tokens == 200
        assert len(heard.messages) < 60


async def test_a_body_in_parts_is_put_together(tmp_path: Path) -> None:
    async with world(tmp_path, fake={"max_model_len": 400_000, "blocks_total": 200_000}) as it:
        messages = [{"role": "user", "content": "x" * 1_200_000}]
        run = await it.peer.a_run("c1", messages=messages, body={"max_tokens": 2})
        accepted = await it.peer.send_in_parts(run)
        assert isinstance(accepted, Accepted)
        assert accepted.prompt_tokens >= 300_000


async def test_missing_parts_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    async with world(tmp_path, body_wait_s=0.2) as it:
        run = await it.peer.a_run("c1")
        refused = await it.peer.send(msgspec.structs.replace(run, body=b"", parts=3, digest=b"x"))
        assert isinstance(refused, Refused)
        assert refused.reason == "not_ready"


# --- repeats ------------------------------------------------------------------------------------


async def test_a_repeated_run_gets_its_earlier_answer_and_is_not_run_again(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        run = await it.peer.a_run("c1", body={"max_tokens": 5, "ignore_eos": True})
        answers = await asyncio.gather(*(it.peer.send(run) for _ in range(3)))
        await it.peer.end_of("c1")
        answers.append(await it.peer.send(run))
        assert {type(a) for a in answers} == {Accepted}
        assert len(it.peer.ended) == 1
        assert it.peer.heard[CallKey("c1")].tokens == 5
        assert it.metric("talaria_instance_calls_total", model="m-a", outcome="finished") == 1


async def test_a_new_attempt_ends_the_one_before(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.peer.run("c1", body=LONG)
        await it.peer.tokens_of("c1")
        assert isinstance(await it.peer.run("c1", attempt=2, body={"max_tokens": 3}), Accepted)
        assert (await it.peer.end_of("c1", 1)).reason is EndReason.SUPERSEDED
        assert (await it.peer.end_of("c1", 2)).reason is EndReason.FINISHED


async def test_an_attempt_below_the_highest_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.peer.run("c1", attempt=2, body={"max_tokens": 3})
        refused = await it.peer.run("c1", attempt=1)
        assert isinstance(refused, Refused)
        assert refused.reason == "cancelled"


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("not_ready", {"boot_id": "another boot"}),
        ("unknown_model", {"model": "m-z"}),
        ("stale_epoch", {"epoch": 3}),
    ],
)
async def test_a_run_is_refused_with_its_reason(
    tmp_path: Path, reason: str, fields: dict[str, object]
) -> None:
    async with world(tmp_path) as it:
        request = encode(SnapshotRequest(epoch=5))
        await it.peer.bus.request(subjects.snapshot_request(INSTANCE), request, timeout_s=5.0)
        refused = await it.peer.run("c1", **({"epoch": 5} | fields))
        assert isinstance(refused, Refused)
        assert refused.reason == reason
        assert it.metric("talaria_instance_refused_total", reason=reason) == 1


@pytest.mark.parametrize(
    ("code", "body"),
    [
        ("invalid_request", b"no json"),
        ("invalid_request", b"[1, 2]"),
        ("unsupported_parameter", {"n": 3}),
        ("context_length_exceeded", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
    ],
)
async def test_the_callers_mistakes_are_told_with_their_code(
    tmp_path: Path, code: str, body: bytes | dict[str, object]
) -> None:
    async with world(tmp_path) as it:
        refused = await it.peer.run("c1", body=body)
        assert isinstance(refused, Refused)
        assert refused.reason == "invalid"
        assert refused.error is not None
        assert refused.error.code == code
        assert it.peer.heard[CallKey("c1")].messages == []


async def test_a_call_that_no_pool_can_hold_is_refused(tmp_path: Path) -> None:
    fake = {"blocks_total": 100, "max_model_len": 2048}
    async with world(tmp_path, fake=fake) as it:
        refused = await it.peer.run("c1", messages=[{"role": "user", "content": "y" * 8000}])
        assert isinstance(refused, Refused)
        assert refused.reason == "invalid"


async def test_above_its_bounds_an_instance_is_full(tmp_path: Path) -> None:
    async with world(tmp_path, batch_max=1, queued_calls_max=2) as it:
        await it.peer.run("c0", body=LONG)
        await it.peer.tokens_of("c0")
        for n in (1, 2):
            assert isinstance(await it.peer.run(f"c{n}", body=LONG), Accepted)
        refused = await it.peer.run("c3", body=LONG)
        assert isinstance(refused, Refused)
        assert refused.reason == "full"


async def test_bodies_that_wait_are_bounded_in_bytes(tmp_path: Path) -> None:
    async with world(tmp_path, batch_max=1, queued_bytes_max=10_000) as it:
        await it.peer.run("c0", body=LONG)
        await it.peer.tokens_of("c0")
        big = [{"role": "user", "content": "z" * 6000}]
        assert isinstance(await it.peer.run("c1", messages=big, body={"max_tokens": 1}), Accepted)
        refused = await it.peer.run("c2", messages=big, body={"max_tokens": 1})
        assert isinstance(refused, Refused)
        assert refused.reason == "full"


# --- cancels ------------------------------------------------------------------------------------


async def test_a_running_call_is_cancelled(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        await it.peer.run("c1", body=LONG)
        await it.peer.tokens_of("c1")
        answer = await it.peer.ask(CancelAttempt(key=CallKey("c1")))
        assert answer.outcome == "stopped"
        assert (await it.peer.end_of("c1", within_s=1.0)).reason is EndReason.CANCELLED
        await eventually(lambda: it.metric("talaria_instance_calls_running", model="m-a") == 0)
        assert it.metric("talaria_instance_calls_total", model="m-a", outcome="cancelled") == 1
        assert (await it.peer.ask(CancelAttempt(key=CallKey("c1")))).outcome == "stopped"


async def test_a_queued_call_is_cancelled(tmp_path: Path) -> None:
    async with world(tmp_path, batch_max=1) as it:
        await it.peer.run("c1", body=LONG)
        await it.peer.tokens_of("c1")
        await it.peer.run("c2", body=LONG)
        await it.peer.ask(CancelAttempt(key=CallKey("c2")))
        ended = await it.peer.end_of("c2", within_s=1.0)
        assert (ended.reason, ended.usage.completion_tokens) == (EndReason.CANCELLED, 0)
        assert it.metric("talaria_instance_calls_waiting", model="m-a") == 0
        assert it.metric("talaria_instance_calls_running", model="m-a") == 1


async def test_a_cancelled_key_that_arrives_later_is_never_run(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        answer = await it.peer.ask(CancelAttempt(key=CallKey("c1")))
        assert answer.outcome == "unknown"
        refused = await it.peer.run("c1")
        assert isinstance(refused, Refused)
        assert refused.reason == "cancelled"


async def test_withdraw_stops_a_call_without_tokens_only(tmp_path: Path) -> None:
    async with world(tmp_path, batch_max=1) as it:
        await it.peer.run("c1", body=LONG)
        await it.peer.tokens_of("c1")
        await it.peer.run("c2", body=LONG)
        assert (await it.peer.ask(Withdraw(key=CallKey("c1")))).outcome == "tokens"
        assert (await it.peer.ask(Withdraw(key=CallKey("c2")))).outcome == "stopped"
        assert (await it.peer.ask(Withdraw(key=CallKey("c3")))).outcome == "unknown"
        assert (await it.peer.ask(Withdraw(key=CallKey("c3")))).outcome == "unknown"
        refused = await it.peer.run("c3")
        assert isinstance(refused, Refused)
        assert it.peer.heard[CallKey("c1")].ends == []


async def test_a_reader_that_left_is_a_cancel(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        run = await it.peer.a_run("c1", body=LONG)
        nobody = msgspec.structs.replace(run, inbox="nobody.listens.here")
        assert isinstance(await it.peer.send(nobody), Accepted)
        await eventually(lambda: it.peer.ended, within_s=2.0, why="the call ends")
        assert it.peer.ended[0].reason is EndReason.CANCELLED


async def test_a_queued_call_past_its_deadline_ends(tmp_path: Path) -> None:
    async with world(tmp_path, batch_max=1) as it:
        await it.peer.run("c1", body=LONG)
        await it.peer.tokens_of("c1")
        await it.peer.run("c2", body=LONG, deadline_s=0.2)
        ended = await it.peer.end_of("c2", within_s=2.0)
        assert ended.error is not None
        assert ended.error.code == "deadline_exceeded"


async def test_a_call_that_the_engine_gives_up_fails_alone(tmp_path: Path) -> None:
    async with world(tmp_path, fake={"fail_on_text": "bad luck"}) as it:
        await it.peer.run("c1", messages=[{"role": "user", "content": "bad luck"}], body=LONG)
        await it.peer.run("c2", body={"max_tokens": 30, "ignore_eos": True})
        failed = await it.peer.end_of("c1")
        assert failed.reason is EndReason.FAILED
        assert failed.error is not None
        assert failed.error.code == "model_failed"
        assert (await it.peer.end_of("c2")).reason is EndReason.FINISHED


# --- garbage ------------------------------------------------------------------------------------


async def test_what_cannot_be_read_is_counted_and_dropped(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        for subject in (subjects.run, subjects.attempt, subjects.instance_kv):
            await it.peer.bus.publish(subject(INSTANCE), b"\xc1 garbage")
        await eventually(lambda: it.metric("talaria_instance_messages_dropped_total") == 3)
        assert isinstance(await it.peer.run("c1", body={"max_tokens": 1}), Accepted)


async def test_answers_and_streams_are_messages_of_the_wire(tmp_path: Path) -> None:
    async with world(tmp_path) as it:
        run = await it.peer.a_run("c1", body={"max_tokens": 2})
        answer = await it.peer.bus.request(subjects.run(INSTANCE), encode(run), timeout_s=5.0)
        assert isinstance(RUN_REPLY.decode(answer.payload), Accepted)
        await it.peer.end_of("c1")
        for message in it.peer.heard[CallKey("c1")].messages:
            assert STREAM.decode(encode(message)) == message
