from __future__ import annotations

import re
import signal

import pytest

from lit_grpo.diagnostics.causes.table import CAUSES, cause_of_exit
from lit_grpo.stopping import ExitCode, exit_code_of_signal


@pytest.mark.parametrize("code", [one for one in ExitCode if one != ExitCode.DONE], ids=str)
def test_every_exit_code_is_that_of_its_own_cause(code):
    assert CAUSES[cause_of_exit(code)].exit_code == code


def test_every_signal_has_the_cause_of_ctrl_c():
    assert {cause_of_exit(exit_code_of_signal(one)) for one in signal.Signals} == {"signal"}


def test_an_exit_code_of_the_users_is_its_own_cause():
    assert cause_of_exit(20) == "exit_code_20"
    assert cause_of_exit(20) not in CAUSES


def test_names_and_titles_are_unique_and_advice_is_plain_sentences_without_links():
    assert len({one.title for one in CAUSES.values()}) == len(CAUSES)
    for name, cause in CAUSES.items():
        assert cause.name == name
        for sentence in (cause.meaning, *cause.advice, *cause.more):
            assert re.search(r"[.?:`]$", sentence), (name, sentence)
        assert not any("](" in one for one in cause.advice), name
