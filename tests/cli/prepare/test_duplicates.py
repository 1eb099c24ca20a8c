"""Copies of prompts are found, in words that differ a little as well."""

from __future__ import annotations

from lit_grpo.cli.prepare.duplicates import exact_copies, near_copies
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.data.rows.prepared import text_hash

WORDS = [f"word{number}" for number in range(60)]


def rows(*texts):
    return [
        PreparedRow(
            origin="", id=str(number), source="s", kind="open",
            text_hash=text_hash(text), columns={"prompt": text},
        )
        for number, text in enumerate(texts)
    ]  # fmt: skip


def changed(number):
    """The words with one in the middle changed, which 5 of their 56 sequences have."""
    return " ".join([*WORDS[:30], f"other{number}", *WORDS[31:]])


def test_a_copy_has_the_first_row_with_its_words():
    assert exact_copies(rows("Why?", "How?", "why?  ", "WHY?")) == {"2": "0", "3": "0"}


def test_near_copies_are_those_that_share_enough_sequences():
    texts = (" ".join(WORDS), changed(1), " ".join(reversed(WORDS)), " ".join(WORDS[:30]))
    # 51 of 61 sequences are in both: 0.836
    assert near_copies(rows(*texts), 0.83) == {"1": "0"}
    assert near_copies(rows(*texts), 0.84) == {}


def test_a_near_copy_is_no_original_of_others_and_copies_are_left_out():
    texts = (" ".join(WORDS), changed(1), changed(2), " ".join(WORDS).upper())
    assert near_copies(rows(*texts), 0.8) == {"1": "0", "2": "0"}
    # With another first row the two changed ones share 51 of 61 sequences.
    assert near_copies(rows("", *texts[1:3]), 0.8) == {"2": "1"}


def test_short_prompts_are_near_copies_only_if_equal():
    assert near_copies(rows("What is 1 plus 2?", "What is 1 plus 3?", "What"), 0.5) == {}


def test_many_near_copies_are_all_found():
    originals = [" ".join(f"w{n}x{number}" for n in range(60)) for number in range(60)]
    copies = [f"{text} and one more" for text in originals]
    found = near_copies(rows(*originals, *copies), 0.85)
    assert found == {str(number + 60): str(number) for number in range(60)}


def test_near_copies_that_are_just_over_the_threshold_are_found():
    originals = [[f"w{n}x{number}" for n in range(60)] for number in range(100)]
    texts = [*originals, *([*one[:30], "other", *one[31:]] for one in originals)]
    found = near_copies(rows(*map(" ".join, texts)), 0.83)  # 51 of 61 sequences are in both
    assert found == {str(number + 100): str(number) for number in range(100)}
