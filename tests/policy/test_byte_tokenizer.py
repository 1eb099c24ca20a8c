"""The byte tokenizer restores any text."""

from lit_grpo.policy.byte_tokenizer import byte_tokenizer


def test_decoding_restores_the_encoded_text():
    tokenizer = byte_tokenizer()
    text = "12+34=46\n naïve  \t🙂 <b>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 258
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids) == "user: hi\nassistant: "
