import asyncio
import threading
from dataclasses import replace

import pytest
import torch.distributed
from forked import run_in_processes
from judge_server import (
    PRICE,
    REPLY_COST,
    JudgeServer,
    first_line_is,
    judges,
    once_together,
    refuses,
    says,
    shorten_backoff,
    writes,
)
from tiny import completion, prompt
from worker_processes import wait_until

from lit_grpo.rewards import JudgeReward, RankingReward, RubricReward
from lit_grpo.rewards.judged.base import agreement, question_of
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import Outcome

RUBRIC = [{"criterion": "right", "points": 1}]


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    shorten_backoff(monkeypatch)


@pytest.fixture
def server():
    with JudgeServer(judges("answer", first_line_is("2"))) as one:
        yield one


@pytest.fixture
def started():
    """Start suites, which are closed at the end."""
    suites = []

    def start(*rewards):
        suites.append(RewardSuite(rewards))
        suites[-1].start()
        return suites[-1]

    yield start
    for suite in suites:
        suite.close()


def score(suite, *rows):
    """Score one group per row of texts."""
    prompts = [prompt(id=f"p{i}", rubric=RUBRIC) for i in range(len(rows))]
    return suite.score(prompts, [[completion(text=text) for text in row] for row in rows])


def rights(count):
    """Return different texts that are all right answers."""
    return [f"2\n{number}" for number in range(count)]


KINDS = [JudgeReward, RubricReward, RankingReward]


@pytest.mark.parametrize("kind", KINDS)
def test_retry_is_refused_since_the_judge_client_retries(server, kind):
    with pytest.raises(ValueError, match="on_error must be .* got retry.*num_retries"):
        kind(server.judge(), on_error="retry")


@pytest.mark.parametrize("kind", [JudgeReward, RubricReward])
def test_several_votes_need_a_temperature(server, kind):
    with pytest.raises(ValueError, match="votes must be 1 with a temperature of 0, got 3"):
        kind(server.judge(), votes=3)
    assert kind(server.judge(temperature=None), votes=3).votes == 3


@pytest.mark.parametrize("kind", KINDS)
def test_no_votes_are_refused(server, kind):
    with pytest.raises(ValueError, match="votes must be >= 1"):
        kind(server.judge(temperature=1.0), votes=0)


def test_a_start_without_access_leaves_nothing_open(server):
    server.script(refuses(401), refuses(401))
    for num_retries in (5, 4):
        suite = RewardSuite([JudgeReward(server.judge(limits={"num_retries": num_retries}))])
        with pytest.raises(ValueError, match="the key or token is wrong"):
            suite.start()
    assert len(server.requests) == 2


def test_a_start_without_its_cache_leaves_nothing_open(server, started, tmp_path):
    (tmp_path / "file").write_text("taken")
    suite = RewardSuite([JudgeReward(server.judge(cache=tmp_path / "file"))])
    with pytest.raises(ValueError, match="Set judge.cache"):
        suite.start()
    started(JudgeReward(server.judge(limits={"max_concurrency": 3})))


def test_a_reward_must_be_started(server):
    reward = JudgeReward(server.judge())
    with pytest.raises(RuntimeError, match=r"call its start\(\) first"):
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
FAILURES_BY_KIND = [
    *((JudgeReward, outcome) for outcome in FAILURES),
    (RubricReward, Outcome.UNAVAILABLE),
    (RankingReward, Outcome.UNAVAILABLE),
]


@pytest.mark.parametrize(("kind", "outcome"), FAILURES_BY_KIND)
def test_a_failure_is_an_outcome_and_never_a_value(server, started, kind, outcome):
    timeout = 0.3 if outcome is Outcome.TIMEOUT else 20.0
    limits = {"num_retries": 0, "call_timeout_seconds": timeout}
    suite = started(kind(server.judge(limits=limits), name="judged"))
    server.behaviour = lambda request: FAILURES[outcome]
    batch = score(suite, ["2", "3"])
    for one in batch.groups[0].scores["judged"]:
        assert one.outcome is outcome
        assert one.value is None
        assert one.detail
    assert not batch.valid.any()
    assert batch.rewards.isnan().all()


