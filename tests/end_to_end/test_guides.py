"""The commands of the guides as they stand, in order, in a directory with only what a guide says.

The models that they name are there, tiny and random, and trainings are short.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import run_logs
from judge_server import JudgeServer, Request, Section, judges
from paths import ROOT
from stored_answers import GRADES
from tiny import LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from lit_grpo.__main__ import main
from lit_grpo.policy.byte_tokenizer import byte_tokenizer

GUIDES = ROOT / "docs/guides"
MODEL = Path("Qwen/Qwen2.5-0.5B-Instruct")
NEEDS_HUB = re.compile(r"--config gsm8k")
NEEDS_RUN = re.compile(r"runs/my/0")
"""A run of the reader's own in the shorter guides."""
SHORTER = ["callback", "engine", "objective", "reward", "judge", "doctor"]
ENDING = f"--model.sampling.stop_token_ids={[*range(64, 128)]}"
"""A quarter of the tokens of random weights; else most completions would be cut off."""
EXIT_CODES = {
    "lit-grpo prepare --preset recipe.yaml --out prepared": [2, 0],  # before and after precompute
    "LengthGuard": [20],
}


def grade(request: Request, one: Section) -> dict[str, int]:
    """Grade an answer by the reference, or by its last letter if there is none."""
    by_letter = GRADES.get(one.text.strip()[-1:], 5)
    references = [reference.text for reference in request.of("reference")]
    return {"score": 10 * (one.text in references) if references else by_letter}


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


def write_config() -> None:
    """Write the config and rows of the README, as those of the reader's own."""
    Path("my.yaml").write_text(Path("math.yaml").read_text())
    rows = ({"prompt": f"What is 12 + {n}?", "answer": str(12 + n)} for n in range(20))
    Path("train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def shortened(line: str) -> list[str]:
    words = shlex.split(line)[1:]
    if "--probe" in words:
        return [*words, "--model.sampling.max_tokens=24", ENDING]
    if words[0] in ("fit", "sft") and "--print_config" not in words:
        words += ["--model.sampling.max_tokens=6", "--trainer.accelerator=cpu"]
        words += [] if "--trainer.max_steps" in words else ["--trainer.max_steps=2"]
    return words + (["--model.sampling.max_tokens=4"] if "--policy" in words else [])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", *SHORTER])
def test_the_commands_of_a_guide_run_in_their_order(name, tmp_path, capsys):
    page = GUIDES / f"{name}.md"
    shell = "".join(blocks(page, "sh") + blocks(page, "bash")).replace("\\\n", " ")
    lines = shell.replace(" && ", "\n").splitlines()
    lines = [one for one in lines if one.startswith("lit-grpo ")]
    skipped = NEEDS_HUB if name == "data" else NEEDS_RUN
    done: list[str] = []
    with run_logs.workplace(tmp_path) as patch, JudgeServer(judges("answer", grade)) as server:
        patch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        patch.setenv("OPENAI_API_KEY", "x")
        names = write_files(ROOT / "README.md") + write_files(page)
        for module in names:
            patch.delitem(sys.modules, Path(module).stem, raising=False)
        write_model()
        if name == "data":
            runpy.run_path("make_rows.py")
        else:
            write_config()
        for line in (one for one in lines if not skipped.search(one)):
            codes = next((code for part, code in EXIT_CODES.items() if part in line), [0])
            code = main(shortened(line))
            assert code == codes[min(done.count(line), len(codes) - 1)], capsys.readouterr().err
            done.append(line)
    assert len(done) >= {"data": 15, "judge": 2, "doctor": 4}.get(name, 1)
    if name == "judge":
        assert Path(tmp_path, "judge_cache").is_dir()
        for request in server.requests:
            assert request.body["model"] == "gpt-5-mini"
            assert "temperature" not in request.body  # it would refuse one
