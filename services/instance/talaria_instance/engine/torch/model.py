"""Forward pass of a dense decoder over views: weights and paged KV are never its own. IO (device).

A step is a list of spans: consecutive tokens of one sequence whose KV before them is in its
blocks. Prefill chunks and decode tokens are both spans; each yields the logits of its last token.
KV is block-major, [blocks, layers, 2, kv_heads, block_tokens, head_dim]; a *row* of the cache is
one (block, layer, key or value, head).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from talaria_instance.engine.torch.rope import inverse_frequencies
from talaria_instance.engine.torch.spec import ModelSpec

Tensor = torch.Tensor
Indices = npt.NDArray[np.int64]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

GROUP_FILL: Final = 0.6
"""Decode tokens share one attention call while the shortest has this share of the longest's blocks:
below it the padding costs more than another call (measured on two cores, contexts 500 to 2000)."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens at positions `start`, `start + 1`, ... of a sequence that owns `blocks`."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Attend:
    """One attention call: which rows of the step ask, which rows of the cache answer."""

    rows: slice
    sequences: int
    cache_rows: Tensor
    """Flat [2, sequences, kv_heads, blocks] rows of layer 0."""
    length: int
    """Keys to look at; the rest of the last block is left out."""
    mask: Tensor | None
    """Added to the scores: [sequences, 1, group, length] (decode), [tokens, length] (prefill)."""


@dataclass(frozen=True, slots=True)
class _Plan:
    tokens: Tensor
    cos: Tensor
    sin: Tensor
    write: Tensor
    """Flat [tokens * 2 * kv_heads]: slots of layer 0 that the step's keys and values go to."""
    attends: tuple[_Attend, ...]
    last: Tensor


