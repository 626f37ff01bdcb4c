"""Chat templates: a caller's messages as the text that a model was trained on. IO (at load).

Templates run in the sandbox, and with the names and options, that transformers gives them; a test
compares the two. Messages are brought into one form before: content a string, no null or empty
fields, tool calls whose `arguments` are the parsed object, as the templates of models expect, with
the caller's text beside it in `arguments_text`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from talaria_common.chain import without_volatile_lines
from talaria_common.config import ConfigError
from talaria_common.errors import Rejected

SHIPPED: Final = Path(__file__).parent / "templates"

# Names that a template gets from us; a caller's chat_template_kwargs must leave them alone.
_OURS: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTemplate:
    """One compiled template with the model's special tokens; rendering is thread-safe."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special = dict(special)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        is_prompt: bool = True,
    ) -> str:
        """The conversation as text; with `is_prompt` up to where the assistant's reply begins.

        Raises Rejected `invalid_request` for messages that the template cannot render.
        """
        own = set(options or ()) & (_OURS | self._special.keys())
        if own:
            raise Rejected(
                "invalid_request",
                f"chat_template_kwargs must not set {sorted(own)[0]}",
                param="chat_template_kwargs",
            )
        plain = [_plain(message, self._knows_developer) for message in messages]
        try:
            text = self._template.render(
                messages=plain,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=is_prompt,
                **self._special,
                **(options or {}),
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise Rejected(
                "invalid_request",
                f"the model's chat template cannot render these messages: {error}",
                param="messages",
            ) from error
        return encodable(text)


def load_template(folder: Path, choice: str, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template that an entry names, or the model's own; None: the model has none.

    `choice` is a name that ships with the engine, a path, or empty; `config` is the model's
    tokenizer_config.json. Raises ConfigError for a choice that is neither.
    """
    source = _named(choice) if choice else _own(folder, config)
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens(config))
    except jinja2.TemplateError as error:
        raise ConfigError(f"chat template {choice or folder}: {error}") from error


def encodable(text: str) -> str:
    """`text` without lone surrogates, which no tokenizer takes."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Names and texts of the special tokens in a tokenizer_config.json."""
    found: dict[str, str] = {}
    for name in _SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _named(choice: str) -> str:
    shipped = {path.stem: path for path in SHIPPED.glob("*.jinja")}
    try:
        return shipped.get(choice, Path(choice)).read_text()
    except OSError as error:
        raise ConfigError(
            f"chat_template {choice!r} is neither a readable file nor one of {sorted(shipped)}"
        ) from error


def _own(folder: Path, config: Mapping[str, Any]) -> str | None:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text()
    value = config.get("chat_template")
    if isinstance(value, list):  # several by name
        value = next((t["template"] for t in value if t.get("name") == "default"), None)
    return value if isinstance(value, str) else None


# --- messages -------------------------------------------------------------------------------------


def _plain(message: Mapping[str, Any], keeps_developer: bool) -> dict[str, Any]:
    """One message in the form that all templates understand."""
    role = str(message.get("role", ""))
    content = _text_of(message.get("content"))
    if role in {"system", "developer"}:
        content = without_volatile_lines(content)
    if role == "developer" and not keeps_developer:
        role = "system"
    plain = {k: v for k, v in message.items() if v is not None} | {"role": role, "content": content}
    calls = [_plain_call(call) for call in message.get("tool_calls") or ()]
    if calls:
        plain["tool_calls"] = calls
    else:
        plain.pop("tool_calls", None)
    return plain


def _text_of(content: Any) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(_part_text(part) for part in content)
    raise Rejected("invalid_request", "content must be a text or a list of parts", param="messages")


def _part_text(part: Any) -> str:
    match part:
        case str():
            return part
        case {"text": str() as text}:
            return text
    raise Rejected("invalid_request", "this model reads text parts only", param="messages")


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Rejected("invalid_request", "a tool call names no function", param="messages")
    arguments, text = _arguments(function.get("arguments"))
    plain = {"name": function["name"], "arguments": arguments, "arguments_text": text}
    return {**call, "function": plain}


def _arguments(value: Any) -> tuple[Any, str]:
    """Arguments as a value and as JSON text.

    A caller's text stands as it is only if it is one JSON object: then a reader knows where it
    ends, and no two histories that differ in their calls give the same prompt. Any other text
    becomes a JSON string.
    """
    if value is None or value == "":
        return {}, "{}"
    if not isinstance(value, str):
        return value, _json(value)
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    return (parsed, value) if isinstance(parsed, dict) else (value, _json(value))


# --- what transformers gives a template -----------------------------------------------------------


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
