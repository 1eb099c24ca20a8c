import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from judge_server import (
    PRICE,
    REPLY_COST,
    JudgeServer,
    first_line_is,
    hurry,
    judges,
    refuses,
    says,
    writes,
)
from paths import SUPPORT
from tiny import completion, prompt

from lit_grpo.rewards import JudgeReward, RankingReward, RubricReward
from lit_grpo.rewards.judged.base import agreement, question_of
from lit_grpo.rewards.scoring import RewardSuite
from lit_grpo.types import Outcome

RUBRIC = [{"criterion": "right", "points": 1}]


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture
def server():
    grade = judges("answer", first_line_is("2"))
    probe = writes('{"answer": "yes"}')
    behave = lambda request: grade(request) if len(request.texts) > 1 else probe  # noqa: E731
    with JudgeServer(behave) as one:
        yield one


@pytest.fixture
def started():
    """A suite that is started, and closed at the end."""
    suites = []

    def start(*rewards):
        suites.append(RewardSuite(rewards))
        suites[-1].start()
        return suites[-1]

    yield start
    for suite in suites:
        suite.close()


def score(suite, *rows):
    """The batch of one prompt a row, whose completions have these texts."""
    prompts = [prompt(id=f"p{i}", rubric=RUBRIC) for i in range(len(rows))]
    return suite.score(prompts, [[completion(text=text) for text in row] for row in rows])


def rights(count):
    """So many right answers, none like another."""
    return [f"2\n{number}" for number in range(count)]


def asked(server):
    """The requests after the probe of the start."""
    return [request for request in server.requests if len(request.texts) > 1]


KINDS = [JudgeReward, RubricReward, RankingReward]


@pytest.mark.parametrize("kind", KINDS)
def test_trying_again_is_left_to_the_judge(server, kind):
    with pytest.raises(ValueError, match="on_error must be .* got retry.*num_retries"):
        kind(server.judge(), on_error="retry")


@pytest.mark.parametrize("kind", [JudgeReward, RubricReward])
def test_several_votes_need_a_temperature(server, kind):
    with pytest.raises(ValueError, match="votes must be >= 1, and 1 with a temperature of 0"):
        kind(server.judge(), votes=3)
    assert kind(server.judge(temperature=None), votes=3).votes == 3


@pytest.mark.parametrize("kind", KINDS)
def test_no_votes_are_refused(server, kind):
    with pytest.raises(ValueError, match="votes must be >= 1"):
        kind(server.judge(temperature=1.0), votes=0)


def test_a_start_without_access_leaves_nothing_open(server):
    server.behaviour = lambda request: refuses(401)
    for num_retries in (5, 4):
        suite = RewardSuite([JudgeReward(server.judge(limits={"num_retries": num_retries}))])
        with pytest.raises(ValueError, match="the key or token is wrong"):
            suite.start()
    assert len(server.requests) == 2


def test_a_start_without_its_cache_leaves_nothing_open(server, started, tmp_path):
    (tmp_path / "file").write_text("taken")
    suite = RewardSuite([JudgeReward(server.judge(cache=tmp_path / "file"))])
    with pytest.raises(ValueError, match="Set cache"):
        suite.start()
    started(JudgeReward(server.judge(limits={"max_concurrency": 3})))


def test_a_reward_that_is_not_started_says_so(server):
    reward = JudgeReward(server.judge())
    with pytest.raises(RuntimeError, match=r"call start\(\)"):
        reward.examiner  # noqa: B018
    assert not reward.observe().totals
    assert reward.state_dict() == {}


