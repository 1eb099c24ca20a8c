"""``lit-grpo rewards`` on real, tiny policies, with rewards whose values are known."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from cli_base import BASE
from judge_server import PRICE, REPLY_COST, JudgeServer, first_line_is, judges
from terminal import shown_in_terminal
from tiny import completion, prompt

from lit_grpo.__main__ import main
from lit_grpo.cli.rewards.trial import Trial, in_group_deviation, projected_seconds, summary_table
from lit_grpo.judge import Judge, Limits
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rewards import JudgeReward, MathReward, Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import Measurements, Score

MINE = """
import asyncio, os, signal
from lit_grpo.rewards import Reward
from lit_grpo.types import Score
from small_runs import ShareOfLowBytes

class Low(ShareOfLowBytes):
    pass

class One(Reward):
    def score(self, prompt, completion):
        return 1.0

class Broken(Reward):
    def score(self, prompt, completion):
        raise RuntimeError("the sandbox is gone")

class Buggy(Reward):
    def score(self, prompt, completion):
        return prompt.columns["keywords"] in completion.text

class Abstaining(Reward):
    def score(self, prompt, completion):
        return None

class BrokenOnce(Reward):
    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        return 1 / (self.calls - 1) if self.calls < 4 else 0.0

class BuggyOnMost(Reward):
    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        return float("1" if self.calls % 4 == 1 else "a word")

class DownForMost(Reward):
    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        if self.calls % 4 != 1:
            raise ConnectionError("the service is gone")
        return 1.0

class BrokenOrAbstaining(Broken):
    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        return super().score(prompt, completion) if self.calls % 2 else None

class MentionsSomeOfTheKeywords(BrokenOnce):
    pass

class Slow(Reward):
    def score(self, prompt, completion):
        return Score(value=1.0, seconds=0.05)

class Interrupting(Reward):
    sent = False

    async def score(self, prompt, completion):
        if not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(600)
