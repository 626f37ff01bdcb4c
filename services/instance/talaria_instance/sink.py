"""Brings the engine's output from whatever thread it comes to the event loop. IO (event loop)."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from talaria_common.wire import CallKey, ToolDelta
from talaria_instance.engine.protocol import FinishReason, KvBlock


class Restored(msgspec.Struct, frozen=True):
    """KV of a call's prompt came from the host."""

    key: CallKey
    seconds: float
    tokens: int


class PromptComputed(msgspec.Struct, frozen=True):
    """A call's prefill is done."""

    key: CallKey
    cached_tokens: int


class Text(msgspec.Struct, frozen=True):
    """More output of a call."""

    key: CallKey
    text: str
    tool_calls: tuple[ToolDelta, ...]
    tokens: int


class CallOver(msgspec.Struct, frozen=True):
    """The engine's last word on a call."""

    key: CallKey
    finish: FinishReason | None
    failed: str | None
    tokens: int


class BlocksSaved(msgspec.Struct, frozen=True):
    """Host copies are complete."""

    blocks: tuple[KvBlock, ...]


class BlocksDropped(msgspec.Struct, frozen=True):
    """Host copies are gone."""

    prefixes: tuple[bytes, ...]


Output: TypeAlias = Restored | PromptComputed | Text | CallOver | BlocksSaved | BlocksDropped


class LoopSink:
    """The engine's sink: one wake-up of the loop for all that gathers until it runs."""

    def __init__(self) -> None:
        self._gathered: deque[Output] = deque()
        self._lock = threading.Lock()
        self._is_scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handle: Callable[[Output], None] | None = None

    def attach(self, handle: Callable[[Output], None]) -> None:
        """Handle output on the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._handle = handle

    def drain(self) -> None:
        """Handle all that has gathered; on the loop's thread only."""
        with self._lock:
            self._is_scheduled = False
            gathered, self._gathered = self._gathered, deque()
        if self._handle is not None:
            for output in gathered:
                self._handle(output)

    def _put(self, output: Output) -> None:
        with self._lock:
            self._gathered.append(output)
            if self._is_scheduled or self._loop is None or self._loop.is_closed():
                return
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self.drain)

    # --- what the engine calls ------------------------------------------------------------------

    def restored(self, key: CallKey, seconds: float, tokens: int) -> None:
        self._put(Restored(key, seconds, tokens))

    def first_token(self, key: CallKey, cached_tokens: int) -> None:
        self._put(PromptComputed(key, cached_tokens))

    def text(self, key: CallKey, text: str, tool_calls: tuple[ToolDelta, ...], tokens: int) -> None:
        self._put(Text(key, text, tool_calls, tokens))

    def ended(
        self, key: CallKey, finish: FinishReason | None, failed: str | None, tokens: int
    ) -> None:
        self._put(CallOver(key, finish, failed, tokens))

    def kv_saved(self, blocks: Sequence[KvBlock]) -> None:
        self._put(BlocksSaved(tuple(blocks)))

    def kv_dropped(self, prefixes: Sequence[bytes]) -> None:
        self._put(BlocksDropped(tuple(prefixes)))
