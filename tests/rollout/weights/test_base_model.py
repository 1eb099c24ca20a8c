"""An engine is started with the base of an adapter, or with the policy itself."""

from tiny import tiny_policy
from weight_policies import assert_same, perturbed, read_weights

from lit_grpo.policy import LoRA
from lit_grpo.policy.named_weights import named_weights
from lit_grpo.rollout.weights.base_model import adapted_layers, adapter_rank, base_model


def test_a_policy_that_was_loaded_is_read_from_where_it_was(tmp_path):
    tiny_policy().save_pretrained(tmp_path / "saved")
    policy = tiny_policy(architecture=None, path=str(tmp_path / "saved"))
    assert base_model(policy, tmp_path / "new") == str(tmp_path / "saved")
    assert not (tmp_path / "new").exists()


def test_a_policy_from_nowhere_is_written_without_its_adapter(tmp_path):
    policy = perturbed("llama with lora")
    before = {name: weight.clone() for name, weight in named_weights(policy.model)}
    assert base_model(policy, tmp_path / "new") == str(tmp_path / "new")
    base = {
        name.replace(".base_layer", ""): weight
        for name, weight in policy.model.get_base_model().state_dict().items()
        if "lora" not in name
    }
    assert_same(read_weights(tmp_path / "new"), base)
    assert_same(dict(named_weights(policy.model)), before)


def test_a_server_is_told_the_adapters_rank_and_layers():
    policy = tiny_policy(lora=LoRA(rank=3, target_modules=["q_proj", "v_proj"]))
    assert adapter_rank(policy.model) == 3
    assert adapted_layers(policy.model) == ("q_proj", "v_proj")
