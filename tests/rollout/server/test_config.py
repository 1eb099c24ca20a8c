import pytest

from lit_grpo.rollout import Supervision


@pytest.mark.parametrize(
    "setting",
    [
        "startup_timeout",
        "health_interval",
        "health_timeout",
        "unhealthy_after",
        "silence_timeout",
        "weight_sync_timeout",
        "first_backoff",
        "max_backoff",
    ],
)
def test_every_setting_must_be_positive(setting):
    for value in (0, -1, float("nan")):
        with pytest.raises(
            ValueError, match=rf"Set model\.engine\.init_args\.supervision\.{setting}"
        ):
            Supervision(**{setting: value})


def test_there_may_be_no_restarts_but_not_fewer():
    assert Supervision(max_restarts=0).max_restarts == 0
    with pytest.raises(ValueError, match=r"Set model\.engine\.init_args\.supervision\.max_restart"):
        Supervision(max_restarts=-1)
