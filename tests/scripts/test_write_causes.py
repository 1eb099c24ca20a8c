import pytest
import write_causes

from lit_grpo.cli.commands import COMMANDS, OWN_EXIT_CODES
from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.stopping import ExitCode


@pytest.mark.parametrize("name", write_causes.SECTIONS)
def test_the_pages_are_those_of_the_tables(name):
    page, text = write_causes.SECTIONS[name]
    shown = (write_causes.DOCS / page).read_text()
    assert text() in shown, "run python scripts/write_causes.py"


def test_every_cause_has_a_row_with_a_link_to_its_section():
    page = write_causes.causes_page()
    for name, cause in CAUSES.items():
        assert f"](#{write_causes._anchor(cause.title)}): `{name}` |" in page
        assert f"\n### {cause.title}\n" in page


def test_both_pages_list_all_exit_codes_and_one_also_those_of_single_commands():
    for text in (write_causes.causes_page(), write_causes.codes_page()):
        for code in ExitCode:
            assert f"\n| {code:d} | {code.meaning}" in text
        assert "\n| 128 + n | ended by signal n" in text
    assert {"judge-check", "doctor"} <= OWN_EXIT_CODES.keys() <= COMMANDS.keys()
    for command, meanings in OWN_EXIT_CODES.items():
        for code, meaning in meanings.items():
            assert f"\n| `{command}` | {code} | {meaning} |\n" in write_causes.codes_page()
