"""Between a caller's JSON and a model's tokens, both ways, for one model folder. IO (at load).

Loads tokenizers, jinja2 and llguidance, but neither torch nor transformers.
"""

from __future__ import annotations

import codecs
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from talaria_common.errors import Rejected, Unavailable
from talaria_common.wire import ToolDelta
from talaria_instance.engine.protocol import EngineRequest
from talaria_instance.engine.torch.constraint import Constraint, Grammar, Grammars, Mask
from talaria_instance.engine.torch.template import encodable, load_template, special_tokens
from talaria_instance.engine.torch.tool_parser import Parsed, ToolCallParser, held_length

COMPLETION_MAX_TOKENS: Final = 16
"""Default of /v1/completions, as OpenAI documents it; a chat may use what the context leaves."""

# Real text has three to five. Longer prompts are judged by their beginning: a megabyte takes a
# second to tokenise, as long as a gateway waits for an answer.
CHARS_PER_TOKEN_MAX: Final = 16


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when the output ends."""

    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    seed: int | None = None
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A call as tokens, and what its output must be and may hold."""

    tokens: tuple[int, ...]
    sampling: Sampling
    grammar: Grammar | None = None
    has_tools: bool = False
    """Tool calls in the output are taken out of the text."""
    has_one_call: bool = False
    """The output ends with its first tool call."""


class Piece(msgspec.Struct, frozen=True):
    """Output that is certain after one more token."""

    text: str = ""
    tool_calls: tuple[ToolDelta, ...] = ()
    is_stopped: bool = False
    """A stop string or the end of the grammar was reached; all output has been given."""


class ModelText:
    """Template, tokenizer and grammars of one model folder; thread-safe.

    Raises Unavailable `model_failed` if the folder cannot be read, ConfigError for a
    `chat_template` that is neither a file nor shipped.
    """

    def __init__(self, folder: Path, chat_template: str = "") -> None:
        config = _read_json(folder / "config.json")
        config = {**config, **config.get("text_config", {})}
        generation = _read_json(folder / "generation_config.json", is_needed=False)
        tokens = _read_json(folder / "tokenizer_config.json", is_needed=False)
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            self.vocab_size = int(config["vocab_size"])
            self.eos_ids = _eos_ids(config, generation, tokens, self._tokenizer)
            self._vocabulary = _Vocabulary(self._tokenizer, self.vocab_size, self.eos_ids)
        except Exception as error:  # the tokenizers and llguidance raise bare Exceptions
            raise Unavailable(
                "model_failed", f"{folder}: cannot load tokenizer: {error}"
            ) from error
        self._template = load_template(folder, chat_template, tokens)
        self._grammars = Grammars(self._vocabulary.guidance)

    def prepare(self, request: EngineRequest, max_model_len: int) -> Prompt:
        """Render, tokenise, compile the grammar, check exact limits.

        Raises Rejected: `context_length_exceeded`, `invalid_request` with the param.
        """
        body = request.body
        if request.endpoint == "completions":
            grammar = self._grammars.of_response_format(body.get("response_format"))
            tokens = self._completion_tokens(body.get("prompt"), max_model_len)
            has_tools = False
        else:
            forced = self._grammars.of_tool_choice(body.get("tool_choice"), body.get("tools"))
            grammar = forced or self._grammars.of_response_format(body.get("response_format"))
            tokens = self._chat_tokens(body, grammar.prefix if grammar else "", max_model_len)
            may_call = bool(body.get("tools")) and body.get("tool_choice") != "none"
            has_tools = forced is not None or (may_call and grammar is None)
        param = "prompt" if request.endpoint == "completions" else "messages"
        if not tokens:
            raise Rejected("invalid_request", "the prompt has no tokens", param=param)
        if len(tokens) >= max_model_len:
            raise _too_long(max_model_len, str(len(tokens)), param)
        return Prompt(
            tokens=tokens,
            sampling=_sampling(request, max_model_len - len(tokens)),
            grammar=grammar,
            has_tools=has_tools,
            has_one_call=body.get("parallel_tool_calls") is False,
        )

    def output(self, prompt: Prompt) -> OutputText:
        """A fresh state for the output of `prompt`."""
        return OutputText(prompt, self._vocabulary, self.vocab_size)

    def _chat_tokens(
        self, body: Mapping[str, Any], prefix: str, max_model_len: int
    ) -> tuple[int, ...]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Rejected("invalid_request", "messages must be a list", param="messages")
        if self._template is None:
            raise Rejected(
                "invalid_request",
                "this model has no chat template: name one in its entry, or use /v1/completions",
                param="messages",
            )
        options = body.get("chat_template_kwargs")
        text = self._template.render(messages, body.get("tools"), options=options)
        # The template has put in every special token that belongs there.
        return self._tokens(text + prefix, max_model_len, "messages", adds_special=False)

    def _tokens(
        self, text: str, max_model_len: int, param: str, *, adds_special: bool
    ) -> tuple[int, ...]:
        """Tokens of a text; one that is hopelessly long is not read to its end."""
        enough = CHARS_PER_TOKEN_MAX * max_model_len
        for part in (text[:enough], text) if len(text) > enough else (text,):
            # The batch call is the one that leaves out offsets, which take most of the time.
            (encoding,) = self._tokenizer.encode_batch_fast([part], add_special_tokens=adds_special)
            if len(part) < len(text) and len(encoding.ids) > max_model_len:
                raise _too_long(max_model_len, f"more than {len(encoding.ids) - 1}", param)
        return tuple(encoding.ids)

    def _completion_tokens(self, prompt: Any, max_model_len: int) -> tuple[int, ...]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        match prompt:
            case str():
                text = encodable(prompt)
                return self._tokens(text, max_model_len, "prompt", adds_special=True)
            case list() if all(_is_id(i, self.vocab_size) for i in prompt):
                return tuple(prompt)
        raise Rejected(
            "invalid_request",
            f"prompt must be one text, or one list of token ids below {self.vocab_size}",
            param="prompt",
        )


