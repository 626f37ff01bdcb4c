"""A model folder without a model: a tokenizer of single bytes, ChatML's special tokens, a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from talaria_common.wire import CallKey, Endpoint
from talaria_instance.engine.protocol import EngineRequest
from talaria_instance.engine.torch.text import ModelText, OutputText, Piece, Prompt

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = SPECIAL.index("<|im_end|>")
PADDED_VOCAB = 300
"""More than the tokenizer knows, as models have it."""
CONTEXT = 4096


def byte_model(folder: Path, chat_template: str = "hermes") -> ModelText:
    """The text side of a model whose every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": PADDED_VOCAB, "eos_token_id": END}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return ModelText(folder, chat_template)


def a_request(endpoint: Endpoint = "chat", **body: Any) -> EngineRequest:
    if endpoint == "chat":
        body = {"messages": [{"role": "user", "content": "Hi."}]} | body
    return EngineRequest(key=CallKey("c"), model="m", endpoint=endpoint, body=body)


def prompt(model: ModelText, **body: Any) -> Prompt:
    return model.prepare(a_request(**body), CONTEXT)


def tokens_of(text: str, model: ModelText) -> tuple[int, ...]:
    """Tokens of a text, one a byte."""
    return model.prepare(a_request("completions", prompt=text), CONTEXT).tokens


def text_of(tokens: tuple[int, ...], folder: Path) -> str:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.decode(list(tokens), skip_special_tokens=False)


def fed(output: OutputText, tokens: tuple[int, ...]) -> list[Piece]:
    """The pieces of an output, the last one being what `finish` gave."""
    return [*map(output.push, tokens), output.finish()]
