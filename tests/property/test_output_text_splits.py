"""Output text: what the pieces join to does not depend on how the model cut it into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria_instance.engine.torch.text import ModelText
from tests.unit.text_models import byte_model, fed, prompt, tokens_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return byte_model(tmp_path_factory.mktemp("model"))


@given(written=st.text(min_size=1, max_size=30).filter(lambda t: "<tool_call>" not in t))
def test_text_comes_back_whole_from_single_bytes(model: ModelText, written: str) -> None:
    output = model.output(prompt(model, tools=[{"type": "function", "function": {"name": "f"}}]))
    pieces = fed(output, tokens_of(written, model))
    assert "".join(piece.text for piece in pieces) == written


@given(
    written=st.text(alphabet="ab.\né", min_size=1, max_size=20),
    stop=st.lists(st.text(alphabet="ab.\né", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_output_ends_before_the_first_stop_string_to_be_complete(
    model: ModelText, written: str, stop: list[str]
) -> None:
    output = model.output(prompt(model, stop=stop))
    pieces = fed(output, tokens_of(written, model))
    ends = [at + len(s) for s in stop for at in [written.find(s)] if at >= 0]
    seen = written[: min(ends)] if ends else written
    starts = [at for at in (seen.find(s) for s in stop) if at >= 0]
    assert "".join(piece.text for piece in pieces) == (seen[: min(starts)] if starts else written)
    assert any(piece.is_stopped for piece in pieces) == bool(ends)
