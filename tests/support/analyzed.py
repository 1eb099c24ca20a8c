"""Runs with known rewards for ``lit-grpo analyze``, and what it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from lit_grpo.__main__ import main
from lit_grpo.runs.files.completions import write_table


def measured(capsys, *arguments, code=0):
    """Return what ``analyze`` says of a directory."""
    assert main(["analyze", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def write_run(rewards, *, prompt_id="p{}", is_old=False):
    """Write the completions of each step, as the rewards of each of its groups."""
    for step, groups in enumerate(rewards):
        rows = [
            {
                "step": step,
                **({} if is_old else {"group": number}),
                "prompt_id": prompt_id.format(number),
                "source": "",
                "prompt": "1+1=",
                "num_tokens": 3,
                "reward": reward,
                "valid": reward is not None,
            }
            for number, group in enumerate(groups)
            for reward in group
        ]
        write_table(pa.Table.from_pylist(rows), Path(f"run/completions/step_{step:06}.parquet"))
