import pytest

from lit_grpo.rollout import Sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("max_tokens", 0),
        ("min_tokens", 300),
        ("stop", ("a", "")),
    ],
)
def test_sampling_out_of_range_is_refused_with_the_key_to_set(name, value):
    with pytest.raises(ValueError, match=f"Set model.sampling.{name}"):
        Sampling(**{name: value})
