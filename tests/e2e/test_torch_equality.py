"""The torch engine says what the models say, however its work is cut, moved and interrupted.

Two claims (mechanisms D). Bitwise: weights after a switch, KV after save and restore, output with
and without switch, restore or pause under the same batch schedule. Semantic: against transformers,
alone or batched, chunked or whole: equal up to the first position where the reference's two best
logits are less than 1e-3 apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the torch extra is not installed")
pytest.importorskip("transformers", reason="the catalog extra is not installed")

import torch
import transformers

from talaria_common.config import ModelEntry
from talaria_instance import catalog
from talaria_instance.engine.torch.arena import kv_start
from talaria_instance.engine.torch.spec import load_spec
from talaria_instance.engine.torch.weights import weight_layout
from tests.e2e.reference import SMALL_GAP, next_logits, top2_gap
from tests.e2e.torch_rig import Rig

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(180)]

TINY, OTHER, SMOL = "tiny-a", "tiny-b", "smollm2-135m"
ARENA_BYTES = 250_000_000
SMALL_VOCAB = 2048


# --- models -------------------------------------------------------------------------------------


def _seeded(name: str, **extra: Any) -> torch.nn.Module:
    """A small model from a seed; its scaled head keeps the best two logits apart."""
    torch.manual_seed(5)
    shape = {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": SMALL_VOCAB,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    kinds = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama3-rope": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    config, model = kinds[name]
    made = model(config(**shape | extra)).eval()
    with torch.no_grad():
        made.lm_head.weight *= 4
        for key, value in made.named_parameters():
            # Biases and norms start as zeros and ones, which would hide their being left out.
            if key.endswith("bias") or "norm" in key:
                value += 0.3 * torch.randn_like(value)
    return made


SEEDED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 48},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelEntry]:
    made = {e.id: e for e in catalog.prepare_default(catalog.default_cache(), print)}
    root = tmp_path_factory.mktemp("seeded")
    for name, extra in SEEDED.items():
        _seeded(name, **extra).save_pretrained(root / name)
        made[name] = ModelEntry(id=name, path=str(root / name))
    return made


@pytest.fixture(scope="module")
def rig(entries: dict[str, ModelEntry]) -> Iterator[Rig]:
    """All small models on one instance."""
    names = (TINY, OTHER, *SEEDED)
    with Rig([entries[n] for n in names], arena_bytes=ARENA_BYTES) as rig:
        yield rig


def prompt(seed: int, tokens: int, vocab: int = SMALL_VOCAB) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, vocab) for _ in range(tokens)]


# --- comparing ----------------------------------------------------------------------------------


def assert_greedy(entry: ModelEntry, tokens: Sequence[int], got: Sequence[int]) -> None:
    """Each token is the one transformers finds best after the same ids, up to the first position
    where it hesitates itself."""
    logits = next_logits(entry.path, tokens, got)
    for at, (ours, row) in enumerate(zip(got, logits, strict=True)):
        theirs, gap = int(row.argmax()), top2_gap(row)
        if ours != theirs and gap < SMALL_GAP:
            assert at > len(got) // 2, f"hesitates already at token {at}: a poor prompt"
            return
        assert ours == theirs, f"token {at}: {ours}, not {theirs}; top-2 logit gap {gap:.2e}"


def assert_lively(tokens: Sequence[int]) -> None:
    """The output is no fixed point that any fault would reproduce."""
    assert len(set(tokens)) > len(tokens) // 3


# --- semantic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [TINY, *SEEDED])
def test_output_equals_that_of_transformers(
    rig: Rig, entries: dict[str, ModelEntry], model: str
) -> None:
    tokens = prompt(1, 150)
    (got,) = rig.generate(rig.call(model, tokens, 40))
    assert_lively(got)
    assert_greedy(entries[model], tokens, got)
    assert len(got) == 40


def test_smollm2_equals_transformers_alone_and_batched(entries: dict[str, ModelEntry]) -> None:
    prompts = [prompt(n, length, 40_000) for n, length in ((1, 20), (2, 90), (3, 150))]
    with Rig([entries[SMOL]], arena_bytes=700_000_000) as rig:
        (alone,) = rig.generate(rig.call(SMOL, prompts[2], 12, tenant="alone"))
        together = rig.generate(*[rig.call(SMOL, p, 12) for p in prompts])
    assert_greedy(entries[SMOL], prompts[2], alone)
    for tokens, got in zip(prompts, together, strict=True):
        assert_greedy(entries[SMOL], tokens, got)


def test_batched_calls_equal_those_alone(rig: Rig, entries: dict[str, ModelEntry]) -> None:
    # Lengths far apart, so that padded and separate attention groups both occur.
    prompts = [prompt(n, length) for n, length in enumerate((5, 16, 100, 111, 400))]
    alone = [rig.generate(rig.call(TINY, p, 24, tenant="alone"))[0] for p in prompts]
    together = rig.generate(*[rig.call(TINY, p, 24, tenant="together") for p in prompts])
    for tokens, one, many in zip(prompts, alone, together, strict=True):
        assert_greedy(entries[TINY], tokens, one)
        assert_greedy(entries[TINY], tokens, many)


@pytest.mark.parametrize("slice_tokens", [7, 64, 512])
def test_a_prefill_in_slices_equals_one_in_whole(
    entries: dict[str, ModelEntry], slice_tokens: int
) -> None:
    tokens = prompt(8, 333)
    with Rig([entries[OTHER]], arena_bytes=ARENA_BYTES, prefill_slice_tokens=slice_tokens) as rig:
        (got,) = rig.generate(rig.call(OTHER, tokens, 24))
    assert_greedy(entries[OTHER], tokens, got)


def test_a_cached_prefix_changes_nothing(rig: Rig, entries: dict[str, ModelEntry]) -> None:
    opening, rest = prompt(9, 200), prompt(10, 45)
    rig.generate(rig.call(TINY, opening, 4, tenant="prefix"))
    call = rig.call(TINY, opening + rest, 24, tenant="prefix")
    (got,) = rig.generate(call)
    assert rig.sink.cached[call.key] == 192
    assert_greedy(entries[TINY], opening + rest, got)


def test_a_seeded_draw_is_the_same_alone_and_batched(rig: Rig) -> None:
    hot = {"temperature": 0.9, "top_p": 0.9, "seed": 7}
    tokens = prompt(11, 60)
    alone, again = (
        rig.generate(rig.call(TINY, tokens, 24, tenant=t, **hot))[0] for t in ("one", "two")
    )
    others = [rig.call(TINY, prompt(n, 60), 24) for n in (12, 13)]
    beside = rig.generate(rig.call(TINY, tokens, 24, tenant="three", **hot), *others)[0]
    other_seed = rig.generate(rig.call(TINY, tokens, 24, **hot | {"seed": 8}))[0]
    assert alone == again == beside
    assert alone != other_seed


# --- bitwise ------------------------------------------------------------------------------------


def test_a_switch_brings_back_the_same_weights_and_output(rig: Rig) -> None:
    tokens = prompt(20, 100)
    (before,) = rig.generate(rig.call(TINY, tokens, 24, tenant="before"))
    digest = rig.weights_digest(TINY)
    record = rig.activate(OTHER)
    assert record.path == "h2d"
    assert rig.weights_digest(TINY) != digest
    (after,) = rig.generate(rig.call(TINY, tokens, 24, tenant="after"))
    assert rig.weights_digest(TINY) == digest
    assert after == before


def test_kv_restored_from_the_host_is_the_kv_that_was_saved(rig: Rig) -> None:
    tokens = prompt(21, 120)
    first = rig.call(TINY, tokens, 24, tenant="kv")
    (before,) = rig.generate(first)
    held = rig.prefix_blocks(first)
    assert len(held) == 120 // 16
    digest = rig.kv_digest(held)
    rig.activate(OTHER)
    rig.activate(TINY)
    assert rig.prefix_blocks(first) == []
    again = rig.call(TINY, tokens, 24, tenant="kv")
    assert rig.engine.locality(again).host_tokens == 112
    (after,) = rig.generate(again)
    assert rig.sink.restored_tokens[again.key] == 112
    assert rig.kv_digest(rig.prefix_blocks(again)) == digest
    assert after == before


def test_calls_paused_in_the_middle_go_on_bit_by_bit(rig: Rig) -> None:
    prompts = [prompt(30, 70), prompt(31, 50)]
    plain = rig.generate(*[rig.call(TINY, p, 40, tenant="plain") for p in prompts])
    calls = [rig.call(TINY, p, 40, tenant="paused") for p in prompts]
    rig.activate(TINY)
    rig.engine.admit(calls)
    rig.run(TINY, iterations=9)
    live = [rig.live(c) for c in calls]
    assert all(c.computed % 16 for c in live), "partial last blocks are part of the claim"
    computed = [c.computed for c in live]
    digests = [rig.kv_digest(c.blocks) for c in live]
    rig.activate(OTHER)
    assert not any(c.is_placed for c in live)
    rig.generate(rig.call(OTHER, prompts[0], 8))
    rig.activate(TINY)
    assert all(rig.engine.core.residence.place(c) for c in live)
    assert [c.computed for c in live] == computed
    assert [rig.kv_digest(c.blocks) for c in live] == digests
    assert rig.finish(*calls) == plain


def test_a_prefill_paused_in_the_middle_goes_on(rig: Rig) -> None:
    tokens = prompt(32, 100)
    call = rig.call(TINY, tokens, 16, tenant="cut")
    rig.activate(TINY)
    rig.engine.admit([call])
    rig.run(TINY, iterations=0, prefill=40)
    digest = rig.kv_digest(rig.live(call).blocks[:2])
    rig.activate(OTHER)
    rig.activate(TINY)
    rig.run(TINY, iterations=0, prefill=8)
    assert rig.live(call).computed == 48
    assert rig.kv_digest(rig.live(call).blocks[:2]) == digest
    (got,) = rig.finish(call)
    plain = rig.call(TINY, tokens, 16, tenant="whole")
    rig.engine.admit([plain])
    rig.run(TINY, iterations=0, prefill=40)
    rig.run(TINY, iterations=0, prefill=8)
    assert rig.finish(plain) == [got]


def test_zeroed_kv_changes_the_output(rig: Rig) -> None:
    tokens = prompt(40, 64)
    (before,) = rig.generate(rig.call(TINY, tokens, 24, tenant="zero"))
    call = rig.call(TINY, tokens, 24, tenant="zero")
    (block, *_) = rig.prefix_blocks(call)
    rig.engine.core.residence.kv_block(block).zero_()
    (after,) = rig.generate(call)
    assert before != after


# --- trouble ------------------------------------------------------------------------------------


def _arena_bytes(entries: Sequence[ModelEntry], blocks: int) -> int:
    """An arena with so many blocks, and no more, for the largest of some models."""
    specs = [load_spec(Path(entry.path)) for entry in entries]
    return max(
        kv_start(weight_layout(spec, 4).nbytes) + blocks * spec.kv_block_items(16) * 4
        for spec in specs
    )


def test_without_finished_kv_a_paused_call_still_goes_on(entries: dict[str, ModelEntry]) -> None:
    tokens = prompt(50, 70)
    models = [entries[TINY], entries[OTHER]]
    with Rig(models, arena_bytes=ARENA_BYTES, keep_finished_kv=False) as rig:
        (plain,) = rig.generate(rig.call(TINY, tokens, 30, tenant="plain"))
        call = rig.call(TINY, tokens, 30)
        rig.engine.admit([call])
        rig.run(TINY, iterations=9)
        rig.activate(OTHER)
        rig.activate(TINY)
        assert rig.run(TINY, iterations=1).prefill_tokens == 0
        assert rig.finish(call) == [plain]
        assert rig.sink.saved == []
        assert rig.engine.facts().host_kv_bytes == 0


def test_calls_that_outgrow_the_device_take_turns(
    entries: dict[str, ModelEntry], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "talaria_instance.engine.torch")
    prompts = [prompt(n, 150) for n in range(60, 64)]
    blocks = 36
    with Rig([entries["qwen3"]], arena_bytes=_arena_bytes([entries["qwen3"]], blocks)) as rig:
        calls = [rig.call("qwen3", p, 60) for p in prompts]
        assert calls[0].blocks_needed < blocks < 3 * calls[0].blocks_needed
        for tokens, got in zip(prompts, rig.generate(*calls), strict=True):
            assert_greedy(entries["qwen3"], tokens, got)
        assert "preempted" in caplog.text
        rig.engine.core.residence.collect()
        rig.engine.core.residence.pool.check()
        assert rig.engine.facts().blocks_free == blocks


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_events_changes_an_answer(entries: dict[str, ModelEntry], seed: int) -> None:
    """Random quanta, switches and aborts, too few device blocks, too little host memory."""
    draw = random.Random(seed)
    names = ("qwen2", "qwen3")
    openings = [prompt(90 + n, 70) for n in range(2)]
    with Rig(
        [entries[n] for n in names],
        arena_bytes=_arena_bytes([entries[n] for n in names], blocks=40),
        host_kv_bytes=draw.choice((1_000_000, 100_000_000)),
        keep_finished_kv=draw.random() < 0.7,
        prefill_slice_tokens=draw.choice((5, 32, 128)),
    ) as rig:
        core, asked, aborted = rig.engine.core, [], set()
        for n in range(14):
            tokens = draw.choice(openings) + prompt(n, draw.randrange(1, 80))
            call = rig.call(draw.choice(names), tokens, draw.randrange(1, 40))
            asked.append((call, tokens))
            rig.engine.admit([call])
            if draw.random() < 0.3:
                rig.activate(draw.choice(names))
            assert core.residence.active is not None
            rig.run(
                core.residence.active.entry.id,
                iterations=draw.randrange(12),
                prefill=draw.choice((0, 20, 500)),
            )
            victim, _ = draw.choice(asked)
            if draw.random() < 0.2 and rig.engine.abort(victim.key):
                aborted.add(victim.key)
        for name in names:
            rig.activate(name)
            rig.finish(*[c for c, _ in asked if c.model == name and c.key not in aborted])
            assert rig.run(name).stop == "idle"
        for call, tokens in asked:
            finish, failed = rig.sink.ends[call.key]
            assert (finish, failed) == ((None, None) if call.key in aborted else ("length", None))
            if call.key not in aborted:
                assert_greedy(entries[call.model], tokens, rig.output(call))
        core.residence.collect()
        core.residence.pool.check()
        core.residence.host.check()
        assert rig.engine.facts().blocks_free == rig.engine.facts().blocks_total


def test_a_full_host_loses_prefixes_and_no_answer(entries: dict[str, ModelEntry]) -> None:
    tokens = prompt(70, 100)
    models = [entries[TINY], entries[OTHER]]
    # Three blocks of tiny-a: a paused call's KV does not fit and is computed again.
    with Rig(models, arena_bytes=ARENA_BYTES, host_kv_bytes=3 * 16 * 6144) as rig:
        (plain,) = rig.generate(rig.call(TINY, tokens, 30, tenant="plain"))
        call = rig.call(TINY, tokens, 30)
        rig.engine.admit([call])
        rig.run(TINY, iterations=9)
        rig.activate(OTHER)
        rig.activate(TINY)
        assert rig.finish(call) == [plain]
        rig.engine.core.residence.host.check()


def test_a_call_that_breaks_a_step_fails_alone(rig: Rig) -> None:
    good, bad = rig.call(TINY, prompt(80, 30), 20), rig.call(TINY, [5, 1 << 40, 7], 20)
    (wanted,) = rig.generate(rig.call(TINY, prompt(80, 30), 20, tenant="alone"))
    rig.activate(TINY)
    rig.engine.admit([good, bad])
    got, nothing = rig.finish(good, bad)
    assert (got, nothing) == (wanted, [])
    finish, failed = rig.sink.ends[bad.key]
    assert finish is None
    assert failed


def test_a_step_that_breaks_fails_its_calls_and_leaves_the_engine_usable(rig: Rig) -> None:
    call = rig.call(TINY, prompt(81, 30), 20)
    rig.activate(TINY)
    rig.engine.admit([call])
    rig.run(TINY, iterations=2)
    rig.live(call).blocks = [1 << 40]
    rig.run(TINY)
    assert rig.sink.ends[call.key][1]
    (got,) = rig.generate(rig.call(TINY, prompt(81, 30), 20))
    assert len(got) == 20
