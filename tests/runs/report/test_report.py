from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from subprocess import Popen

import numpy as np
import pyarrow as pa
import pytest
import yaml
from logged_runs import HOLD
from PIL import Image
from processes import LIT_GRPO, can_run, kill_group, run_program, start
from terminal import shown_in_terminal

from lit_grpo import __main__
from lit_grpo.runs.files.completions import write_table
from lit_grpo.runs.report.curves import PANELS, draw_curves
from lit_grpo.runs.report.history import load_runs
from lit_grpo.runs.report.report import report

WARM_UP = """\
step,seconds,sft/loss,val/accuracy
0,1.0,2.0,
1,2.5,1.0,0.25
"""

GRPO = """\
step,seconds,reward/mean,reward/std,policy/loss,policy/kl,val/accuracy,\
timing/step_duration_s,timing/generation_duration_s,perf/tokens_per_second
-1,0.5,,,,,0.25,,,
0,1.0,0.5,0.25,0.01,0.0,,2.0,1.0,1000
1,62.0,0.75,0.125,-0.01,0.0,,4.0,2.0,500
2,123.0,,,,,0.875,,,
"""


def make_run(path: Path, metrics: str, *parts: str) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.csv").write_text(metrics)
    for part in parts:
        (path / part).mkdir()
    return path


def starts_from(run: Path, policy: str) -> None:
    model = {"policy": {"class_path": "lit_grpo.Policy", "init_args": {"path": policy}}}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": model}))


def make_stages(root: Path) -> tuple[Path, Path]:
    first = make_run(root / "sft" / "0", WARM_UP)
    last = make_run(root / "grpo" / "0", GRPO, "final", "checkpoints")
    starts_from(last, str(first / "final"))
    return first, last


NOT_KNOWN = "(unknown) It has no events.jsonl, so how it ended is not known. See run.log."


def shown(capsys) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def titles(run: Path) -> list[str]:
    return [panel.title for panel in PANELS if panel.fits(load_runs([run])[0])]


@pytest.mark.slow
def test_the_picture_of_stages_is_written_into_the_last_one_whatever_their_order(tmp_path):
    first, last = make_stages(tmp_path)
    report([last, first])
    path = last / "curves.png"
    assert not (first / "curves.png").exists()
    assert not list(tmp_path.rglob("comparison*"))
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
    draw_curves(load_runs([run]), tmp_path / "curves.png")


def test_a_run_without_any_known_metric_still_makes_a_picture(tmp_path):
    run = make_run(tmp_path / "run", "step,seconds,mine\n0,1,0.5\n")
    report([run])
    assert (run / "curves.png").exists()