FAILURES = {
    Outcome.RATE_LIMITED: refuses(429, code="insufficient_quota"),
    Outcome.UNAVAILABLE: refuses(503),
    Outcome.TIMEOUT: says(score=10, seconds=20),
    Outcome.CONTENT_FILTERED: refuses(400, code="content_filter"),
    Outcome.OUT_OF_TOKENS: writes("", finish_reason="length"),
    Outcome.PARSE_ERROR: writes("10 of 10"),
    Outcome.ERROR: refuses(400),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outcome", "reply"), FAILURES.items(), ids=FAILURES)
def test_a_failure_is_an_outcome_and_never_a_value(server, started, kind, outcome, reply):
    limits = {"num_retries": 0, "call_timeout_seconds": 2.0}
    suite = started(kind(server.judge(limits=limits), name="judged"))
    server.behaviour = lambda request: reply
    batch = score(suite, ["2", "3"])
    for one in batch.groups[0].scores["judged"]:
        assert one.outcome is outcome
        assert one.value is None
        assert one.detail
    assert not batch.valid.any()
    assert batch.rewards.isnan().all()


def test_a_step_reports_what_judging_took(server, started):
    suite = started(JudgeReward(server.judge(price=PRICE)))
    suite.observe()
    server.script(refuses(429, retry_after_ms="1"), writes("hm"))
    batch = score(suite, ["2\na", "3", "2\nb"])
    (observed,) = suite.observe()
    expected = {
        "judge/calls": 5,
        "judge/retries": 2,
        "judge/rate_limited": 1,
        "judge/parse_errors": 1,
        "judge/cache_hits": 0,
        "judge/prompt_tokens": 400,
        "judge/completion_tokens": 40,
    }
    assert {name: observed.totals[name] for name in expected} == expected
    assert observed.totals["judge/cost_usd"] == pytest.approx(4 * REPLY_COST)
    costs = [one.cost for one in batch.groups[0].scores["judge"]]
    assert sum(costs) == pytest.approx(4 * REPLY_COST)
    assert len(observed.samples["timing/judge_api_latency_s"]) == 5
    assert len(observed.samples["timing/semaphore_wait_s"]) == 5
    assert suite.observe()[0].totals["judge/calls"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_costs_of_scores_add_up_to_the_books(server, started, kind):
    judge = server.judge(price=PRICE, temperature=1.0, limits={"num_retries": 1})
    suite = started(kind(judge, name="judged", votes=2))
    suite.observe()
    server.behaviour = lambda request: writes(("hm", "{}", "10")[len(server.requests) % 3])
    batch = score(suite, ["2", "3", "4"], ["5", "6", "7"])
    (observed,) = suite.observe()
    costs = [one.cost for group in batch.groups for one in group.scores["judged"]]
    assert observed.totals["judge/cost_usd"] > 0
    assert sum(costs) == pytest.approx(observed.totals["judge/cost_usd"])


def test_spent_money_stops_the_asking_and_is_remembered(server, started):
    limits = {"max_cost_usd": 3.5 * REPLY_COST, "max_concurrency": 1}
    judge = server.judge(price=PRICE, limits=limits)
    suite = started(JudgeReward(judge))  # the start takes one reply
    batch = score(suite, rights(6))
    outcomes = [one.outcome for one in batch.groups[0].scores["judge"]]
    assert sorted(outcomes) == [Outcome.BUDGET_SPENT] * 3 + [Outcome.OK] * 3
    assert batch.valid[0].sum() == 3
    state = suite.state_dict()
    assert state == {"judge": {"spent_usd": pytest.approx(4 * REPLY_COST)}}
    suite.close()
    resumed = started(JudgeReward(judge))
    resumed.load_state_dict(state)
    num_asked = len(asked(server))
    again = score(resumed, rights(2))
    assert [one.outcome for one in again.groups[0].scores["judge"]] == [Outcome.BUDGET_SPENT] * 2
    assert len(asked(server)) == num_asked


def test_two_rewards_of_one_deployment_must_agree_on_its_limits(server):
    rewards = [
        JudgeReward(server.judge(), name="a"),
        JudgeReward(server.judge(limits={"max_concurrency": 3}), name="b"),
    ]
    suite = RewardSuite(rewards)
    with pytest.raises(ValueError, match="must give it the same limits"):
        suite.start()


def test_two_rewards_of_one_deployment_share_its_slots(server, started):
    honest = server.behaviour

    def slow(request):
        time.sleep(0.05)
        return honest(request)

    server.behaviour = slow
    judge = server.judge(limits={"max_concurrency": 2})
    suite = started(JudgeReward(judge, name="a"), JudgeReward(judge, name="b"))
    score(suite, rights(6))
    assert len(asked(server)) == 12
    assert server.most_at_once == 2


@pytest.fixture
def gate(server):
    """Holds every reply after the start's back until it is set."""
    opened, honest = threading.Event(), server.behaviour

    def held(request):
        if len(request.texts) > 1:
            opened.wait(30)
        return honest(request)

    server.behaviour = held
    yield opened
    opened.set()


def add_all(scoring, *rows):
    for row, text in enumerate(text for group in rows for text in group):
        scoring.add(row, completion(text=text))


def costs(batch, name="judged"):
    return [[one.cost for one in group.scores[name]] for group in batch.groups]


BY_KIND = {
    JudgeReward: (says(score=4), 4),
    RubricReward: (says(criteria_met=True), 4),
    RankingReward: (says(order=["A1", "A2"]), 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_one_prompt_ask_once_for_what_they_have_in_common(server, started, gate, kind):
    reply, num_asked = BY_KIND[kind]
    suite = started(kind(server.judge(price=PRICE), name="judged"))
    suite.observe()
    held = server.behaviour
    server.behaviour = lambda request: held(request) and reply
    rows = ["2", "3"], ["2", "3"], ["8", "9"]
    scoring = suite.open([prompt(id=f"p{i}", rubric=RUBRIC) for i in range(3)], 2)
    add_all(scoring, *rows)
    # The last group's questions begin last, so that the second one's are waiting by then.
    wait_until(lambda: len(asked(server)) == num_asked)
    gate.set()
    batch = scoring.result()
    first, second, _ = batch.rewards.tolist()
    assert first == second
    assert batch.valid.all()
    (observed,) = suite.observe()
    assert len(asked(server)) == observed.totals["judge/calls"] == num_asked
    assert sum(map(sum, costs(batch))) == pytest.approx(num_asked * REPLY_COST)
    assert sum(map(sum, costs(batch))) == pytest.approx(observed.totals["judge/cost_usd"])
    assert sum(costs(batch)[1]) == 0


def test_scorings_at_the_same_time_share_what_they_have_in_common(server, started, gate):
    suite = started(JudgeReward(server.judge(price=PRICE), name="judged"))
    scorings = [suite.open([prompt(id=f"p{i}")], 3) for i in range(2)]
    for scoring, texts in zip(scorings, (["2", "3", "2"], ["3", "2", "4"]), strict=True):
        add_all(scoring, texts)
    wait_until(lambda: len(asked(server)) == 3)
    gate.set()
    first, second = (scoring.result() for scoring in scorings)
    assert (first.rewards.tolist(), second.rewards.tolist()) == ([[1, 0, 1]], [[0, 1, 0]])
    assert costs(first)[0] == pytest.approx([REPLY_COST, REPLY_COST, 0])
    assert costs(second)[0] == pytest.approx([0, 0, REPLY_COST])
    assert len(asked(server)) == 3


def test_two_rewards_of_one_deployment_share_no_answers(server, started, gate):
    judge = server.judge(price=PRICE)
    suite = started(JudgeReward(judge, name="a"), JudgeReward(judge, name="b"))
    scoring = suite.open([prompt()], 2)
    add_all(scoring, ["2", "2"])
    wait_until(lambda: len(asked(server)) == 2)
    gate.set()
    batch = scoring.result()
    for name in "ab":
        assert [one.value for one in batch.groups[0].scores[name]] == [1, 1]
        assert costs(batch, name)[0] == pytest.approx([REPLY_COST, 0])
    assert len(asked(server)) == 2


def test_a_score_that_overran_does_not_take_the_answer_of_its_like_along(server, started, gate):
    suite = started(JudgeReward(server.judge(), name="judged", timeout_seconds=5.0))
    late, patient = (suite.open([prompt()], 1) for _ in range(2))
    add_all(late, ["2"])
    wait_until(lambda: asked(server))
    time.sleep(2.5)
    add_all(patient, ["2"])
    (one,) = late.result().groups[0].scores["judged"]
    gate.set()
    assert one.outcome is Outcome.TIMEOUT
    (other,) = patient.result().groups[0].scores["judged"]
    assert other.value == 1.0
    assert len(asked(server)) == 1


def test_rewards_of_one_deployment_may_differ_in_their_patience(server, started):
    honest = server.behaviour
    server.behaviour = lambda request: replace(honest(request), seconds=1.0)
    hasty = {"call_timeout_seconds": 0.2, "num_retries": 0}
    suite = started(
        JudgeReward(server.judge(limits=hasty), name="hasty"),
        JudgeReward(server.judge(limits={"deadline_seconds": 50.0}), name="patient"),
    )
    scores = score(suite, ["2"]).groups[0].scores
    assert scores["hasty"][0].outcome is Outcome.TIMEOUT
    assert scores["patient"][0].value == 1.0


RANK = """
import sys
sys.path[:0] = sys.argv[4:]
import torch.distributed
from judge_server import PRICE
from test_base import rights, score
from lit_grpo.judge import Judge, Limits
from lit_grpo.rewards import RewardSuite
from lit_grpo.rewards.judged.grade import JudgeReward

rank, store, url = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2
)
limits = Limits(max_concurrency=3, max_cost_usd=1.0)
judge = Judge(model="m", base_url=url, auth="none", price=PRICE, limits=limits)
suite = RewardSuite([JudgeReward(judge)])
suite.start()
torch.distributed.barrier()
score(suite, rights(10 + rank))
torch.distributed.barrier()
print(suite.state_dict()["judge"]["spent_usd"])
suite.close()
torch.distributed.destroy_process_group()
"""


def test_processes_of_a_job_keep_its_limits_together_and_add_up_what_they_spent(server, tmp_path):
    honest = server.behaviour
    server.behaviour = lambda request: replace(honest(request), seconds=0.2)
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), f"{server.url}/v1"]
            + [str(SUPPORT), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    spent = [float(one.communicate(timeout=120)[0]) for one in ranks]
    # Each rank's start asks one question, too.
    assert spent == pytest.approx([(2 + 10 + 11) * REPLY_COST] * 2)
    assert len(server.requests) == 23
    assert server.most_at_once == 3


@pytest.mark.parametrize("kind", KINDS)
def test_closing_ends_calls_that_hang(server, kind):
    suite = RewardSuite([kind(server.judge())])
    suite.start()
    server.behaviour = lambda request: says(score=10, seconds=60)
    scoring = suite.open([prompt(rubric=RUBRIC)], 4)
    for row in range(4):
        scoring.add(row, completion(text=str(row)))
    wanted = 1 if kind is RankingReward else 4
    wait_until(lambda: len(server.requests) > wanted)
    start = time.monotonic()
    suite.close()
    assert time.monotonic() - start < 5
    assert scoring.is_cancelled


def wait_until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_scoring_begins_before_a_group_is_complete(server, started):
    suite = started(JudgeReward(server.judge(), completions_per_call=2))
    scoring = suite.open([prompt()], 4)
    for row in range(3):
        scoring.add(row, completion(text=str(row)))
    wait_until(lambda: len(asked(server)) == 1)
    assert [one.text for one in asked(server)[0].of("answer")] == ["0", "1"]
    scoring.add(3, completion(text="3"))
    values = [one.value for one in scoring.result().groups[0].scores["judge"]]
    assert values == [0.0, 0.0, 1.0, 0.0]
    assert [len(request.of("answer")) for request in asked(server)] == [2, 2]


def test_a_group_that_ends_early_is_not_left_waiting(server, started):
    suite = started(JudgeReward(server.judge(), completions_per_call=3))
    batch = score(suite, ["2\na", "3", "2\nb", "2\nc"])
    assert batch.rewards.tolist() == [[1.0, 0.0, 1.0, 1.0]]
    assert sorted(len(request.of("answer")) for request in asked(server)) == [1, 3]


def test_a_failed_row_leaves_its_siblings_their_values(server, started):
    honest = server.behaviour
    spoil = refuses(400, code="content_filter")
    server.behaviour = lambda request: spoil if "poison" in request.texts[-1] else honest(request)
    suite = started(JudgeReward(server.judge(), completions_per_call=4))
    batch = score(suite, ["2\na", "poison", "3", "2\nb"])
    values = [one.value for one in batch.groups[0].scores["judge"]]
    assert values == [1.0, None, 0.0, 1.0]
    assert batch.valid.tolist() == [[True, False, True, True]]


def test_one_loop_serves_all_calls(server, started):
    loops = set()

    class Watched(JudgeReward):
        async def score_group(self, prompt, completions):
            loops.add((id(asyncio.get_running_loop()), threading.current_thread().name))
            return await super().score_group(prompt, completions)

    suite = started(Watched(server.judge()))
    for _ in range(2):
        score(suite, ["2", "3"])
    assert {name for _, name in loops} == {"async-rewards"}
    assert len(loops) == 1


def test_agreement_is_the_share_of_the_most_common_vote():
    assert agreement([1, 1, 1]) == 1.0
    assert agreement([1, 2, 1, 3]) == 0.5


def test_a_question_is_shown_without_the_marks_of_a_chat_template():
    plain = prompt("<|user|>1+1=<|assistant|>")
    assert question_of(plain) == "<|user|>1+1=<|assistant|>"
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    assert question_of(replace(plain, messages=tuple(chat[1:]))) == "1+1="
    assert question_of(replace(plain, messages=tuple(chat))) == "system: Add.\n\nuser: 1+1="
