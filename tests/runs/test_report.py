from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_grpo import __main__
from lit_grpo.runs.curves import PANELS, draw_curves, load_run
from lit_grpo.runs.report import report, summarise

WARM_UP = """\
step,seconds,sft/loss,val/accuracy
0,1.0,2.0,
1,2.5,1.0,0.25
"""

GRPO = """\
step,seconds,reward/mean,reward/std,policy/loss,policy/kl,val/accuracy,\
timing/step_duration_s,timing/generation_duration_s,perf/tokens_per_second
0,1.0,0.5,0.25,0.01,0.0,0.25,2.0,1.0,1000
1,62.0,0.75,0.125,-0.01,0.0,,4.0,2.0,500
2,123.0,,,,,0.875,,,
"""


def make_run(path: Path, metrics: str, *parts: str) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.csv").write_text(metrics)
    for part in parts:
        (path / part).mkdir()
    return path


def titles(run: Path) -> list[str]:
    return [panel.title for panel in PANELS if panel.fits(load_run(run))]


def test_the_picture_of_several_runs_is_written_into_the_last_one(tmp_path):
    first = make_run(tmp_path / "sft" / "0", WARM_UP)
    last = make_run(tmp_path / "grpo" / "0", GRPO)
    path = draw_curves([first, last])
    assert path == last / "curves.png"
    assert not (first / "curves.png").exists()
    pixels = np.asarray(Image.open(path).convert("L"))
    assert pixels.shape[1] > pixels.shape[0]
    assert 0.01 < (pixels < 200).mean() < 0.5


def test_only_quantities_with_data_get_a_panel(tmp_path):
    warm_up = make_run(tmp_path / "sft", WARM_UP)
    grpo = make_run(tmp_path / "grpo", GRPO)
    assert titles(warm_up) == ["Held-out accuracy", "SFT loss"]
    assert titles(grpo) == [
        "Held-out accuracy",
        "Reward",
        "Policy loss",
        "Time per step",
        "Throughput",
    ]


def test_a_kl_that_is_always_zero_is_not_shown_and_a_loss_that_is_zero_is(tmp_path):
    run = make_run(tmp_path / "run", "step,seconds,policy/kl,policy/loss\n0,1,0.0,0.0\n")
    assert titles(run) == ["Policy loss"]
    draw_curves([run])


def test_a_run_without_any_known_metric_still_makes_a_picture(tmp_path):
    run = make_run(tmp_path / "run", "step,seconds,mine\n0,1,0.5\n")
    report([run])
    assert (run / "curves.png").exists()


def test_long_noisy_runs_and_samples_are_drawn(tmp_path):
    steps = range(200)
    lines = ["step,seconds,reward/mean,val/accuracy,val/avg@4,val/pass@4"]
    lines += [f"{n},{n},{n % 7},{n / 200},{n / 300},{n / 200}" for n in steps]
    run = make_run(tmp_path / "run", "\n".join(lines) + "\n")
    assert draw_curves([run]).stat().st_size > 10_000


def test_the_summary_of_a_warm_up_and_grpo_shows_accuracy_before_and_after(tmp_path, capsys):
    first = make_run(tmp_path / "sft" / "0", WARM_UP)
    last = make_run(tmp_path / "grpo" / "0", GRPO, "final", "checkpoints")
    report([str(first), str(last)])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "run steps time tokens accuracy reward",
        "sft/0 2 2 s – 0.250 → 0.250 –",
        "grpo/0 3 2 min 3 s 4.0 k 0.250 → 0.875 0.500 → 0.750",
        "Held-out accuracy 0.250 after sft/0 → 0.875 after grpo/0 (2 min 6 s)",
        f"Run {last}",
        f"Curves {last}/curves.png",
        f"Checkpoints {last}/checkpoints",
        f"Final model {last}/final",
    ]


def test_the_summary_of_one_run_starts_with_its_first_accuracy(tmp_path, capsys):
    summarise([make_run(tmp_path / "grpo" / "0", GRPO)])
    line = "Held-out accuracy 0.250 → 0.875 after grpo/0 (2 min 3 s)"
    assert line in capsys.readouterr().out.splitlines()


def test_a_summary_without_accuracy_omits_its_line(tmp_path, capsys):
    summarise([make_run(tmp_path / "run", "step,seconds,reward/mean\n0,1,0.5\n")])
    assert "Held-out" not in capsys.readouterr().out


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such run directory"):
        report([tmp_path / "nowhere"])


def test_the_parent_of_runs_names_its_runs(tmp_path):
    make_run(tmp_path / "grpo" / "0", GRPO)
    make_run(tmp_path / "grpo" / "1", GRPO)
    with pytest.raises(ValueError, match=r"Did you mean .*grpo/0 or .*grpo/1\?"):
        load_run(tmp_path / "grpo")


@pytest.mark.parametrize("metrics", ["", "step,seconds\n"])
def test_for_a_run_without_a_step_the_log_is_named(tmp_path, metrics):
    with pytest.raises(ValueError, match="ended before its first step. See run.log"):
        load_run(make_run(tmp_path / "run", metrics))


def test_a_wrong_directory_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert __main__.main(["report", str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "no such run directory" in line
