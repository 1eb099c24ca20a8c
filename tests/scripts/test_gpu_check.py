"""The GPU check runs without a GPU and without most packages, and notices what is wrong."""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from closed_machine import make_environment
from paths import ROOT
from processes import run_program

from lit_grpo.policy.packed import block_attention

aims, equality, findings, parts, report, runner, sizes, steps, utilisation, variants = (
    importlib.import_module(f"_gpu_check.{name}")
    for name in (
        *("aims", "equality", "findings", "parts", "report", "runner"),
        *("sizes", "steps", "utilisation", "variants"),
    )
)
Device = importlib.import_module("_gpu_check.device").Device
SCRIPT = str(ROOT / "scripts" / "gpu_check.py")


@pytest.fixture
def recorder(tmp_path):
    return findings.Recorder("part", tmp_path / "records.jsonl", time.monotonic() + 60)


def statuses(recorder) -> dict[str, str]:
    return {one["name"]: one["status"] for one in findings.read(recorder.path)}


def run(python: str, *words: str, directory: Path, exit_code: int = 0) -> dict:
    """Run the command in an empty directory, and return what it found."""
    command = [python, SCRIPT, "--minutes", "20", *words]
    output = run_program(command, directory, exit_code=exit_code, seconds=1200).stdout
    assert output.startswith("NO GPU: this runs a tiny model on the CPU.")
    return json.loads((directory / "gpu_check.json").read_text())


def by_status(found: dict) -> dict[str, set[tuple[str, str]]]:
    names: dict[str, set[tuple[str, str]]] = {"passed": set(), "failed": set(), "skipped": set()}
    for one in found["records"]:
        if one["kind"] == "finding":
            names[one["status"]].add((one["part"], one["name"]))
    return names


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_it_runs_without_a_gpu_and_without_packages_that_a_closed_machine_lacks(tmp_path):
    python = make_environment(tmp_path / "environment")
    absent = ("jsonargparse", "omegaconf", "datasets", "trl", "wandb", "plotly", "openai")
    lacking = f"import importlib.util as u; assert not any(map(u.find_spec, {absent}))"
    run_program([python, "-c", lacking])
    found = run(python, directory=tmp_path)
    names = by_status(found)
    assert not names["failed"]
    resumed = ("tests", "a resumed training"), ("trl", "beside TRL")
    assert names["skipped"] == {*resumed, *(("variants", one) for one in variants.PACKAGES)}
    assert ("tests", parts.ATTENTION_TESTS) in names["passed"]
    ended = {part for part, _ in names["passed"]}
    assert ended == {"machine", "tests", "equality", "steps", "variants"}
    varied = [name for part, name in names["passed"] if part == "variants"]
    assert len(varied) == 2 * (len(variants.VARIANTS) - len(variants.PACKAGES)) == 10
    figures = {one["name"] for one in found["records"] if one["kind"] == "figure"}
    assert {"generation", "update", "waits, update", "MFU of the update"} <= figures
    aims = "MFU of the update", "engine alone", "bare update", "update / bare update"
    assert {f"larger model: {one}" for one in aims} <= figures
    titles = [one["title"] for one in found["records"] if one["kind"] == "table"]
    assert any("operators" in title for title in titles)


@pytest.mark.slow
def test_it_runs_on_the_pretend_device_and_says_where_the_host_waits(tmp_path):
    words = ["--device", "pretend", "--only", "equality", "steps"]
    found = run(sys.executable, *words, directory=tmp_path)
    assert not by_status(found)["failed"]
    figures = {one["name"]: one["value"] for one in found["records"] if one["kind"] == "figure"}
    assert figures["waits, update"] == 1  # whether the gradient is finite
    assert figures["waits, generation"] <= sizes.TINY.workload.max_tokens + 3
    alone = figures["larger model: engine alone"] + figures["larger model: bare update"]
    ratio = figures["larger model: step / (engine alone + bare update)"]
    # Completions of this vocabulary may end early, where the engine's rate counts.
    assert ratio >= figures["larger model: step"] / alone > 0
    (table,) = [one for one in found["records"] if one.get("title", "").startswith("where")]
    assert ["update", "distributed/gradients.py take", "1"] in table["rows"]


@pytest.mark.slow
def test_a_test_file_passes_or_is_told_with_its_failed_tests(recorder, tmp_path):
    path = tmp_path / "test_it.py"
    for code, status in (
        ("assert True", "passed"),
        ("assert False", "failed"),
        ("import lacking", "skipped"),
    ):
        path.write_text(f"def test_it():\n    {code}\n")
        parts.run_tests(recorder, str(path))
        assert statuses(recorder) == {str(path): status}
    _, failed, skipped = [one["detail"] for one in findings.read(recorder.path)]
    assert "test_it.py::test_it" in failed
    assert skipped == "lacking is not installed."