"""


class Constant(Reward):
    def score(self, prompt, completion):
        return 1.0


@pytest.fixture(autouse=True)
def here(here, add_module) -> Path:
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    add_module("trial_rewards", MINE)
    return here


def trial(*arguments: str, reward: str = "trial_rewards.Low") -> int:
    return main(["rewards", "--config=base.yaml", f"--model.rewards=[{reward}]", *arguments])


def cells(shown: str, reward: str) -> list[str]:
    return next(line for line in shown.splitlines() if line.startswith(reward)).split()


def test_the_trial_scores_what_the_first_step_would_and_starts_no_run(here, capsys):
    assert trial("--n=2") == 0
    shown = capsys.readouterr().out
    frame = pd.read_parquet("runs/base/rewards.parquet")
    assert [path.name for path in Path("runs/base").iterdir()] == ["rewards.parquet"]
    assert "4 completions of 2 prompts" in shown
    assert shown.splitlines()[-1] == "Completions: runs/base/rewards.parquet"
    assert cells(shown, "low")[1] == f"{frame['score/low'].mean():.3f}"
    deviation = frame.groupby("prompt_id")["score/low"].std().mean()
    assert cells(shown, "low")[2] == f"{deviation:.3f}"
    assert cells(shown, "low")[3:5] == ["ok", "100%"]
    assert (frame["seconds/low"] > 0).all()
    main(["fit", "--config=base.yaml", "--model.rewards=[trial_rewards.Low]", "--run_dir=run"])
    step = pd.read_parquet("run/completions/step_000000.parquet")
    columns = ["prompt", "completion", "score/low", "reward"]
    pd.testing.assert_frame_equal(frame[columns], step[columns])
    assert set(frame.columns) == set(step.columns)


def test_a_second_trial_keeps_the_first_one_s_table(here):
    assert trial("--n=1") == trial("--n=1") == 0
    names = sorted(path.name for path in Path("runs/base").iterdir())
    assert names == ["rewards-1.parquet", "rewards.parquet"]


def test_a_checkpoint_is_sampled_from_if_one_is_given(here):
    sgd = "--model.optimizer={class_path: SGD, init_args: {lr: 100.0}}"
    low = "--model.rewards=[trial_rewards.Low]"
    settings = [low, "--model.group_size=4", sgd, "--run_dir=run"]
    assert main(["fit", "--config=base.yaml", *settings]) == 0
    assert trial(*settings[1:], "--ckpt_path=last", "--n=4") == 0
    assert trial(*settings[1:], "--n=4") == 0
    trained, untrained = (pd.read_parquet(f"run/rewards{n}.parquet") for n in ("", "-1"))
    assert trained["prompt"].tolist() == untrained["prompt"].tolist()
    assert trained["completion"].tolist() != untrained["completion"].tolist()


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("MathReward", "There is no signal: every reward is exactly 0."),
        ("trial_rewards.One", "All advantages are 0: inside each group all rewards are equal"),
        (
            "trial_rewards.Abstaining",
            "There is no signal: no row is valid: 100% of the scores of reward 'abstaining' ended "
            "as abstain.",
        ),
    ],
)
def test_a_missing_signal_is_explained(reward, words, capsys):
    assert trial("--n=2", reward=reward) == 0
    assert words in capsys.readouterr().out


def test_a_reward_that_fails_on_every_completion_is_one_line_and_exit_code_1(capsys):
    assert trial("--n=2", reward="trial_rewards.Low,trial_rewards.Broken") == 1
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1] == (
        "error: a reward failed on every completion: 100% of the scores of reward 'broken' ended "
        "as error, for instance: RuntimeError: the sandbox is gone (trial_rewards.py, line 16). "
        "Fix the exception, or check its service and credentials."
    )
    assert shown.out.splitlines()[-1] == "Completions: runs/base/rewards.parquet"
    assert cells(shown.out, "broken")[3:5] == ["error", "100%"]
    assert "sandbox" not in shown.out


def test_a_bug_on_every_completion_is_shown_with_its_row_and_the_users_line(capsys):
    assert trial("--n=2", reward="trial_rewards.Buggy") == 1
    captured = capsys.readouterr()
    *lines, last = captured.err.splitlines()
    shown = "\n".join(lines)
    assert "with the columns prompt, answer, left, right" in shown
    assert "trial_rewards.py" in shown
    assert (captured.out + captured.err).count("KeyError: 'keywords'") == 1
    assert last == "error: a reward failed on every completion: 'buggy', see above."


@pytest.mark.parametrize(
    ("reward", "exit_code"),
    [("BrokenOnce", 0), ("BrokenOrAbstaining", 1), ("Abstaining", 0)],
)
def test_a_value_or_only_abstaining_is_no_failure(reward, exit_code):
    assert trial("--n=2", reward=f"trial_rewards.{reward}") == exit_code


def test_a_reward_that_returns_none_beside_one_with_values_is_named(capsys):
    assert trial("--n=2", reward="trial_rewards.Low, trial_rewards.Abstaining") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Reward 'abstaining' gave none of" in said
    assert "check whether a return is missing" in said


def test_a_bug_on_some_rows_is_shown_with_its_line(capsys):
    assert trial("--n=2", reward="trial_rewards.BrokenOnce") == 0
    captured = capsys.readouterr()
    shown = captured.err
    assert "reward 'broken_once' has a bug on 25% of the rows. Row addition:" in shown
    assert 'trial_rewards.py", line' in shown
    assert (captured.out + shown).count("ZeroDivisionError") == 1


@pytest.mark.parametrize(
    ("reward", "does", "why"),
    [
        ("BuggyOnMost", "stop", "could not convert string to float"),
        ("DownForMost", "pause, retry and in the end stop", "the service is gone"),
    ],
)
def test_what_a_run_does_with_so_many_failures_is_the_last_line_and_exit_code_1(
    reward, does, why, capsys
):
    assert trial("--n=2", reward=f"trial_rewards.{reward}") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        f"error: A run would {does} at such a step: 3 of the 4 rows (75%) have no score, and "
        "model.outage.max_absent_fraction is 0.5. 75% of the scores of reward"
    )
    assert why in last
    assert "equal parts" not in last  # without a mixture
    allowed = "--model.outage.max_absent_fraction=0.75"
    assert trial("--n=2", allowed, reward=f"trial_rewards.{reward}") == 0
    assert trial("--n=2", reward=f"trial_rewards.One,{{class_path: trial_rewards.{reward}, "
                 "init_args: {weight: 0}}") == 0  # fmt: skip


def mixture_of(*sources: str) -> str:
    """Return the argument for data of which a step has 15 prompts of the first source."""
    one = {"class_path": "AdditionData", "init_args": {"num_digits": 1, "validation_size": 2}}
    weights = [15.0, *[1.0 for _ in sources[1:]]]
    given = {name: {"data": one, "weight": n} for name, n in zip(sources, weights, strict=True)}
    settings = {"prompts_per_step": 16, "sources": given}
    return f"--data={json.dumps({'class_path': 'MixtureData', 'init_args': settings})}"


OF_SECOND = "{class_path: trial_rewards.Buggy, init_args: {only_sources: [second]}}"


def test_a_source_of_which_a_step_has_few_prompts_is_tried_too(capsys):
    data = mixture_of("first", "second")
    assert trial("--n=2", data, reward=f"trial_rewards.Low,{OF_SECOND}") == 1
    captured = capsys.readouterr()
    assert "reward 'buggy' has a bug on 100% of the rows." in captured.err
    assert "was tried" not in captured.out
    assert sorted(pd.read_parquet("runs/base/rewards.parquet")["source"]) == (
        ["first"] * 2 + ["second"] * 2
    )


def test_a_step_is_projected_from_the_shares_of_its_sources_not_of_the_trial(capsys):
    slow = "{class_path: trial_rewards.Slow, init_args: {only_sources: [second]}}"
    assert trial("--n=2", mixture_of("first", "second"), reward=f"trial_rewards.Low,{slow}") == 0
    # 2 of the 32 completions of a step are of this source, and 2 of 4 of the trial.
    assert cells(capsys.readouterr().out, "slow")[-3:-1] == ["0.10", "s"]


def test_a_mistyped_source_is_refused_with_the_one_that_was_meant(capsys):
    mistyped = OF_SECOND.replace("second", "secund")
    data = mixture_of("first", "second")
    assert trial("--n=2", data, reward=f"trial_rewards.Low,{mistyped}") == 2
    assert "(first, second), got 'secund'" in (said := capsys.readouterr().err)
    assert said.endswith(" Did you mean second?\n")


def test_a_verdict_on_a_step_says_that_its_sources_have_other_parts_than_the_trial(capsys):
    data = mixture_of("first", "second")
    assert trial("--n=2", data, reward="trial_rewards.DownForMost") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "A run would pause, retry and in the end stop at such a step: 3 of the 4 rows" in last
    assert "equal parts, and a step of the run has 94% of first, 6% of second: there the" in last


def test_sources_and_rewards_that_too_few_prompts_leave_out_are_named(capsys):
    data = mixture_of("first", "second", "third")
    assert trial("--n=1", data, reward=f"trial_rewards.Low,{OF_SECOND}") == 0
    shown = capsys.readouterr().out
    assert cells(shown, "buggy") == ["buggy", "–", "–", "not", "tried", *["–"] * 4]
    lines = shown.splitlines()
    left_out = "No prompt of second, third was tried: --n is less than the number of sources. Set "
    assert left_out + "--n=3 or more." in lines
    assert "buggy was not tried: it scores second only." in lines


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_numbers_stay_with_their_units_in_a_terminal(here, columns, importer):
    rewards = "--model.rewards=[trial_rewards.Low,trial_rewards.MentionsSomeOfTheKeywords]"
    arguments = ["rewards", "--config=base.yaml", rewards, "--n=2"]
    shown = shown_in_terminal(importer, *arguments, cwd=here, columns=columns)
    start = next(n for n, line in enumerate(shown) if line.startswith("reward  "))
    header, low = shown[start : start + 2]
    assert header.split()[-5:] == ["p50", "p95", "per", "step", "$/step"]
    assert re.fullmatch(r"low +[\d.]+ +[\d.]+ +ok 100%( +(< )?[\d.]+ m?s){3} +– *", low)


def test_the_trainer_s_precision_is_used(here, capsys):
    Path("trial_engine.py").write_text(
        "import torch\n"
        "from lit_grpo.rollout import HFEngine\n"
        "class Telling(HFEngine):\n"
        "    def generate(self, *args, **kwargs):\n"
        "        print('bfloat16' if torch.is_autocast_enabled('cpu') else 'float32')\n"
        "        return super().generate(*args, **kwargs)\n"
    )
    for precision, dtype in (("32-true", "float32"), ("bf16-mixed", "bfloat16")):
        engine = "--model.engine.class_path=trial_engine.Telling"
        assert trial("--n=1", engine, f"--trainer.precision={precision}") == 0
        assert capsys.readouterr().out.startswith(dtype)


def test_data_that_a_reward_refuses_is_refused_before_the_policy_is_loaded(here, capsys):
    lines = [
        '{"prompt": "1+1=", "answer": "2"}',
        '{"prompt": "Why?", "answer": "because people like it"}',
    ]
    Path("rows.jsonl").write_text("\n".join(lines))
    byte_tokenizer().save_pretrained("tokenizer")
    data = {"class_path": "PromptData", "init_args": {"train": "rows.jsonl", "prompts_per_step": 1}}
    model = BASE["model"] | {"policy": {"path": "./tokenizer"}}
    Path("base.yaml").write_text(yaml.safe_dump(BASE | {"data": data, "model": model}))
    assert trial("--n=1", reward="MathReward") == 2
    assert "every gold answer must be a number" in capsys.readouterr().err


def test_truncation_is_shown(capsys):
    assert trial("--n=1", "--model.sampling.max_tokens=2") == 0
    assert "100% cut off at model.sampling.max_tokens 2; length 2.0" in capsys.readouterr().out


def test_the_cost_of_a_step_follows_from_that_of_the_trial(here, capsys):
    with JudgeServer(judges("answer", first_line_is("2"))) as server:
        judge = {"model": "m", "base_url": f"{server.url}/v1", "auth": "none"}
        judge["price"] = {"prompt": PRICE.prompt, "completion": PRICE.completion}
        rewards = [{"class_path": "JudgeReward", "init_args": {"judge": judge}}]
        Path("judge.yaml").write_text(yaml.safe_dump({"model": {"rewards": rewards}}))
        configs = ["--config=base.yaml", "--config=judge.yaml"]
        assert main(["rewards", *configs, "--n=1", "--run_dir=trial"]) == 0
        assert len(server.requests) == 3
    frame = pd.read_parquet("trial/rewards.parquet")
    assert frame["cost/judge"].tolist() == pytest.approx([REPLY_COST] * 2)
    assert cells(capsys.readouterr().out, "judge")[-1] == "0.0008"  # 2 prompts of 2 completions


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--n=0"], "n must be >= 1, got 0"),
        (["--n=many"], "n: expected int, got many"),
        (["--last=3"], "last: no such key"),
        (["--ckpt_path=nowhere.ckpt"], "nowhere.ckpt: no such checkpoint"),
    ],
)
def test_bad_input_is_one_line(arguments, line, capsys):
    assert trial(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}")
    assert error.count("\n") == 1


def test_a_reward_that_raises_ends_the_trial_with_its_message(capsys):
    broken = "{class_path: trial_rewards.Broken, init_args: {on_error: raise}}"
    assert trial("--n=1", reward=broken) == 2
    assert "error: reward broken failed on prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("max_tokens", "words"),
    [
        (8, "max_tokens must be below the model's 8 positions"),
        (7, "the model has only 8 positions for both. Lower model.sampling.max_tokens to at most"),
    ],
)
def test_prompts_or_completions_without_positions_are_refused_as_by_fit(max_tokens, words, capsys):
    few = [
        "--model.policy.architecture.max_position_embeddings=8",
        f"--model.sampling.max_tokens={max_tokens}",
    ]
    assert trial("--n=1", *few) == 2
    assert words in capsys.readouterr().err
    assert main(["fit", "--config=base.yaml", "--model.rewards=[trial_rewards.Low]", *few]) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs/base/rewards.parquet").exists()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_trial_with_130(here, capsys):
    assert trial(reward="trial_rewards.Interrupting") == 130
    assert capsys.readouterr().err == "error: interrupted.\n"
    assert not Path("runs").exists()


def judged(**limits: float) -> JudgeReward:
    return JudgeReward(Judge(model="m", auth="none", limits=Limits(**limits)))


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ({"max_concurrency": 4}, 64 * 2 / 4),
        ({"max_concurrency": 4, "requests_per_minute": 30}, 64 / 30 * 60),
        ({"max_concurrency": 4, "tokens_per_minute": 1000}, 64 * 110 / 1000 * 60),
        ({"max_concurrency": 1000}, 2.0),
    ],
)
def test_the_projection_of_a_judge_follows_its_limits_not_the_waits_of_the_trial(limits, seconds):
    measurements = Measurements(
        totals={"judge/prompt_tokens": 800, "judge/completion_tokens": 80},
        samples={"timing/judge_api_latency_s": [2.0] * 8},
    )
    waited = [Score(value=1.0, seconds=50.0)] * 8
    assert projected_seconds(judged(**limits), waited, measurements, 64) == pytest.approx(seconds)


def test_a_sync_reward_scores_sequentially_and_an_async_one_at_the_rate_of_the_trial():
    scores = [Score(value=1.0, seconds=float(seconds)) for seconds in range(21)]
    assert projected_seconds(Constant(), scores, Measurements(), 84) == 4 * 210.0
    assert (
        projected_seconds(MathReward(), scores, Measurements(), 84) == 4 * 19.0
    )  # the 95th percentile


def test_a_deviation_is_the_mean_over_groups_with_two_values():
    nan = float("nan")
    values = torch.tensor([[0.0, 1.0], [1.0, 1.0], [nan, 5.0]], dtype=torch.float64)
    assert in_group_deviation(values) == pytest.approx((0.5**0.5 + 0) / 2)
    assert in_group_deviation(values[2:]) is None


class Slow(Reward):
    def score(self, prompt, completion):
        return Score(value=1.0, seconds=0.2)


def test_outcomes_and_seconds_are_those_of_the_sources_that_a_reward_is_for():
    reward = Slow(only_sources=["sums"])
    prompts = [replace(prompt(id=source), source=source) for source in ("sums", "a", "b")]
    with RewardSuite([reward]) as suite:
        groups = [[completion([1]), completion([2])]] * 3
        trial = Trial(
            rollouts=suite.score(prompts, groups),
            generation_seconds=1.0,
            measurements={reward.name: Measurements()},
        )
    cells = [[*column.cells][0] for column in summary_table(trial, [reward], 6).columns]
    assert cells[3] == "ok 100%"
    assert cells[4] == "0.20 s"
    # Of a step of 6, two as in the trial, or all where the source has the whole step.
    assert trial.num_scored(reward, 6) == 2
    assert replace(trial, shares={"sums": 1.0}).num_scored(reward, 6) == 6
