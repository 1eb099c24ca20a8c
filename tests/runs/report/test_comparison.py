from __future__ import annotations

import numpy as np
from PIL import Image

from lit_grpo.runs.report.comparison import COLORS, draw_comparison
from lit_grpo.runs.report.history import load_runs


def pixels_of(path, color: str) -> int:
    wanted = [int(color[start : start + 2], 16) for start in (1, 3, 5)]
    pixels = np.asarray(Image.open(path).convert("RGB"))
    return int((pixels == wanted).all(-1).sum())


def make_runs(root, num_runs: int, num_steps: int = 3):
    for number in range(num_runs):
        run = root / f"{number}"
        run.mkdir()
        rows = [f"{step},{step},{step + number}" for step in range(num_steps)]
        (run / "metrics.csv").write_text("\n".join(["step,seconds,reward/mean", *rows]) + "\n")
    return load_runs([root / f"{number}" for number in range(num_runs)])


def test_each_run_has_a_colour_of_its_own(tmp_path):
    path = tmp_path / "comparison-1.png"
    draw_comparison(make_runs(tmp_path, 3), path)
    drawn = [pixels_of(path, color) > 500 for color in COLORS]
    assert drawn == [True] * 3 + [False] * (len(COLORS) - 3)


def test_more_runs_than_colours_and_long_runs_are_drawn(tmp_path):
    path = tmp_path / "comparison-1.png"
    draw_comparison(make_runs(tmp_path, 2 * len(COLORS) + 1, num_steps=100), path)
    assert all(pixels_of(path, color) > 500 for color in COLORS)