def test_a_step_reports_calls_tokens_and_cost(server, started):
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
def test_costs_of_scores_add_up_to_the_ledger(server, started, kind):
    judge = server.judge(price=PRICE, temperature=1.0, limits={"num_retries": 1})
    suite = started(kind(judge, name="judged", votes=2))
    suite.observe()
    server.behaviour = lambda request: writes(("hm", "{}", "10")[len(server.requests) % 3])
    batch = score(suite, ["2", "3", "4"], ["5", "6", "7"])
    (observed,) = suite.observe()
    costs = [one.cost for group in batch.groups for one in group.scores["judged"]]
    assert observed.totals["judge/cost_usd"] > 0
    assert sum(costs) == pytest.approx(observed.totals["judge/cost_usd"])


def test_no_questions_are_asked_once_the_budget_is_spent_even_after_a_resume(server, started):
    limits = {"max_cost_usd": 3.5 * REPLY_COST, "max_concurrency": 1}
    judge = server.judge(price=PRICE, limits=limits)
    suite = started(JudgeReward(judge))  # one reply is for the start
    suite.begin_step()  # which a stop leaves undone: what was spent is spent
    batch = score(suite, rights(6))
    outcomes = [one.outcome for one in batch.groups[0].scores["judge"]]
    assert sorted(outcomes) == [Outcome.BUDGET_SPENT] * 3 + [Outcome.OK] * 3
    assert batch.valid[0].sum() == 3
    state = suite.state_dict()
    assert state == {"judge": {"spent_usd": pytest.approx(4 * REPLY_COST)}}
    suite.close()
    resumed = started(JudgeReward(judge))
    resumed.load_state_dict(state)
    num_asked = len(server.questions)
    again = score(resumed, rights(2))
    assert [one.outcome for one in again.groups[0].scores["judge"]] == [Outcome.BUDGET_SPENT] * 2
    assert len(server.questions) == num_asked


@pytest.fixture
def gate(server):
    """An event that holds back every reply until it is set."""
    opened, honest = threading.Event(), server.behaviour

    def held(request):
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
def test_equal_items_of_two_groups_are_asked_once(server, started, gate, kind):
    reply, num_asked = BY_KIND[kind]
    suite = started(kind(server.judge(price=PRICE), name="judged"))
    suite.observe()
    held = server.behaviour
    server.behaviour = lambda request: held(request) and reply
    rows = ["2", "3"], ["2", "3"], ["8", "9"]
    scoring = suite.open([prompt(id=f"p{i}", rubric=RUBRIC) for i in range(3)], 2)
    add_all(scoring, *rows)
    # When the questions of the last group have started, those of the second one are waiting.
    wait_until(lambda: len(server.questions) == num_asked)
    gate.set()
    batch = scoring.result()
    first, second, _ = batch.rewards.tolist()
    assert first == second
    assert batch.valid.all()
    (observed,) = suite.observe()
    assert len(server.questions) == observed.totals["judge/calls"] == num_asked
    assert sum(map(sum, costs(batch))) == pytest.approx(num_asked * REPLY_COST)
    assert sum(map(sum, costs(batch))) == pytest.approx(observed.totals["judge/cost_usd"])
    assert sum(costs(batch)[1]) == 0


def test_equal_items_of_two_scorings_are_asked_once(server, started, gate):
    suite = started(JudgeReward(server.judge(price=PRICE), name="judged"))
    scorings = [suite.open([prompt(id=f"p{i}")], 3) for i in range(2)]
    for scoring, texts in zip(scorings, (["2", "3", "2"], ["3", "2", "4"]), strict=True):
        add_all(scoring, texts)
    wait_until(lambda: len(server.questions) == 3)
    gate.set()
    first, second = (scoring.result() for scoring in scorings)
    assert (first.rewards.tolist(), second.rewards.tolist()) == ([[1, 0, 1]], [[0, 1, 0]])
    assert costs(first)[0] == pytest.approx([REPLY_COST, REPLY_COST, 0])
    assert costs(second)[0] == pytest.approx([0, 0, REPLY_COST])
    assert len(server.questions) == 3


def test_two_rewards_of_one_deployment_do_not_share_verdicts(server, started, gate):
    judge = server.judge(price=PRICE)
    suite = started(JudgeReward(judge, name="a"), JudgeReward(judge, name="b"))
    scoring = suite.open([prompt()], 2)
    add_all(scoring, ["2", "2"])
    wait_until(lambda: len(server.questions) == 2)
    gate.set()
    batch = scoring.result()
    for name in "ab":
        assert [one.value for one in batch.groups[0].scores[name]] == [1, 1]
        assert costs(batch, name)[0] == pytest.approx([REPLY_COST, 0])
    assert len(server.questions) == 2


