import pytest
from tiny import LLAMA, prompt, tiny_policy
from transformers import AutoConfig, AutoModelForCausalLM

from lit_grpo.policy import Policy
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.policy.files.vocabulary import check_prompt_tokens
from lit_grpo.types import UserError

LACKING = r"got 100 embeddings, for the tokens 0 to 99, and token 256 \('<eos>'\)\. "


def small_config(size: int):
    return AutoConfig.for_model(**LLAMA, vocab_size=size, bos_token_id=1, eos_token_id=2)


def test_an_architecture_without_embeddings_for_special_tokens_is_refused():
    with pytest.raises(UserError, match=LACKING + "Remove vocab_size from model.policy.archit"):
        tiny_policy(architecture=LLAMA | {"vocab_size": 100})
    longer = tiny_policy(architecture=LLAMA | {"vocab_size": 300})
    assert longer.model.get_input_embeddings().weight.shape[0] == 300


def test_so_is_a_model_of_files(tmp_path):
    AutoModelForCausalLM.from_config(small_config(100)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=LACKING + "Set model.policy.tokenizer to the one that"):
        Policy(str(tmp_path)).load(with_reference=False)


def test_a_prompt_with_a_token_that_has_no_embedding_is_refused():
    check_prompt_tokens(small_config(100), [prompt("abc")])  # bytes 97 to 99
    with pytest.raises(UserError, match=r"0 to 98, and token 99 \(prompt p\)\. Set model.policy"):
        check_prompt_tokens(small_config(99), [prompt("a"), prompt("abc")])
