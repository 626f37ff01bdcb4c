"""What the engine asks of the text side of a model; `text.ModelText` is the real one. Pure: types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from talaria_instance.engine.protocol import EngineRequest
from talaria_instance.engine.torch.text import Piece, Prompt


class Output(Protocol):
    """State of one sequence's output; used from the engine thread alone."""

    @property
    def has_tool_calls(self) -> bool:
        """The output holds a tool call."""

    def push(self, token: int) -> Piece:
        """Take a token."""

    def finish(self) -> Piece:
        """What was held back."""

    def allowed_mask(self) -> npt.NDArray[np.uint32] | None:
        """Bit mask of the tokens that may come next; None: all."""


class TextModel(Protocol):
    """Template and tokenizer of one model; thread-safe."""

    eos_ids: frozenset[int]
    vocab_size: int

    def prepare(self, request: EngineRequest, max_model_len: int) -> Prompt:
        """Render, tokenise, check exact limits; raises Rejected."""

    def output(self, prompt: Prompt) -> Output:
        """A fresh output state."""


TextLoader = Callable[[Path, str], TextModel]
"""(model folder, chat template) -> its text side."""
