"""Two real processes take the step that one would take on all of their rollouts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import SUPPORT
from small_runs import start_policy, start_weights
from tiny import alone

from lit_grpo.types import TrainBatch

SCRIPT = """
import sys
import lightning as L
import torch
sys.path.insert(0, {tests!r})
from small_runs import Keep, PROMPTS, ShareOfLowBytes, make_module, make_trainer, weights
from lit_grpo.objective.advantages import AdvantageConfig
from lit_grpo.data.loader import PromptLoader
from lit_grpo.rewards import Reward

torch.set_num_threads(1)

class OnlySomeRanks(ShareOfLowBytes):
    '''The second rank's rewards are all lost.'''
    def score(self, prompt, completion):
        if {lost!r} and prompt.id in ("x", "22+3="):
            raise ConnectionError("lost")
        return super().score(prompt, completion)

module = make_module(
    rewards=[OnlySomeRanks()],
    advantage=AdvantageConfig(deviation="batch"),
    update={{"max_tokens_per_micro_batch": 60}},
)
trainer = make_trainer(keep := Keep(), devices=2, strategy="ddp")

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return PromptLoader(PROMPTS, 4, rank=trainer.global_rank, world_size=2, shuffle=False)

trainer.fit(module, Data())
(output,) = keep.outputs
torch.save(
    {{
        "batch": {{n: getattr(output["batch"], n) for n in output["batch"].__slots__}},
        "rewards": output["rollouts"].rewards,
        "weights": weights(module),
        "metrics": output["metrics"],
    }},
    f"rank{{trainer.global_rank}}.pt",
)
"""


def run(directory: Path, script: str, *arguments: str) -> list[dict]:
    """What the two ranks of a script wrote."""
    (directory / "run.py").write_text(script)
    result = subprocess.run(
        [sys.executable, "run.py", *arguments],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        start_new_session=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [torch.load(directory / f"rank{rank}.pt") for rank in (0, 1)]


REFILL = """
import sys
import lightning as L
import torch
sys.path.insert(0, {tests!r})
from small_runs import Keep, make_module, make_trainer, weights
from easy_prompts import EasyPromptsTeachNothing, prompts
from lit_grpo.data.loader import PromptLoader
from lit_grpo.objective import EntropyTerm, Objective

torch.set_num_threads(1)
module = make_module(
    rewards=[EasyPromptsTeachNothing()],
    dynamic_sampling_rounds=2,
    objective=Objective(
        aggregation="local_token",
        entropy=EntropyTerm(coef=0.01, target=100.0),
        top_entropy_fraction=0.5,
    ),
)
trainer = make_trainer(keep := Keep(), max_steps=2, devices=2, strategy="ddp")

class Data(L.LightningDataModule):
    def train_dataloader(self):
        # The first rank lacks two groups and then one, the second none.
        kinds = "eehh" "hehh" "hh" "hhhh" "hhhh"
        return PromptLoader(
            prompts(kinds), 4, rank=trainer.global_rank, world_size=2, shuffle=False
        )