class OutputText:
    """One sequence's output, token by token; used by one thread at a time."""

    def __init__(self, prompt: Prompt, vocabulary: _Vocabulary, vocab_size: int) -> None:
        grammar = prompt.grammar
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._constraint = Constraint(grammar, vocab_size) if grammar else None
        self._stop = prompt.sampling.stop
        self._min_tokens = prompt.sampling.min_tokens
        self._has_one_call = prompt.has_one_call
        self._parser = ToolCallParser(_call_id) if prompt.has_tools else None
        if self._parser and grammar:
            self._parser.push(grammar.prefix)
        self._tokens = 0
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._is_over = False

    @property
    def has_tool_calls(self) -> bool:
        """The output holds a tool call, perhaps unfinished."""
        return self._parser is not None and self._parser.calls_begun > 0

    def push(self, token: int) -> Piece:
        """Take a token; end tokens add no text. Raises Unavailable if the grammar gives up."""
        if self._is_over:
            return Piece(is_stopped=True)
        self._tokens += 1
        is_complete = self._constraint is not None and self._constraint.accept(token)
        text = self._decoder.decode(self._vocabulary.bytes_of(token), final=is_complete)
        text, is_cut = self._until_stop(text)
        if is_complete or is_cut:
            return self._end(text, is_stopped=True)
        parsed = self._parse(text)
        if self._has_one_call and self._parser and self._parser.calls_whole:
            self._is_over = True
            return Piece(parsed.text, parsed.tool_calls, is_stopped=True)
        return Piece(parsed.text, parsed.tool_calls)

    def finish(self) -> Piece:
        """What was held back; the output is over. Empty after a piece that said `is_stopped`."""
        if self._is_over:
            return Piece()
        return self._end(self._decoder.decode(b"", final=True), is_stopped=False)

    def allowed_mask(self) -> Mask | None:
        """Tokens that may come next, uint32 [ceil(vocab / 32)], lowest bit first; None: all."""
        return self._constraint.mask() if self._constraint else None

    def _end(self, text: str, *, is_stopped: bool) -> Piece:
        self._is_over = True
        parsed = self._parse(self._held + text)
        self._held = ""
        if self._parser:
            parsed = _joined(parsed, self._parser.finish())
        return Piece(parsed.text, parsed.tool_calls, is_stopped)

    def _parse(self, text: str) -> Parsed:
        return self._parser.push(text) if self._parser else Parsed(text)

    def _until_stop(self, text: str) -> tuple[str, bool]:
        """Text that cannot belong to a stop string any more; True: one was found, and cut."""
        if not self._stop or self._tokens <= self._min_tokens:
            return text, False
        text = self._held + text
        cut = find_stop(text, self._stop)
        if cut is not None:
            self._held = ""
            return text[:cut], True
        certain = len(text) - max(held_length(text, stop) for stop in self._stop)
        self._held = text[certain:]
        return text[:certain], False


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first, however the text came."""
    found = [(at + len(stop), at) for stop in stops for at in [text.find(stop)] if at >= 0]
    return min(found)[1] if found else None


class _Vocabulary:
    """Bytes of each token, and llguidance's view of the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._silent = {token for token, facts in added.items() if facts.special}
        self._known: dict[int, bytes] = {}
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        self.guidance = LLTokenizer(
            tokenizer.to_str(),
            n_vocab=max(vocab_size, max(ids) + 1),
            eos_token=sorted(eos_ids),
        )

    def bytes_of(self, token: int) -> bytes:
        """UTF-8 of a token, perhaps a part of a character; nothing for special and padding ids."""
        known = self._known.get(token)
        if known is None:
            is_text = token not in self._silent and self._tokenizer.id_to_token(token) is not None
            known = self.guidance.decode_bytes([token]) if is_text else b""
            self._known[token] = known
        return known


