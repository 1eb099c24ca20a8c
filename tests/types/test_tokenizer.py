from types import SimpleNamespace

import pytest

from lit_grpo.types.tokenizer import starts_with_bos


@pytest.mark.parametrize(
    ("bos", "text", "starts"),
    [
        ("<s>", "<s>1+1=", True),
        ("<s>", "1+1=<s>", False),
        ("<s>", "", False),
        (None, "1+1=", False),
        ("", "1+1=", False),
    ],
)
def test_a_text_has_its_bos_if_it_begins_with_one_that_the_tokenizer_has(bos, text, starts):
    assert starts_with_bos(text, SimpleNamespace(bos_token=bos)) is starts