trainer.fit(module, Data())
torch.save(
    {{
        "ids": [[g.prompt.id for g in output["rollouts"].groups] for output in keep.outputs],
        "weights": weights(module),
        "metrics": [output["metrics"] for output in keep.outputs],
        "entropy": [
            (output["batch"].loss_mask.sum(), output["batch"].entropy_mask.sum())
            for output in keep.outputs
        ],
    }},
    f"rank{{trainer.global_rank}}.pt",
)
"""


@pytest.mark.slow
def test_ranks_that_lack_unlike_numbers_of_groups_refill_together(tmp_path):
    ranks = run(tmp_path, REFILL.format(tests=str(SUPPORT)))
    assert ranks[0]["ids"] == [["hard4", "hard8"], ["hard10", "hard11"]]
    assert ranks[1]["ids"] == [["hard2", "hard3"], ["hard12", "hard13"]]
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    for name, weight in ranks[0]["weights"].items():
        assert torch.equal(weight, ranks[1]["weights"][name]), name
    metrics = ranks[0]["metrics"][0]
    assert metrics["dynamic_sampling/sampled_per_group"] == (4 + 2 + 1) / 4
    # The entropy's threshold is that of both ranks together.
    tokens, kept = (sum(int(rank["entropy"][0][i]) for rank in ranks) for i in (0, 1))
    assert kept / tokens == pytest.approx(0.5, abs=0.1)
    assert metrics["policy/masked_fraction"] == pytest.approx(1 - kept / tokens)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True], ids=["both-ranks", "one-rank-without-rewards"])
def test_two_ranks_take_the_step_of_the_union_of_their_rollouts(tmp_path, lost):
    ranks = run(tmp_path, SCRIPT.format(tests=str(SUPPORT), lost=lost))
    for name, weight in ranks[0]["weights"].items():
        assert torch.equal(weight, ranks[1]["weights"][name]), name
    assert ranks[0]["metrics"] == ranks[1]["metrics"]

    policy, before = start_policy(), start_weights()
    total, num_tokens, advantages = 0.0, 0, []
    for rank in ranks:
        batch = TrainBatch(**rank["batch"])
        num_tokens += int(batch.loss_mask.sum())
        advantages.append(batch.advantages)
        for n in range(batch.num_rows):
            if batch.loss_mask[n].any():
                total = total + batch.advantages[n] * alone(policy.model, batch, n)[0].sum()
    (-total / num_tokens).backward()
    for name, parameter in policy.model.named_parameters():
        step = before[name] - ranks[0]["weights"][name]
        torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=2e-6)

    # The deviation over the batch is that of both ranks together.
    rewards = torch.cat([rank["rewards"] for rank in ranks])
    valid = ~rewards.isnan()
    centered = torch.where(valid, rewards - rewards.nanmean(1, keepdim=True), 0.0)
    deviation = rewards[valid].std()
    expected = (centered / (deviation + 1e-4)).nan_to_num().flatten().float()
    torch.testing.assert_close(torch.cat(advantages), expected)
    assert ranks[0]["metrics"]["reward/mean"] == pytest.approx(rewards.nanmean().item())


OUTAGE = """
import sys
import lightning as L
import torch
sys.path.insert(0, {tests!r})
from pathlib import Path
from small_runs import PROMPTS, ShareOfLowBytes, make_module, make_trainer, weights
from lit_grpo.callbacks import ExitCheckpoint
from lit_grpo.data.loader import PromptLoader
from lit_grpo.training.score_gate import OutagePolicy
from lit_grpo.stopping import get_stop_reason

torch.set_num_threads(1)
mood = sys.argv[1]

class DownOnOneRank(ShareOfLowBytes):
    '''In the second step, for good or for the first two attempts at it.'''
    num_calls = 0

    def score(self, prompt, completion):
        self.num_calls += 1
        is_down = self.num_calls > 4 if mood == "down" else 4 < self.num_calls <= 12
        if mood != "up" and module.global_rank and module.rollout_step == 1 and is_down:
            raise ConnectionError("lost on one rank")
        return super().score(prompt, completion)

outage = OutagePolicy(
    max_absent_fraction=0.4, first_pause_seconds=0.1, give_up_after_seconds=0.3
)
module = make_module(rewards=[DownOnOneRank()], outage=outage)
trainer = make_trainer(ExitCheckpoint("."), max_steps=3, devices=2, strategy="ddp")

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return PromptLoader(PROMPTS, 2, rank=trainer.global_rank, world_size=2, seed=3)

ckpt = "last.ckpt" if Path("last.ckpt").exists() else None
trainer.fit(module, Data(), ckpt_path=ckpt, weights_only=True)
reason = get_stop_reason(trainer)
torch.save(
    {{
        "weights": weights(module),
        "reason": reason and reason.message,
        "step": module.rollout_step,
    }},
    f"rank{{trainer.global_rank}}.pt",
)
"""


@pytest.mark.slow
def test_ranks_wait_and_stop_together_when_one_has_no_scores_and_go_on_exactly(tmp_path):
    script = OUTAGE.format(tests=str(SUPPORT))
    runs = {}
    for directory, mood in (("whole", "up"), ("short", "short"), ("cut", "down"), ("cut", "up")):
        (tmp_path / directory).mkdir(exist_ok=True)
        runs[directory, mood] = run(tmp_path / directory, script, mood)
    for rank in runs["cut", "down"]:
        assert "lost on one rank" in rank["reason"]
        assert "4 of the 8 rows (50%)" in rank["reason"]
        assert rank["step"] == 1
    for key in (("short", "short"), ("cut", "up")):
        for whole, rank in zip(runs["whole", "up"], runs[key], strict=True):
            assert (rank["reason"], rank["step"]) == (None, 3)
            for name, weight in whole["weights"].items():
                assert torch.equal(weight, rank["weights"][name]), (key, name)
