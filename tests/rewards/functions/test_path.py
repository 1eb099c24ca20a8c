"""Which function a path names, and what is said of one that names none."""

import pytest

from lit_grpo.rewards.functions.path import load_function
from lit_grpo.types import UserError

MODULE = """
import re

def digits(text):
    return re.findall("[0-9]", text)

def short(completions, limit=3, **kwargs):
    return [float(len(text) < limit) for text in completions]

def _private(completions):
    return []

constant = 1
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with a module and a file with a broken import."""
    (tmp_path / "path_rewards.py").write_text(MODULE)
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", ["path_rewards:", "path_rewards.", "path_rewards.py:"])
def test_a_function_is_found_by_module_or_by_file(project, place):
    assert load_function(f"{place}short")(["1", "1234"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("short", "must be module:function or path/to/file.py:function, got 'short'"),
        ("my_reward:short", "can be imported, got 'my_reward'"),
        ("path_rewards:shrt", "path_rewards has no function 'shrt'. Did you mean short?"),
        ("path_rewards:constant", "has no function 'constant'"),
        ("missing.py:short", "file that exists, got missing.py"),
    ],
)
def test_missing_function_is_refused_with_a_hint(project, path, message):
    with pytest.raises(ValueError, match=message):
        load_function(path)


def test_import_error_inside_the_users_module_is_not_replaced(project):
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_function("needs_more:f")


def test_of_a_file_alone_the_functions_are_named_and_the_one_that_scores_is_shown(project):
    with pytest.raises(UserError) as raised:
        load_function("path_rewards.py")
    assert str(raised.value) == (
        "function must be path/to/file.py:function, got 'path_rewards.py' (a file may have "
        "several). It has digits, short. Write path_rewards.py:short."
    )


@pytest.mark.parametrize("text", ["def broken(:\n", "constant = 1\n"])
def test_of_a_file_without_a_readable_function_the_form_is_shown(text, project):
    (project / "other.py").write_text(text)
    with pytest.raises(UserError, match=r"several\)\. Write other\.py:FUNCTION\."):
        load_function("other.py")


def test_a_file_alone_that_does_not_exist_is_told_so(project):
    with pytest.raises(UserError, match="in a file that exists, got none.py"):
        load_function("none.py")
