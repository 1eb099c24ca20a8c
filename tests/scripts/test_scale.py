"""The sweeps of the documentation are those of the planner."""

from __future__ import annotations

import pytest
import scale


@pytest.mark.slow
def test_the_page_has_the_sweeps_of_the_planner():
    assert scale.sweeps() in scale.PAGE.read_text(), "run python scripts/scale.py"


def test_models_have_the_parameters_of_their_names():
    counts = {
        name: sum(one.numel() for one in scale.outline(name, "bfloat16", None).parameters())
        for name in ("Qwen2.5-1.5B", "Llama-3.1-8B", "7B")
    }
    assert counts == {
        "Qwen2.5-1.5B": 1_543_714_304,
        "Llama-3.1-8B": 8_030_261_248,
        "7B": 7_615_616_512,
    }


def test_the_picture_can_be_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "MODELS", {"Qwen2.5-1.5B": scale.MODELS["Qwen2.5-1.5B"]})
    scale.draw(tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