def test_long_noisy_runs_and_samples_are_drawn(tmp_path):
    steps = range(200)
    lines = ["step,seconds,reward/mean,val/accuracy,val/avg@4,val/pass@4"]
    lines += [f"{n},{n},{n % 7},{n / 200},{n / 300},{n / 200}" for n in steps]
    run = make_run(tmp_path / "run", "\n".join(lines) + "\n")
    draw_curves(load_runs([run]), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_summary_of_a_warm_up_and_grpo_shows_accuracy_before_and_after(tmp_path, capsys):
    first, last = make_stages(tmp_path)
    report([str(first), str(last)])
    assert shown(capsys) == [
        "run steps time tokens accuracy reward",
        "sft/0 2 2 s – 0.250 –",
        "grpo/0 3 2 min 3 s 4.0 k 0.250 → 0.875 0.500 → 0.750",
        "Held-out accuracy 0.250 after sft/0 → 0.875 after grpo/0 (2 min 6 s)",
        f"sft/0 {NOT_KNOWN}",
        f"grpo/0 {NOT_KNOWN}",
        f"Run {last}",
        f"Page {last}/report.html",
        f"Curves {last}/curves.png",
        f"Checkpoints {last}/checkpoints",
        f"Final model {last}/final",
    ]


def test_the_summary_of_one_run_starts_with_its_first_accuracy(tmp_path, capsys):
    report([make_run(tmp_path / "grpo" / "0", GRPO)])
    assert "Held-out accuracy 0.250 → 0.875 after grpo/0 (2 min 3 s)" in shown(capsys)


def test_an_accuracy_that_was_not_measured_at_the_end_is_not_said_to_be_the_last(tmp_path, capsys):
    run = make_run(tmp_path / "sft" / "0", "step,seconds,val/accuracy\n0,1,0.5\n1,2,0.75\n2,3,\n")
    report([run])
    assert "Held-out accuracy 0.500 → 0.750 at step 2 of 3 of sft/0 (3 s)" in shown(capsys)


def test_an_accuracy_that_was_only_measured_before_training_is_called_so(tmp_path, capsys):
    run = make_run(tmp_path / "grpo" / "0", "step,seconds,val/accuracy\n-1,0,0.5\n0,1,\n1,2,\n")
    report([run])
    assert "Held-out accuracy 0.500 before training of grpo/0 (2 s)" in shown(capsys)


def test_a_summary_without_accuracy_omits_its_line(tmp_path, capsys):
    report([make_run(tmp_path / "run", "step,seconds,reward/mean\n0,1,0.5\n")])
    assert "Held-out" not in capsys.readouterr().out


UNTIMED = """\
step,seconds,reward/mean,completions/mean_length,val/accuracy
0,1,0.5,2.5,
1,2,0.5,3.0,
2,3,,,0.5
"""


def write_completions(run: Path, name: str, *num_tokens: int) -> None:
    path = run / "completions" / name
    write_table(pa.table({"num_tokens": num_tokens}), path)


def test_without_timing_log_tokens_are_counted_in_the_completions_of_all_ranks(tmp_path, capsys):
    run = make_run(tmp_path / "my" / "0", UNTIMED)
    write_completions(run, "step_000000_rank0.parquet", 2, 3)
    write_completions(run, "step_000000_rank1.parquet", 1_000, 200)
    write_completions(run, "step_000001.parquet", 6)
    write_completions(run, "step_000002.parquet", 999)  # of a step that is not finished
    report([run])
    printed = shown(capsys)
    assert printed[1] == "my/0 3 3 s 1.2 k 0.500 0.500 → 0.500"
    assert "TimingLog" not in " ".join(printed)


@pytest.mark.slow
def test_tokens_that_are_not_known_are_explained(tmp_path, capsys):
    run = make_run(tmp_path / "my" / "0", UNTIMED)
    write_completions(run, "step_000001.parquet", 6)
    damaged = make_run(tmp_path / "my" / "1", UNTIMED)
    for name in ("step_000000.parquet", "step_000001.parquet"):
        write_completions(damaged, name, 6)
    (damaged / "completions" / name).write_bytes(b"PAR1")
    sft = make_run(tmp_path / "sft" / "0", WARM_UP)
    note = "The tokens of my/0 and my/1 are not known: completions/ does not have the files of all"
    report([run, damaged, sft])
    assert note in capsys.readouterr().out.replace("\n", " ")
    assert note in (sft / "comparison-1.html").read_text()
    report([sft])
    assert "TimingLog" not in capsys.readouterr().out


@pytest.mark.slow
def test_independent_runs_are_compared_in_a_picture_that_overwrites_nothing(tmp_path, capsys):
    runs = [make_run(tmp_path / "grpo" / name, GRPO) for name in "01"]
    (runs[-1] / "curves.png").write_text("its own")
    report(runs)
    report(runs)
    comparisons = [runs[-1] / f"comparison-{number}.png" for number in (1, 2)]
    row = "3 2 min 3 s 4.0 k 0.250 → 0.875 0.500 → 0.750"
    once = ["run steps time tokens accuracy reward", f"grpo/0 {row}", f"grpo/1 {row}"]
    once += [f"grpo/0 {NOT_KNOWN}", f"grpo/1 {NOT_KNOWN}"]
    pages = [path.with_suffix(".html") for path in comparisons]
    lines = [
        [*once, f"Comparison {path}", f"Page {page}"]
        for path, page in zip(comparisons, pages, strict=True)
    ]
    assert shown(capsys) == lines[0] + lines[1]
    assert all(path.stat().st_size > 10_000 for path in comparisons + pages)
    assert (runs[-1] / "curves.png").read_text() == "its own"
    assert not list(runs[0].glob("*.png"))


@pytest.mark.slow
def test_runs_that_started_from_the_same_warm_up_are_compared_after_it(tmp_path, capsys):
    first, last = make_stages(tmp_path)
    other = make_run(tmp_path / "grpo" / "1", GRPO)
    starts_from(other, str(first / "final"))
    report([last, other, first])
    lines = shown(capsys)
    assert [line.split()[0] for line in lines[1:4]] == ["sft/0", "grpo/0", "grpo/1"]
    assert lines[4:] == [
        "grpo/0 (started from sft/0)",
        "grpo/1 (started from sft/0)",
        *(f"{one} {NOT_KNOWN}" for one in ("sft/0", "grpo/0", "grpo/1")),
        f"Comparison {other}/comparison-1.png",
        f"Page {other}/comparison-1.html",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [70, 80])
def test_numbers_stay_with_their_units_in_a_terminal(tmp_path, columns, importer):
    runs = [make_run(tmp_path / "a_long_name_of_a_run" / name, GRPO) for name in "01"]
    paths = [str(path) for path in runs]
    lines = shown_in_terminal(importer, "report", *paths, cwd=tmp_path, columns=columns)
    texts = "\n".join(lines)
    assert texts.count("2 min 3 s") == texts.count("4.0 k") == texts.count("0.250 → 0.875") == 2


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such run directory"):
        report([tmp_path / "nowhere"])


def test_the_parent_of_runs_names_its_runs(tmp_path):
    make_run(tmp_path / "grpo" / "0", GRPO)
    make_run(tmp_path / "grpo" / "1", GRPO)
    with pytest.raises(ValueError, match=r"Did you mean .*grpo/0, .*grpo/1\?"):
        load_runs([tmp_path / "grpo"])


def test_a_directory_without_anything_of_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not the directory of a run: it has no metrics.csv"):
        report([tmp_path])


def test_a_wrong_directory_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert __main__.main(["report", str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "no such run directory" in line


def test_a_limit_counts_for_the_summary_too(tmp_path, capsys):
    report([make_run(tmp_path / "grpo" / "0", GRPO)], read_up_to=2)
    assert shown(capsys)[1] == "grpo/0 2 1 min 2 s 4.0 k 0.250 0.500 → 0.750"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--steps", "0"], "--steps must be >= 1, got 0. Set --steps."),
        (["--steps", "many"], "--steps: invalid int value: 'many'. See lit-grpo report --help."),
        (["--every", "0", "--follow"], "--every must be positive, got 0.0. Set --every."),
        (["--live"], "unrecognized arguments: --live. See lit-grpo report --help."),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(tmp_path, capsys, options, expected):
    run = make_run(tmp_path / "grpo" / "0", GRPO)
    assert __main__.main(["report", str(run), *options]) == 2
    assert capsys.readouterr().err == f"error: {expected}\n"


def test_a_run_that_cannot_be_written_is_one_line(tmp_path, capsys):
    run = make_run(tmp_path / "grpo" / "0", GRPO)
    (run / "report.html").mkdir()
    assert __main__.main(["report", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: a report is written into its run, and {run}/report.html cannot")


def test_a_run_that_has_ended_is_followed_to_its_end(tmp_path, capsys):
    run = make_run(tmp_path / "grpo" / "0", GRPO)
    assert __main__.main(["report", str(run), "--follow"]) == 0
    assert f"Page {run}/report.html" in shown(capsys)
    assert "location.reload" in (run / "report.html").read_text()
    assert '"reloadSeconds":null' in (run / "report.html").read_text()


def follow_live(run: Path, root: Path) -> tuple[Popen[str], Popen[str]]:
    """Start a process that holds the lock of a run, and a report that follows it."""
    holder = start([sys.executable, "-c", HOLD, str(run)])
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    follower = start([*LIT_GRPO, "report", str(run), "--follow", "--every", "0.1"], root)
    return holder, follower


def wait_for(text: str, page: Path) -> None:
    deadline = time.monotonic() + 200
    while not (page.exists() and text in page.read_text()):
        assert time.monotonic() < deadline, f"{text!r} is not in {page}"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_live_run_is_followed_through_half_written_files_until_it_ends(tmp_path):
    run = make_run(tmp_path / "grpo" / "0", "", "completions")
    page = run / "report.html"
    holder, follower = follow_live(run, tmp_path)
    try:
        wait_for("it has not finished its first step", page)
        (run / "metrics.csv").write_text("step,seconds,reward/mean\n0,1.0,0.5\n1,2.0,0.")
        (run / "events.jsonl").write_text('{"time": "2026-11-23T16:05:01", "step": 0, "ki')
        (run / "completions" / "step_000000.parquet").write_bytes(b"PAR1")
        wait_for('"y":[0.5]', page)
        assert '"reloadSeconds":0.1' in page.read_text()
        with (run / "metrics.csv").open("a") as file:
            file.write("75\n")
        wait_for('"y":[0.5,0.75]', page)
        kill_group(holder)
        holder.wait()
        said, error = follower.communicate(timeout=200)
    finally:
        kill_group(holder)
        kill_group(follower)
    assert (follower.returncode, error) == (0, "")
    assert '"reloadSeconds":null' in page.read_text()
    assert (run / "curves.png").exists()
    assert str(page) in said


@pytest.mark.slow
def test_ctrl_c_ends_a_report_that_follows_with_a_last_page(tmp_path):
    run = make_run(tmp_path / "grpo" / "0", GRPO)
    holder, follower = follow_live(run, tmp_path)
    try:
        wait_for('"reloadSeconds":0.1', run / "report.html")
        follower.send_signal(signal.SIGINT)
        _, error = follower.communicate(timeout=200)
    finally:
        kill_group(holder)
        kill_group(follower)
    assert (follower.returncode, error) == (0, "")
    assert '"reloadSeconds":null' in (run / "report.html").read_text()


SMALL_DISK = (
    "mount -t tmpfs -o size=200k tmpfs disk && cp -r runs disk && "
    '"$@"; code=$?; cp -r disk/runs after; exit $code'
)


@pytest.mark.slow
def test_a_full_disk_is_said_and_leaves_the_files_of_an_earlier_report(tmp_path):
    namespace = ["unshare", "--map-root-user", "--mount"]
    if not can_run([*namespace, "true"]):
        pytest.skip("this system makes no namespaces for users")
    (tmp_path / "disk").mkdir()
    before = make_run(tmp_path / "runs", WARM_UP)
    (before / "report.html").write_text("earlier")
    (before / "full").write_bytes(b"x" * 190_000)
    words = [*namespace, "sh", "-c", SMALL_DISK, "sh", *LIT_GRPO, "report", "disk/runs"]
    said = run_program(words, tmp_path, exit_code=2).stderr
    assert said == (
        "error: disk/runs/report.html cannot be written: the disk is full; an earlier page is "
        "kept. Free some space, and run the same command again.\n"
    )
    after = tmp_path / "after"
    assert sorted(one.name for one in after.iterdir()) == ["full", "metrics.csv", "report.html"]
    assert (after / "report.html").read_text() == "earlier"