def test_a_part_without_time_is_skipped_with_the_reason(capsys):
    records = runner.run_parts(["machine", "steps"], ["--device", "cpu"], minutes=0.1)
    assert [one["status"] for one in records] == ["skipped"] * 2
    assert "1 s of 0.1 minutes were left" in records[0]["detail"]
    assert not report.failures(records)


@pytest.mark.slow
def test_a_part_that_crashes_or_hangs_has_failed_and_the_others_run(monkeypatch, tmp_path):
    program = tmp_path / "part.py"
    program.write_text(
        "import sys, time, os\n"
        "name = sys.argv[sys.argv.index('--part') + 1]\n"
        "path = sys.argv[sys.argv.index('--records') + 1]\n"
        'record = \'{"kind": "finding", "status": "passed", "name": "it began"}\\n\'\n'
        "open(path, 'a').write(record)\n"
        "if name == 'tests': os.abort()\n"
        "if name == 'equality': time.sleep(60)\n"
    )
    monkeypatch.setattr(runner, "SCRIPT", program)
    monkeypatch.setitem(runner.PARTS, "equality", runner.Times(least=1, most=2))
    records = runner.run_parts(["machine", "tests", "equality", "steps"], [], minutes=8)
    assert [one["name"] for one in records].count("it began") == 4
    ends = {one["name"]: one["detail"] for one in report.failures(records)}
    assert ends.keys() == {"the end of the part tests", "the end of the part equality"}
    assert "exited with -6" in ends["the end of the part tests"]
    assert "did not end within 2 s" in ends["the end of the part equality"]


@pytest.mark.slow
def test_a_failed_check_is_the_exit_code(tmp_path):
    words = ["--device", "cuda", "--tiny", "--only", "machine"]  # there is none here
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    result = run_program([sys.executable, SCRIPT, *words], tmp_path, exit_code=1)
    assert "the part machine" in result.stdout


def test_the_steps_of_both_models_have_time_however_long_the_parts_before_them_take():
    before = list(runner.PARTS)[: list(runner.PARTS).index("steps")]
    taken = sum(runner.PARTS[name].most for name in before)
    left = 60 * runner.MINUTES - runner.SHUTDOWN_SECONDS - taken
    assert before == ["machine", "tests", "equality"]
    assert left >= runner.PARTS["steps"].least + aims.LEAST_SECONDS


def test_equality_passes_on_a_cpu(recorder):
    equality.check_equality(recorder, Device("cpu"), sizes.TINY)
    found = statuses(recorder)
    assert len(found) == 9
    assert set(found.values()) == {"passed"}


def test_equality_notices_a_wrong_mask_of_packed_attention(recorder, monkeypatch):
    made = block_attention._make_mask

    def blind(*arguments):
        return torch.zeros_like(made(*arguments))  # which hides nothing

    policy = sizes.TINY.loaded_policy()
    monkeypatch.setattr(sizes.CheckSize, "loaded_policy", lambda self: policy)
    monkeypatch.setattr(block_attention, "_make_mask", blind)
    equality.check_equality(recorder, Device("cpu"), sizes.TINY)
    failed = {name for name, status in statuses(recorder).items() if status == "failed"}
    assert "float32: packed against padded, largest difference of a logprob" in failed
    assert "bfloat16: error of packed against error of padded" in failed


def test_not_a_number_fails_and_an_exception_is_recorded(recorder):
    recorder.decide("a value", math.nan, 1.0, "why")
    with recorder.attempt("an attempt"):
        raise RuntimeError("no such kernel")
    recorder.figure("a figure", math.inf, "s")
    value, attempt, figure = findings.read(recorder.path)
    assert (value["status"], attempt["status"], figure["value"]) == ("failed", "failed", None)
    assert "RuntimeError: no such kernel" in attempt["detail"]


def test_records_before_a_crash_in_the_middle_of_a_line_are_read(tmp_path):
    path = tmp_path / "records"
    path.write_text('{"kind": "finding"}\n{"kind": "fig')
    assert findings.read(path) == [{"kind": "finding"}]
    assert findings.read(tmp_path / "absent") == []


def test_the_update_counts_a_prompt_once_and_the_head_on_completions():
    size = sizes.TINY.model
    # Two layers: queries and outputs 32 x 32, keys and values 32 x 16, three of 32 x 64.
    assert utilisation.layer_parameters(size) == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    head = 512 * 32
    expected = 6 * (utilisation.layer_parameters(size) * 15 + head * 5)
    assert utilisation.update_flop(size, 10, 5) == expected
    assert utilisation.peak_tflops("NVIDIA H200") == 790
    assert utilisation.peak_tflops("an unknown one") is None


