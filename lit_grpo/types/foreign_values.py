"""Names of TRL, verl and OpenRLHF for values that have other names here."""

from __future__ import annotations

VALUES = {
    "surrogate": {
        **dict.fromkeys(("ppo", "ppo_clip", "vanilla", "grpo", "dapo", "bnpo"), "clip"),
        **dict.fromkeys(("clip_cov", "kl_cov"), "clip, with objective.covariance"),
        **dict.fromkeys(("gspo", "luspo"), "clip, with objective.ratio: sequence"),
        "dr_grpo": "clip, with objective.aggregation: constant",
        "rloo": "clip, with advantage.baseline: leave_one_out",
        "reinforce_plus_plus": "clip, with advantage.baseline: batch",
        **dict.fromkeys(("reinforce", "gpg"), "clip, whose ratio is 1 with one update per rollout"),
        "geo_mean": "gmpo",
        "dppo_tv": "dppo",
        "dppo_kl": "dppo, with objective.dppo_divergence: kl",
        "bypass_mode": "clip, with objective.old_logprobs: sampler",
    },
    "estimator": {
        "kl": "k1",
        "mse": "k2",
        "low_var_kl": "k3",
        "k1+": "k1, with kl.gradient: k2",
        "k3+": "k3, with kl.gradient: k2",
    },
    "aggregation": {
        "token_mean": "token",
        "dapo": "token",
        "bnpo": "local_token",
        "seq_mean_token_mean": "sequence",
        "grpo": "sequence",
        "seq_mean_token_sum": "sequence_sum",
        "luspo": "sequence_sum",
        "seq_mean_token_sum_norm": "constant",
        "dr_grpo": "constant",
    },
    "baseline": {
        **dict.fromkeys(("grpo", "group_norm", "mean"), "group"),
        "dr_grpo": "group, with advantage.deviation: none",
        "rloo": "leave_one_out",
        "opo": "length_weighted",
        **dict.fromkeys(("reinforce", "reinforce_plus_plus"), "batch"),
        **dict.fromkeys(
            ("reinforce_baseline", "reinforce_plus_plus_baseline"),
            "group, with advantage.rescale: true",
        ),
    },
    "deviation": {"std": "group", "true": "group", "false": "none"},
    "ratio": {"gspo": "sequence", "sequence_level": "sequence", "token_level": "token"},
    "lr_schedule": {"constant_with_warmup": "constant, with model.warmup_steps"},
}
"""Last part of a key -> its values there, in lower case with _ for - -> those here."""

FIRST_FIELD = {"advantage": "baseline", "objective": "surrogate", "kl": "estimator"}
"""Section -> the key under it whose value is likely to be given in its place."""


def counterpart(key: str, value: str) -> str:
    """Return what a value of another library is called here; empty if it is not known.

    Args:
        key: A key, or a section whose main key is meant.
        value: What was given.
    """
    last = key.rpartition(".")[2]
    name = value.lower().replace("-", "_")
    ours = VALUES.get(FIRST_FIELD.get(last, last), {}).get(name, "")
    under = f"{key}.{FIRST_FIELD[last]}: " if ours and last in FIRST_FIELD else ""
    return f"{under}{ours}"
