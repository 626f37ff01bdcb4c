"""Talaria from Python over NATS, tokens straight from the instance:

    async with Client.connect("nats://127.0.0.1:4222") as client:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        async for chunk in client.chat(model="smollm2-135m", messages=messages, session="trip"):
            print(chunk.text, end="")

Leaving the loop, or cancelling the task, cancels the call.
"""

from talaria_client.client import Client
from talaria_client.types import Answer, Chunk, ModelInfo, ToolCall
from talaria_common.errors import Rejected, TalariaError, Unavailable

__all__ = [
    "Answer",
    "Chunk",
    "Client",
    "ModelInfo",
    "Rejected",
    "TalariaError",
    "ToolCall",
    "Unavailable",
]
