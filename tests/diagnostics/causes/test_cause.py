from lit_grpo.diagnostics.causes.cause import Cause
from lit_grpo.diagnostics.causes.table import CAUSES


def test_remedies_are_sentences_without_marks():
    cause = Cause(
        name="x",
        title="X",
        meaning="It is x.",
        advice=("Lower `data.x`.", "Or set `model.y: 1`."),
        more=("Further words.",),
        noticed_by="a test",
    )
    assert cause.remedies == ("Lower data.x.", "Or set model.y: 1.")
    assert cause.remedy == "Lower data.x. Or set model.y: 1."


def test_what_happens_and_when_is_said_in_words():
    assert CAUSES["no_reward"].actions == "alert after 5, stop after 10"
    assert CAUSES["nothing_trained"].actions == "warn, alert after 10, stop after 50"
    assert CAUSES["equal_rewards"].actions == "warn, alert after 10"
    assert CAUSES["solved"].actions == "warn after 5, alert after 10"
    assert CAUSES["not_finite_weights"].actions == "roll back"
    assert CAUSES["score_outage"].actions == "pause for up to an hour, then stop"