class Decoder:
    """One model bound to its views."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], kv: Tensor) -> None:
        self._spec = spec
        self._w = weights
        self._block_tokens = kv.shape[4]
        self._rows = kv.view(-1, self._block_tokens * spec.head_dim)
        self._slots = kv.view(-1, spec.head_dim)
        self._device, self._dtype = kv.device, kv.dtype
        self._layer_rows = 2 * spec.kv_heads
        self._inverse = inverse_frequencies(spec.rope, spec.head_dim).to(self._device)
        self._linear = choose_linear(self._device, self._dtype)
        self._gathered = torch.empty(0, dtype=self._dtype, device=self._device)

    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Write the spans' KV; logits float32 [len(spans), vocab] of each span's last token."""
        plan = self._plan(spans)
        hidden = F.embedding(plan.tokens, self._w["embed"])
        for layer in range(self._spec.layers):
            self._layer(layer, hidden, plan)
        last = hidden.index_select(0, plan.last)
        last = F.rms_norm(last, (self._spec.hidden,), self._w["norm"], self._spec.norm_eps)
        head = self._w["embed" if self._spec.is_tied else "head"]
        return self._linear(last, head, None).float()

    def _layer(self, layer: int, hidden: Tensor, plan: _Plan) -> None:
        """Add layer `layer` to `hidden` [tokens, hidden] in place."""
        w, spec, own = self._w, self._spec, f"{layer}."
        shape = (spec.hidden,)
        x = F.rms_norm(hidden, shape, w[own + "norm_in"], spec.norm_eps)
        qkv = self._linear(x, w[own + "qkv"], w.get(own + "qkv_bias"))
        mixed = self._attention(layer, qkv, plan)
        hidden += self._linear(mixed, w[own + "out"], w.get(own + "out_bias"))
        x = F.rms_norm(hidden, shape, w[own + "norm_mid"], spec.norm_eps)
        gate, up = self._linear(x, w[own + "gate_up"], None).chunk(2, dim=-1)
        hidden += self._linear(F.silu(gate).mul_(up), w[own + "down"], None)

    def _attention(self, layer: int, qkv: Tensor, plan: _Plan) -> Tensor:
        """Store keys and values of the step, then attend; [tokens, heads * head_dim]."""
        spec = self._spec
        tokens, heads, kv_heads = qkv.shape[0], spec.heads, spec.kv_heads
        split = qkv.view(tokens, heads + 2 * kv_heads, spec.head_dim)
        turned = split[:, : heads + kv_heads]
        if spec.has_qk_norm:
            turned = self._normed(layer, turned)
        turned = _rotate(turned, plan.cos, plan.sin)
        query = turned[:, :heads]
        stored = torch.cat((turned[:, heads:], split[:, heads + kv_heads :]), dim=1)
        write = plan.write + layer * self._layer_rows * self._block_tokens
        self._slots.index_copy_(0, write, stored.view(-1, spec.head_dim))
        parts = [self._attend(layer, query[a.rows], a) for a in plan.attends]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _normed(self, layer: int, turned: Tensor) -> Tensor:
        """Root-mean-square norm of each query head and key head (Qwen3)."""
        eps, heads = self._spec.norm_eps, self._spec.heads
        shape, own = (self._spec.head_dim,), f"{layer}."
        query = F.rms_norm(turned[:, :heads], shape, self._w[own + "q_norm"], eps)
        key = F.rms_norm(turned[:, heads:], shape, self._w[own + "k_norm"], eps)
        return torch.cat((query, key), dim=1)

    def _attend(self, layer: int, query: Tensor, at: _Attend) -> Tensor:
        """Attention of one group; `query` [rows, heads, head_dim]."""
        spec = self._spec
        rows, kv_heads, dim = query.shape[0], spec.kv_heads, spec.head_dim
        kv = self._gather(layer, at)
        key, value = kv[0], kv[1]
        if rows == at.sequences:
            # Decode: the query heads that share a key head stand where tokens would.
            query = query.reshape(rows, kv_heads, spec.heads // kv_heads, dim)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=at.mask)
        else:
            query = query.transpose(0, 1).unsqueeze(0)
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=at.mask, enable_gqa=spec.heads != kv_heads
            )
            mixed = mixed.squeeze(0).transpose(0, 1)
        return mixed.reshape(rows, spec.heads * dim)

    def _gather(self, layer: int, at: _Attend) -> Tensor:
        """Keys and values out of their blocks, [2, sequences, kv_heads, length, head_dim].

        One buffer serves all layers and steps, so that it stays in the processor's cache.
        """
        items = at.cache_rows.numel() * self._rows.shape[1]
        if self._gathered.numel() < items:
            self._gathered = torch.empty(items, dtype=self._dtype, device=self._device)
        out = self._gathered[:items].view(-1, self._rows.shape[1])
        torch.index_select(self._rows, 0, at.cache_rows + layer * self._layer_rows, out=out)
        shape = (2, at.sequences, self._spec.kv_heads, -1, self._spec.head_dim)
        return out.view(shape)[:, :, :, : at.length]

    def _plan(self, spans: Sequence[Span]) -> _Plan:
        positions = np.concatenate([np.arange(s.start, s.end) for s in spans])
        turns = self._upload(positions).float()[:, None] * self._inverse
        turns = torch.cat((turns, turns), dim=-1)[:, None, :]
        sin = turns.sin()
        sin[..., : sin.shape[-1] // 2] *= -1
        tokens = np.concatenate([np.asarray(s.tokens, dtype=np.int64) for s in spans])
        ends = np.cumsum([len(s.tokens) for s in spans])
        return _Plan(
            tokens=self._upload(tokens),
            cos=turns.cos().to(self._dtype),
            sin=sin.to(self._dtype),
            write=self._upload(self._write_slots(spans)),
            attends=tuple(self._attends(spans)),
            last=self._upload(ends - 1),
        )

    def _write_slots(self, spans: Sequence[Span]) -> Indices:
        size, heads = self._block_tokens, self._layer_rows
        parts = []
        for span in spans:
            positions = np.arange(span.start, span.end)
            blocks = np.asarray(span.blocks, dtype=np.int64)[positions // size]
            rows = blocks[:, None] * (self._spec.layers * heads) + np.arange(heads)
            parts.append((rows * size + (positions % size)[:, None]).ravel())
        return np.concatenate(parts)

    def _attends(self, spans: Sequence[Span]) -> list[_Attend]:
        """Prefill chunks alone, neighbouring decode tokens of like length together."""
        out: list[_Attend] = []
        at = row = 0
        while at < len(spans):
            group = 1
            if len(spans[at].tokens) == 1:
                group = self._group_size(spans[at:])
            members = spans[at : at + group]
            rows = sum(len(s.tokens) for s in members)
            out.append(self._attend_of(members, slice(row, row + rows)))
            at, row = at + group, row + rows
        return out

    def _group_size(self, spans: Sequence[Span]) -> int:
        size, longest, shortest = 0, 0, 1 << 60
        for span in spans:
            blocks = -(-span.end // self._block_tokens)
            longest, shortest = max(longest, blocks), min(shortest, blocks)
            if len(span.tokens) != 1 or shortest < GROUP_FILL * longest:
                break
            size += 1
        return size

    def _attend_of(self, spans: Sequence[Span], rows: slice) -> _Attend:
        length = max(s.end for s in spans)
        blocks = -(-length // self._block_tokens)
        table = np.empty((len(spans), blocks), dtype=np.int64)
        for n, span in enumerate(spans):
            own = -(-span.end // self._block_tokens)
            table[n, :own] = span.blocks[:own]
            table[n, own:] = span.blocks[0]
        heads = np.arange(self._layer_rows).reshape(2, 1, self._spec.kv_heads, 1)
        cache = table[None, :, None, :] * (self._spec.layers * self._layer_rows) + heads
        return _Attend(
            rows=rows,
            sequences=len(spans),
            cache_rows=self._upload(cache.ravel()),
            length=length,
            mask=self._mask(spans, length),
        )

    def _mask(self, spans: Sequence[Span], length: int) -> Tensor | None:
        ends = [s.end for s in spans]
        if len(spans[0].tokens) == 1:
            if min(ends) == length:
                return None
            seen = np.arange(length) < np.asarray(ends)[:, None]
            mask = self._bias(seen)[:, None, None, :]
            return mask.expand(-1, 1, self._spec.heads // self._spec.kv_heads, -1)
        seen = np.arange(length) <= np.arange(spans[0].start, length)[:, None]
        return self._bias(seen)

    def _bias(self, seen: npt.NDArray[np.bool_]) -> Tensor:
        hidden = torch.from_numpy(~seen).to(self._device)
        bias = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return bias.masked_fill_(hidden, float("-inf"))

    def _upload(self, values: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._device)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding of `x` [tokens, heads, head_dim]; the first half of the sines is negated."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), signed_sin)


def choose_linear(device: torch.device, dtype: torch.dtype) -> Linear:
    """Matrix product for this device.

    On the CPU, float32 products of 2 to 16 rows are 1.2 to 2 times faster in oneDNN than in the
    BLAS behind `linear`, which packs the whole weight matrix, and so is the output head of one row
    (SmolLM2-135M on two cores); elsewhere they are equal.
    """
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if device.type != "cpu" or dtype != torch.float32 or not has_onednn:
        return F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product

    return linear
