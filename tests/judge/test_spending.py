"""The file that keeps what a run has spent, whatever ends the process."""

from lit_grpo.judge.budget import CallBudget
from lit_grpo.judge.config import Limits
from lit_grpo.judge.spending import DIRECTORY, SpendingFile, read_all

DEPLOYMENT = ("http://127.0.0.1:1/v1", "m")


def budget_in(run_dir, rank=0) -> CallBudget:
    budget = CallBudget(Limits(max_cost_usd=2.0))
    budget.record_in(SpendingFile(run_dir, DEPLOYMENT, rank))
    return budget


def test_what_was_spent_is_counted_though_nothing_was_closed(tmp_path):
    first = budget_in(tmp_path)
    first.spend(0.5)
    first.spend(0.25)
    second = budget_in(tmp_path)
    assert second.spent_usd == 0.75
    second.spend(0.5)
    assert budget_in(tmp_path).spent_usd == 1.25


def test_a_checkpoint_may_know_of_more_and_then_counts(tmp_path):
    budget_in(tmp_path).spend(0.5)
    resumed = CallBudget(Limits(max_cost_usd=2.0))
    resumed.resume(0.75)  # its checkpoint
    resumed.record_in(SpendingFile(tmp_path, DEPLOYMENT, 0))
    assert resumed.spent_usd == 0.75
    assert budget_in(tmp_path).spent_usd == 0.75


def test_what_was_spent_before_the_files_are_read_is_counted_on_top(tmp_path):
    budget_in(tmp_path).spend(0.5)
    budget = CallBudget(Limits(max_cost_usd=2.0))
    budget.spend(0.125)  # the check of the connection
    budget.resume(0.25)
    budget.record_in(SpendingFile(tmp_path, DEPLOYMENT, 0))
    assert budget.spent_usd == 0.625
    assert budget_in(tmp_path).spent_usd == 0.625


def test_each_deployment_and_each_run_has_its_own(tmp_path):
    budget_in(tmp_path / "a").spend(0.5)
    other = CallBudget(Limits())
    other.record_in(SpendingFile(tmp_path / "a", ("http://127.0.0.1:1/v1", "other"), 0))
    assert (other.spent_usd, budget_in(tmp_path / "b").spent_usd) == (0.0, 0.0)


def test_a_run_without_costs_writes_nothing(tmp_path):
    budget_in(tmp_path).spend(0.0)
    assert not (tmp_path / DIRECTORY).exists()


def test_what_ranks_that_are_no_more_have_spent_is_taken_over(tmp_path):
    for rank in (0, 1, 2):
        file = SpendingFile(tmp_path, DEPLOYMENT, rank)
        file.write(0.25)
        file.close()
    assert budget_in(tmp_path).spent_usd == 0.75
    assert len(list((tmp_path / DIRECTORY).iterdir())) == 1
    assert budget_in(tmp_path).spent_usd == 0.75


def test_another_reward_with_the_same_judge_counts_nothing_twice(tmp_path):
    budget_in(tmp_path).spend(0.5)
    budget = budget_in(tmp_path)
    budget.spend(0.25)
    budget.record_in(SpendingFile(tmp_path, DEPLOYMENT, 0))
    assert budget.spent_usd == 0.75


def test_a_file_that_cannot_be_read_is_as_none(tmp_path):
    file = SpendingFile(tmp_path, DEPLOYMENT, 0)
    file.path.parent.mkdir()
    file.path.write_text("torn")
    assert read_all([file.path]) == 0.0
    budget_in(tmp_path).spend(0.5)
    assert read_all([file.path]) == 0.5


def test_a_full_disk_costs_a_warning_and_no_call(tmp_path, caplog):
    file = SpendingFile(tmp_path, DEPLOYMENT, 0)
    file.path.parent.mkdir()
    file.path.symlink_to("/dev/full")
    budget = CallBudget(Limits())
    budget._file = file
    budget.spend(0.5)
    budget.spend(0.5)
    assert budget.spent_usd == 1.0
    (message,) = caplog.messages
    assert "No space left on device" in message
