"""The commands of the guides as they stand, in order, in a directory with only what a guide says.

The models that they name are there, tiny and random, and trainings are short.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import run_logs
from judge_server import JudgeServer, judges
from paths import ROOT
from stored_answers import GRADES
from tiny import LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from lit_grpo.__main__ import main
from lit_grpo.policy.byte_tokenizer import byte_tokenizer

GUIDES = ROOT / "docs/guides"
MODEL = Path("Qwen/Qwen2.5-0.5B-Instruct")
NEEDS_HUB = re.compile(r"--config gsm8k")
NEEDS_OTHERS = re.compile(r"my\.yaml|runs/my/0")
"""Config and run of the reader's own in the shorter guides."""
EXIT_CODES = {
    "lit-grpo prepare --preset recipe.yaml --out prepared": [2, 0],  # before and after precompute
    "LengthGuard": [20],
}
grades = judges("answer", lambda request, one: {"score": GRADES.get(one.text.strip()[-1:], 5)})


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def write_files(page: Path) -> list[str]:
    """Write the files of a page; return their names."""
    found = [one for kind in ("python", "yaml") for one in blocks(page, kind)]
    named = {one.split()[1]: one for one in found if re.match(r"# \w+\.\w+\n", one)}
    for name, text in named.items():
        Path(name).write_text(text)
    return [*named]


def write_model() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    )
    sizes = LLAMA | {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes)).save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)


def shortened(line: str) -> list[str]:
    words = shlex.split(line)[1:]
    if words[0] in ("fit", "sft") and "--print_config" not in words:
        words += ["--model.sampling.max_tokens=6", "--trainer.accelerator=cpu"]
        words += [] if "--trainer.max_steps" in words else ["--trainer.max_steps=2"]
    return words + (["--model.sampling.max_tokens=4"] if "--policy" in words else [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "callback", "engine", "objective", "reward"])
def test_the_commands_of_a_guide_run_in_their_order(name, tmp_path, capsys):
    page = GUIDES / f"{name}.md"
    shell = "".join(blocks(page, "sh") + blocks(page, "bash")).replace("\\\n", " ")
    lines = [one for one in shell.splitlines() if one.startswith("lit-grpo ")]
    skipped = NEEDS_HUB if name == "data" else NEEDS_OTHERS
    done: list[str] = []
    with run_logs.workplace(tmp_path) as patch, JudgeServer(grades) as server:
        patch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        patch.setenv("OPENAI_API_KEY", "x")
        names = write_files(ROOT / "README.md") + write_files(page)
        for module in names:
            patch.delitem(sys.modules, Path(module).stem, raising=False)
        if name == "data":
            write_model()
            runpy.run_path("make_rows.py")
        for line in (one for one in lines if not skipped.search(one)):
            codes = next((code for part, code in EXIT_CODES.items() if part in line), [0])
            code = main(shortened(line))
            assert code == codes[min(done.count(line), len(codes) - 1)], capsys.readouterr().err
            done.append(line)
    assert len(done) >= (15 if name == "data" else 1)
