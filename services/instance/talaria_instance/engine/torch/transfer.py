"""Device-to-host copies of KV blocks, in a thread of their own. IO (thread, device memory).

A copy is announced only when its bytes are there, and its device block stays pinned until then.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from talaria_instance.engine.torch.host import HostBlock, HostPool

log = logging.getLogger(__name__)

HostTensor = HostBlock[torch.Tensor]
BATCH = 32
"""Copies announced together at most."""


@dataclass(frozen=True, slots=True)
class Save:
    """One copy to make. `block` is pinned on the device, `target` in the host pool."""

    block: int
    source: torch.Tensor
    """uint8 view of the device block."""
    target: HostTensor


class Saver:
    """The transfer thread."""

    def __init__(
        self, host: HostPool[torch.Tensor], on_saved: Callable[[Sequence[HostTensor]], None]
    ) -> None:
        self._host = host
        self._on_saved = on_saved
        self._jobs: queue.SimpleQueue[tuple[Sequence[Save], torch.cuda.Event | None] | None] = (
            queue.SimpleQueue()
        )
        self._done: deque[int] = deque()
        self._open = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="kv-transfer", daemon=True)
        self._thread.start()

    def submit(self, saves: Sequence[Save]) -> None:
        """Copy after what the calling thread has queued on the device so far."""
        if not saves:
            return
        event = None
        if saves[0].source.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        with self._changed:
            self._open += len(saves)
        self._jobs.put((tuple(saves), event))

    def finished(self) -> list[int]:
        """Device blocks whose copies have ended since the last call: to be unpinned."""
        blocks = []
        while self._done:
            blocks.append(self._done.popleft())
        return blocks

    def drain(self) -> None:
        """Wait until no copy is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0)

    def close(self) -> None:
        """Finish what is under way and end the thread; idempotent."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        stream: torch.cuda.Stream | None = None
        while (job := self._jobs.get()) is not None:
            saves, event = job
            if event is not None and stream is None:
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            for start in range(0, len(saves), BATCH):
                self._save(saves[start : start + BATCH], event, stream)

    def _save(
        self,
        saves: Sequence[Save],
        event: torch.cuda.Event | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        try:
            if event is None or stream is None:
                for save in saves:
                    # numpy: one plain memcpy; torch would start a second team of threads.
                    np.copyto(save.target.buffer.numpy(), save.source.numpy())
            else:
                with torch.cuda.stream(stream):
                    stream.wait_event(event)
                    for save in saves:
                        save.target.buffer.copy_(save.source, non_blocking=True)
                stream.synchronize()
            for save in saves:
                self._host.complete(save.target)
            self._on_saved([save.target for save in saves])
        except Exception:
            log.exception("%d KV blocks were not saved", len(saves))
        finally:
            self._host.unpin([save.target for save in saves])
            self._done.extend(save.block for save in saves)
            with self._changed:
                self._open -= len(saves)
                self._changed.notify_all()
