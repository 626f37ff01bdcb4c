"""The NATS front door: the same JSON bodies, answered on the caller's inbox. IO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from talaria_common import subjects, wire
from talaria_common.bus import Msg, Subscription
from talaria_common.errors import Rejected, TalariaError
from talaria_common.ids import is_ulid, new_ulid
from talaria_common.service import Context
from talaria_common.wire import CallKey, Endpoint
from talaria_gateway import identity
from talaria_gateway.calls import Calls
from talaria_gateway.intake import Intake
from talaria_gateway.nats_call import NatsCall, failure

QUEUE: Final = "gateway"
CALL_ID_HEADER: Final = "x-talaria-call-id"


class NatsDoor:
    """Takes calls from the public subjects."""

    def __init__(self, calls: Calls, intake: Intake, model_list: Callable[[], bytes]) -> None:
        self._calls = calls
        self._context: Context = calls.context
        self._intake = intake
        self._model_list = model_list
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Subscribe, in one queue group with all gateways."""
        for subject, handler in (
            (subjects.CHAT, self._on_chat),
            (subjects.COMPLETIONS, self._on_completions),
            (subjects.MODELS, self._on_models),
        ):
            subscription = await self._context.bus.subscribe(subject, handler, queue=QUEUE)
            self._subscriptions.append(subscription)

    async def drain(self) -> None:
        """Leave the queue group: other gateways take what comes."""
        while self._subscriptions:
            await self._subscriptions.pop().unsubscribe()

    async def _on_chat(self, message: Msg) -> None:
        await self._on_call("chat", message)

    async def _on_completions(self, message: Msg) -> None:
        await self._on_call("completions", message)

    async def _on_models(self, message: Msg) -> None:
        if message.reply:
            await self._context.bus.publish(message.reply, self._model_list())

    async def _on_call(self, endpoint: Endpoint, message: Msg) -> None:
        if not message.reply:
            self._calls.account.refused("none", "invalid_request")
            return  # nobody would hear the answer
        clock = self._context.clock
        headers = identity.normalised(message.headers.items())
        given = headers.get(CALL_ID_HEADER, "")
        call_id = given if is_ulid(given) else new_ulid()
        try:
            if given and call_id != given:
                raise Rejected("invalid_request", "X-Talaria-Call-ID must be a ULID")
            if self._calls.holds(call_id):
                raise Rejected("invalid_request", f"the call {call_id} is open already")
            ask = self._intake.ask(
                endpoint,
                headers,
                message.payload,
                request_id=identity.request_id(headers) or new_ulid(),
                arrived_s=clock.now_s(),
                arrived_unix_s=clock.unix_s(),
                call_id=call_id,
            )
            self._calls.open(NatsCall(self._calls, ask, message.reply))
        except TalariaError as error:
            self._calls.account.refused("none", error.code)
            ended = failure(CallKey(call_id), error)
            await self._context.bus.publish(message.reply, wire.encode_as(ended, "json"))
