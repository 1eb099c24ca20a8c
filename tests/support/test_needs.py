import re

from needs import REQUIRED, needs
from paths import ROOT


def is_skipped(name: str, *, is_there: bool) -> bool:
    return needs(name, is_there, "it is not there").args[0]


def test_what_is_not_there_is_skipped_unless_it_is_required(monkeypatch):
    monkeypatch.delenv(REQUIRED, raising=False)
    assert not is_skipped("namespaces", is_there=True)
    assert is_skipped("namespaces", is_there=False)
    monkeypatch.setenv(REQUIRED, "deepspeed,namespaces")
    assert not is_skipped("namespaces", is_there=False)
    assert is_skipped("another", is_there=False)


def test_continuous_integration_requires_what_the_equality_of_strategies_needs():
    (required,) = re.findall(rf"{REQUIRED}=(\S+)", (ROOT / ".ci" / "run").read_text())
    assert {*required.split(",")} == {"deepspeed", "namespaces"}