def _too_long(max_model_len: int, count: str, param: str) -> Rejected:
    return Rejected(
        "context_length_exceeded",
        f"This model's maximum context length is {max_model_len} tokens, "
        f"but your prompt has {count} tokens",
        param=param,
    )


def _sampling(request: EngineRequest, room: int) -> Sampling:
    body = request.body
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is None:
        limit = COMPLETION_MAX_TOKENS if request.endpoint == "completions" else room
    stop = body.get("stop") or ()
    limit = min(limit, room)
    return Sampling(
        temperature=_or(body.get("temperature"), 1.0),
        top_p=_or(body.get("top_p"), 1.0),
        top_k=max(0, int(_or(body.get("top_k"), 0))),
        seed=body.get("seed"),
        max_tokens=limit,
        min_tokens=min(body.get("min_tokens") or 0, limit),
        ignore_eos=bool(body.get("ignore_eos")),
        stop=tuple(s for s in ([stop] if isinstance(stop, str) else stop) if s),
    )


def _or(value: Any, default: float) -> float:
    return default if value is None else float(value)


def _joined(first: Parsed, second: Parsed) -> Parsed:
    """Two pieces as one, with no call twice in it."""
    deltas = {delta.index: delta for delta in first.tool_calls}
    for delta in second.tool_calls:
        before = deltas.get(delta.index)
        if before is not None:
            joined = before.arguments + delta.arguments
            delta = msgspec.structs.replace(before, arguments=joined)
        deltas[delta.index] = delta
    return Parsed(first.text + second.text, tuple(deltas.values()))


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _is_id(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _eos_ids(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    tokens: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> frozenset[int]:
    """Every id that any of a model's files calls its end."""
    found: set[int] = set()
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        found |= {value} if isinstance(value, int) else set(value or ())
    named = special_tokens(tokens).get("eos_token")
    token = tokenizer.token_to_id(named) if named else None
    return frozenset(found if token is None else found | {token})


def _read_json(path: Path, *, is_needed: bool = True) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if not is_needed:
            return {}
        raise Unavailable("model_failed", f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise Unavailable("model_failed", f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise Unavailable("model_failed", f"{path} must hold a JSON object")
    return value
