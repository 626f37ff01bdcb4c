"""`talaria chat`: a conversation in the terminal. IO."""

from __future__ import annotations

import argparse
import io
import sys
import uuid
from collections.abc import Iterator
from typing import Any, Final

import httpx
import msgspec

from talaria_cli import endpoint
from talaria_cli.failure import CommandFailed, UsageError
from talaria_cli.output import say
from talaria_sim.workload import near

SILENCE_MAX_S: Final = 120.0


def add(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model of a running stack",
        description="One message per line; /quit or Ctrl-D ends, Ctrl-C cancels the answer. "
        "With piped input, each line is one message and only the answers are printed.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="default: the first one served")
    parser.add_argument("--url", default=endpoint.DEFAULT_URL, help="a running stack")
    parser.add_argument("--session", help="session id (default: a new one)")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 (default): the likeliest words",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Converse until the input ends."""
    session = args.session or f"chat-{uuid.uuid4().hex[:12]}"
    is_live = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no UTF-8 are no reason to end
    with endpoint.client(args.url, timeout_s=SILENCE_MAX_S) as http:
        served = [str(entry["id"]) for entry in endpoint.get(http, "/v1/models")["data"]]
        if not served:
            raise CommandFailed(f"{args.url} serves no model")
        model = args.model or served[0]
        if model not in served:
            raise UsageError(f"no model {near(model, served)}")
        if is_live:
            say(f"{model}, session {session}; /quit ends, Ctrl-C cancels an answer")
        history: list[dict[str, str]] = []
        for text in _messages(is_live):
            history.append({"role": "user", "content": text})
            body = {
                "model": model,
                "messages": history,
                "max_tokens": args.max_tokens,
                "temperature": args.temperature,
            }
            answer = _answer(http, body, session, is_live)
            if answer:
                history.append({"role": "assistant", "content": answer})
            else:
                history.pop()
    return 0


def _messages(is_live: bool) -> Iterator[str]:
    while True:
        try:
            text = input("> " if is_live else "").strip()
        except EOFError:
            if is_live:
                say("")
            return
        if text == "/quit":
            return
        if text:
            yield text


def _answer(http: httpx.Client, body: dict[str, Any], session: str, is_live: bool) -> str:
    """Print the answer as it comes; empty if it was cancelled or failed before the first word."""
    words: list[str] = []
    try:
        for text in _stream(http, body, session):
            words.append(text)
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        if not is_live:
            raise
        say("\n(cancelled)")
    except CommandFailed as error:
        if not is_live:
            raise
        say(f"{error}")
    print(flush=True)
    return "".join(words)


def _stream(http: httpx.Client, body: dict[str, Any], session: str) -> Iterator[str]:
    content = msgspec.json.encode(body | {"stream": True})
    headers = {"X-Session-ID": session, "Content-Type": "application/json"}
    try:
        with http.stream(
            "POST", "/v1/chat/completions", content=content, headers=headers
        ) as response:
            if response.status_code != 200:
                raise CommandFailed(endpoint.error_text(response.status_code, response.read()))
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = msgspec.json.decode(data)
                if "error" in event:
                    raise CommandFailed(str(event["error"].get("message")))
                for choice in event.get("choices") or ():
                    yield from _spoken(choice.get("delta") or {})
    except httpx.HTTPError as error:
        raise CommandFailed(endpoint.unreachable(http, error)) from error


def _spoken(delta: dict[str, Any]) -> Iterator[str]:
    if delta.get("content"):
        yield delta["content"]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        yield "".join(filter(None, (function.get("name"), function.get("arguments"))))