def test_the_models_have_the_sizes_of_qwen():
    for size, number in ((sizes.FULL, 494e6), (sizes.FULL.larger, 1544e6)):
        layers = utilisation.layer_parameters(size.model)
        head = size.model.vocab_size * size.model.hidden_size
        assert layers + head == pytest.approx(number, rel=0.002)


def test_the_larger_model_is_skipped_without_time_on_a_gpu(tmp_path):
    recorder = findings.Recorder("steps", tmp_path / "records", time.monotonic() + 60)
    aims.check_aims(recorder, Device("cuda"), sizes.FULL)
    (found,) = findings.read(recorder.path)
    assert found["status"] == "skipped"
    assert "60 s were left" in found["detail"] or "59" in found["detail"]


def test_a_step_is_compared_with_as_many_tokens_of_the_engine_alone(recorder, monkeypatch):
    seconds = iter([8.0, 3.0])
    monkeypatch.setattr(Device, "median_seconds", lambda *_, **__: next(seconds))
    size = sizes.TINY
    full = size.workload.num_rows * size.workload.max_tokens
    step = steps.Step(seconds=14.0, num_completion_tokens=full // 2)
    step.stages["update"] = 4.5
    aims.record_bare_parts(recorder, [step], Device("cpu"), size, size.loaded_policy())
    figures = {one["name"]: one["value"] for one in findings.read(recorder.path)}
    assert figures["larger model: update / bare update"] == 1.5
    assert figures["larger model: step / (engine alone + bare update)"] == 14 / (8 / 2 + 3)


def recorded_beside_trl(monkeypatch, recorder, compare_steps, **settings) -> list[dict]:
    """Return what the comparison records with another measurement of a workload."""
    comparison = pytest.importorskip("_gpu_check.comparison", exc_type=ImportError)
    monkeypatch.setattr(comparison, "compare_steps", compare_steps)
    comparison.compare(recorder, **settings)
    return findings.read(recorder.path)


def test_beside_trl_each_figure_is_a_ratio_with_what_it_was_made_from(recorder, monkeypatch):
    def compare_steps(workload, size, repetitions):
        assert len(workload.micro_batch_rows) == 1
        settings = {"case": workload.name, "unit": "s", "target": None}
        yield Result(figure="step", against="TRL", ours=1.0, other=4.0, **settings)
        yield Result(figure="update", against="a bare one", ours=3.0, other=2.0, **settings)

    Result = importlib.import_module("_benchmark.results").Result
    found = recorded_beside_trl(monkeypatch, recorder, compare_steps, is_tiny=True)
    assert [(one["name"], one["value"], one["unit"], one["how"]) for one in found] == [
        ("tiny short_equal: step against TRL", 0.25, "ratio", "1.000 s against 4.000"),
        ("tiny short_equal: update against a bare one", 1.5, "ratio", "3.000 s against 2.000"),
    ]


def test_beside_trl_a_failed_workload_is_recorded_and_the_next_ones_run(recorder, monkeypatch):
    tried = []

    def compare_steps(workload, size, repetitions):
        tried.append(workload.name)
        raise RuntimeError("out of memory")

    late = findings.Recorder("trl", recorder.path, time.monotonic() + 1000)
    found = recorded_beside_trl(monkeypatch, late, compare_steps, is_tiny=False)
    assert tried == ["short_equal", "short_varied", "long_shared"] * 2
    assert [one["status"] for one in found] == ["failed"] * 6
    assert found[0]["name"] == "beside TRL, 0.5b short_equal"
    assert "RuntimeError: out of memory" in found[0]["detail"]


def test_beside_trl_workloads_without_time_are_skipped(recorder, monkeypatch):
    found = recorded_beside_trl(monkeypatch, recorder, compare_steps=None, is_tiny=False)
    assert [one["status"] for one in found] == ["skipped"] * 6
    assert found[-1]["name"] == "beside TRL, 1.5b long_shared"
    assert found[0]["detail"].endswith(" s were left.")


def test_markdown_has_every_record():
    records = [
        findings.finding("steps", "it | trains", "passed", "20 steps"),
        {"kind": "figure", "part": "steps", "name": "update", "value": 1.5, "unit": "s", "how": ""},
        {"kind": "table", "part": "steps", "title": "profile", "head": ["a"], "rows": [["mm"]]},
    ]
    found = {"command": "python x", "date": "2026-01-01", "what": "tiny", "records": records}
    text = report.markdown(found)
    for line in ("`python x` on 2026-01-01: tiny", r"| steps | it \| trains | passed | 20 steps |",
                 "| steps | update | 1.5 | s |  |", "| mm |"):  # fmt: skip
        assert line in text
