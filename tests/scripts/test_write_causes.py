import write_causes

from lit_grpo.diagnostics import CAUSES


def test_the_page_of_causes_is_that_of_the_table():
    page = write_causes.PAGE.read_text()
    assert write_causes.causes_page() in page, "run python scripts/write_causes.py"


def test_every_cause_has_a_row_with_a_link_to_its_section():
    page = write_causes.causes_page()
    for name, cause in CAUSES.items():
        assert f"](#{write_causes._anchor(cause.title)}): `{name}` |" in page
        assert f"\n### {cause.title}\n" in page