def test_the_timeout_of_a_score_leaves_an_equal_one_its_verdict(server, started, gate):
    reward = JudgeReward(server.judge(), name="judged", timeout_seconds=3.0)
    suite = started(reward)
    late, patient = (suite.open([prompt()], 1) for _ in range(2))
    add_all(late, ["2"])
    wait_until(lambda: server.questions)
    reward.timeout_seconds = None
    add_all(patient, ["2"])
    (one,) = late.result().groups[0].scores["judged"]
    gate.set()
    assert one.outcome is Outcome.TIMEOUT
    (other,) = patient.result().groups[0].scores["judged"]
    assert other.value == 1.0
    assert len(server.questions) == 1


def test_processes_keep_the_limits_together_and_add_up_what_they_spent(server, tmp_path):
    server.behaviour = once_together(server, 3, server.behaviour)
    limits = {"max_concurrency": 3, "max_cost_usd": 1.0}
    reward = JudgeReward(server.judge(price=PRICE, limits=limits))

    def run_rank(rank):
        store = f"file://{tmp_path / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        with RewardSuite([reward]) as suite:
            torch.distributed.barrier()
            score(suite, rights(10 + rank))
            torch.distributed.barrier()
            return suite.state_dict()["judge"]["spent_usd"]

    spent = run_in_processes(lambda: run_rank(0), lambda: run_rank(1))
    # Each rank asks one question at the start.
    assert spent == pytest.approx([(2 + 10 + 11) * REPLY_COST] * 2)
    assert len(server.requests) == 23
    assert server.most_at_once == 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
def test_closing_cancels_calls_that_hang(server, kind):
    server.behaviour = lambda request: says(score=10, seconds=600)
    patient = {"call_timeout_seconds": 600, "deadline_seconds": 600}
    suite = RewardSuite([kind(server.judge(limits=patient))])
    suite.start()
    scoring = suite.open([prompt(rubric=RUBRIC)], 4)
    for row in range(4):
        scoring.add(row, completion(text=str(row)))
    wait_until(lambda: len(server.questions) == (1 if kind is RankingReward else 4))
    suite.close()
    assert scoring.is_cancelled


def test_scoring_starts_before_a_group_is_complete(server, started):
    suite = started(JudgeReward(server.judge(), completions_per_call=2))
    scoring = suite.open([prompt()], 4)
    for row in range(3):
        scoring.add(row, completion(text=str(row)))
    wait_until(lambda: len(server.questions) == 1)
    assert [one.text for one in server.questions[0].of("answer")] == ["0", "1"]
    scoring.add(3, completion(text="3"))
    values = [one.value for one in scoring.result().groups[0].scores["judge"]]
    assert values == [0.0, 0.0, 1.0, 0.0]
    assert [len(request.of("answer")) for request in server.questions] == [2, 2]


def test_the_last_call_of_a_group_may_have_fewer_completions(server, started):
    suite = started(JudgeReward(server.judge(), completions_per_call=3))
    batch = score(suite, ["2\na", "3", "2\nb", "2\nc"])
    assert batch.rewards.tolist() == [[1.0, 0.0, 1.0, 1.0]]
    assert sorted(len(request.of("answer")) for request in server.questions) == [1, 3]


def test_a_failed_row_does_not_affect_its_siblings(server, started):
    honest = server.behaviour
    spoil = refuses(400, code="content_filter")
    server.behaviour = lambda request: spoil if "poison" in request.texts[-1] else honest(request)
    suite = started(JudgeReward(server.judge(), completions_per_call=4))
    batch = score(suite, ["2\na", "poison", "3", "2\nb"])
    values = [one.value for one in batch.groups[0].scores["judge"]]
    assert values == [1.0, None, 0.0, 1.0]
    assert batch.valid.tolist() == [[True, False, True, True]]


def test_all_calls_run_on_one_loop(server, started):
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


def test_a_question_is_shown_without_chat_template_markup():
    plain = prompt("<|user|>1+1=<|assistant|>")
    assert question_of(plain) == "<|user|>1+1=<|assistant|>"
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    assert question_of(replace(plain, messages=tuple(chat[1:]))) == "1+1="
    assert question_of(replace(plain, messages=tuple(chat))) == "system: Add.\n\nuser: 1+1="
