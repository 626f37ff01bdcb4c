"""What is on the device: the active model, its blocks, and whose KV is where. IO (device, threads).

Used by the engine thread alone, but for the look-ups that say otherwise.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Sequence

import torch

from talaria_instance.engine.protocol import KvBlock, Locality, Sink, SwitchRecord
from talaria_instance.engine.torch.arena import Arena
from talaria_instance.engine.torch.blocks import BlockPool
from talaria_instance.engine.torch.config import TorchConfig
from talaria_instance.engine.torch.host import BlockName, HostPool
from talaria_instance.engine.torch.loaded import LoadedModel
from talaria_instance.engine.torch.model import Decoder
from talaria_instance.engine.torch.sequence import Prepared, RunningCall
from talaria_instance.engine.torch.transfer import HostTensor, Save, Saver

log = logging.getLogger(__name__)


class Residence:
    """The arena with one active model, the block pool above it, and the host copies below."""

    def __init__(
        self, config: TorchConfig, device: torch.device, arena_bytes: int, sink: Sink
    ) -> None:
        self.device = device
        self.arena = Arena(arena_bytes, device)
        self.active: LoadedModel | None = None
        self.pool = BlockPool(0)
        is_pinned = device.type == "cuda"
        self.host: HostPool[torch.Tensor] = HostPool(
            config.host_kv_bytes,
            lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned),
        )
        self._sink = sink
        self._keeps_finished = config.keep_finished_kv
        self._block_tokens = config.block_tokens
        self._decoders: dict[str, Decoder] = {}
        self._kv: dict[str, torch.Tensor] = {}
        self._saver = Saver(self.host, self._announce)

    # --- switching ---

    @property
    def decoder(self) -> Decoder:
        """The active model's forward pass."""
        assert self.active is not None
        return self._decoders[self.active.entry.id]

    def activate(self, model: LoadedModel) -> SwitchRecord:
        """Save what the active model's calls still need, and put `model` in its place."""
        marks = [time.monotonic()]
        if self.active is not None:
            for call in self.active.calls:
                if call.is_placed:
                    self.pause(call)
        self._saver.drain()
        self.active = None
        self.pool = BlockPool(0)
        self._saver.finished()
        marks.append(time.monotonic())
        region = self.arena.weights(model.layout.nbytes)
        region.copy_(model.image, non_blocking=True)
        self._synchronise()
        marks.append(time.monotonic())
        self._lay_kv(model, region)
        self.pool = BlockPool(model.blocks)
        marks.append(time.monotonic())
        self.active = model
        marks.append(time.monotonic())
        save_s, weights_s, shell_s, publish_s = (
            after - before for before, after in itertools.pairwise(marks)
        )
        model.timing.switch_s = marks[-1] - marks[0]
        return SwitchRecord(
            model=model.entry.id,
            seconds=marks[-1] - marks[0],
            save_s=save_s,
            weights_s=weights_s,
            shell_s=shell_s,
            publish_s=publish_s,
            path="h2d",
            moved_bytes=model.layout.nbytes,
        )

    def reset(self) -> None:
        """Forget all blocks of the active model, whatever state they are in."""
        self._saver.drain()
        self._saver.finished()
        self.pool = BlockPool(self.active.blocks if self.active else 0)

    def kv_block(self, block: int) -> torch.Tensor:
        """A block of the active model, uint8 view."""
        assert self.active is not None
        return self._kv[self.active.entry.id][block].view(-1).view(torch.uint8)

    def close(self) -> None:
        """End the transfer thread; idempotent."""
        self._saver.close()

    # --- a call's blocks ---

    def locality(self, model: LoadedModel, prepared: Prepared) -> Locality:
        """Reusable tokens of a prompt, device first; from any thread."""
        size = self._block_tokens
        chain = prepared.digests[: (len(prepared.prompt.tokens) - 1) // size]
        pool = self.pool
        on_device = pool.cached_blocks(chain) if self.active is model else 0
        on_host = self.host.held_blocks(chain[on_device:])
        return Locality(device_tokens=on_device * size, host_tokens=on_host * size)

    def place(self, call: RunningCall) -> bool:
        """Give a waiting call blocks, with all of its KV that is on the device or the host.

        False, and nothing changed, if there are too few blocks now. Announces a restore.
        """
        if any(not block.is_complete for block in call.saved.values()):
            self._saver.drain()
        size = self._block_tokens
        chain = call.digests[: (len(call.tokens) - 1) // size]
        shared = self.pool.share(chain)
        own = self._allocate(math.ceil(len(call.tokens) / size) - len(shared))
        if own is None:
            self.pool.release(shared)
            return False
        call.blocks = shared + own
        started_s = time.monotonic()
        copies = self._copies(call, chain, len(shared))
        for n, copy in enumerate(copies, len(shared)):
            self.kv_block(call.blocks[n]).copy_(copy.buffer, non_blocking=True)
            if n < len(chain):
                call.blocks[n] = self.pool.publish(call.blocks[n], chain[n])
        if len(copies) < len(own):
            self._clear(own[-1])
        self._synchronise()
        call.computed = len(shared) * size + sum(copy.name.tokens for copy in copies)
        call.published = call.computed // size
        self._forget_partial(call)
        if call.cached_tokens is None:
            call.cached_tokens = call.computed
        restored = call.computed - len(shared) * size
        if restored:
            call.restored_tokens, call.restored_s = restored, time.monotonic() - started_s
            call.stream.restored(call.restored_s, restored)
        return True

    def grow(self, call: RunningCall) -> bool:
        """Make sure that the next token's KV has a block."""
        if call.computed < len(call.blocks) * self._block_tokens:
            return True
        own = self._allocate(1)
        if own is None:
            return False
        self._clear(own[0])
        call.blocks += own
        return True

    def settle(self, call: RunningCall) -> None:
        """Offer blocks that have become full for reuse, and send them to the host."""
        full = call.computed // self._block_tokens
        if full == call.published:
            return
        call.extend_digests(self._block_tokens)
        fresh = range(call.published, full)
        for n in fresh:
            call.blocks[n] = self.pool.publish(call.blocks[n], call.digests[n])
        self._save(call, fresh)
        call.published = full

    def pause(self, call: RunningCall) -> None:
        """Send all of a call's KV to the host, the partial last block too, and free its blocks."""
        self._save(call, range(math.ceil(call.computed / self._block_tokens)))
        self._release(call)

    def preempt(self, call: RunningCall) -> None:
        """Take a call's blocks away; what is on the host is restored later, the rest recomputed."""
        self._release(call)

    def end(self, call: RunningCall) -> None:
        """A call is over: keep its full blocks for those that come after it."""
        if call.is_placed and self._keeps_finished:
            self._save(call, range(call.published))
        if call.is_placed:
            self._release(call)
        self.host.unpin([block for _, block in sorted(call.saved.items())])
        call.saved.clear()

    def collect(self) -> None:
        """Take note of copies that have ended."""
        self.pool.unpin(self._saver.finished())

    # --- inside ---

    def _lay_kv(self, model: LoadedModel, region: torch.Tensor) -> None:
        """Bind parameters and KV as views: made once, since their addresses never change."""
        name = model.entry.id
        if name not in self._decoders:
            kv = self.arena.kv(model.layout.nbytes, model.block_shape, model.dtype)
            self._kv[name] = kv
            views = model.layout.views(region, model.dtype)
            self._decoders[name] = Decoder(model.spec, views, kv)

    def _allocate(self, count: int) -> list[int] | None:
        self.collect()
        own = self.pool.allocate(count)
        if own is None and self.pool.is_pinned:
            self._saver.drain()
            self.collect()
            own = self.pool.allocate(count)
        return own

    def _clear(self, block: int) -> None:
        """Wipe a block that decode steps will see half full: a mask does not hide an old NaN."""
        self.kv_block(block).zero_()

    def _release(self, call: RunningCall) -> None:
        self.pool.release(call.blocks)
        call.blocks = []
        call.computed = call.published = 0

    def _copies(self, call: RunningCall, chain: Sequence[bytes], start: int) -> list[HostTensor]:
        """Host copies that continue the chain from block `start`, the call's own first; pinned."""
        copies: list[HostTensor] = []
        for n in range(start, len(chain) + 1):
            block = call.saved.get(n)
            if block is None and n < len(chain):
                block = self.host.pin(chain[n])
                if block is not None:
                    call.saved[n] = block
            if block is None or not block.is_complete:
                break
            copies.append(block)
            if block.name.tokens < self._block_tokens:
                break
        return copies

    def _forget_partial(self, call: RunningCall) -> None:
        """The copy of a partial block is of no use once its call goes on."""
        for n, block in list(call.saved.items()):
            if block.name.tokens < self._block_tokens:
                del call.saved[n]
                self.host.unpin([block])

    def _save(self, call: RunningCall, blocks: range) -> None:
        """Send blocks to the host that are not there; what finds no room is recomputed later."""
        assert self.active is not None
        size, saves = self._block_tokens, list[Save]()
        for n in blocks:
            if n in call.saved:
                continue
            tokens = min(size, call.computed - n * size)
            is_full = tokens == size
            name = BlockName(
                model=self.active.entry.id,
                prefix=call.digests[n] if is_full else b"",
                parent=call.parent_of(n),
                index=n,
                tokens=tokens,
                session=call.prepared.session,
                is_shared=is_full and self._keeps_finished,
            )
            claim = self.host.claim(name, self.active.block_bytes)
            if claim.dropped:
                self._sink.kv_dropped(claim.dropped)
            if claim.block is None:
                continue
            call.saved[n] = claim.block
            if claim.is_new:
                self.host.pin_again(claim.block)
                self.pool.pin(call.blocks[n])
                saves.append(Save(call.blocks[n], self.kv_block(call.blocks[n]), claim.block))
        self._saver.submit(saves)

    def _announce(self, copies: Sequence[HostTensor]) -> None:
        """Copies are complete; called by the transfer thread."""
        shared = [copy for copy in copies if copy.name.is_shared]
        if shared:
            self._sink.kv_saved([self._kv_block(copy) for copy in shared])

    def _kv_block(self, copy: HostTensor) -> KvBlock:
        name = copy.name
        return KvBlock(
            prefix=name.prefix,
            parent=name.parent,
            model=name.model,
            tokens=(name.index + 1) * self._block_tokens,
            nbytes=copy.nbytes,
            session=name.session,
        )

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
