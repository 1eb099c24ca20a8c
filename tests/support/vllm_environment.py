"""Where the tests find a real vLLM, and the settings with which it works on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from vllm_settings import ENV, FLAGS, MAX_MODEL_LEN

from lit_grpo.rollout import Launch

VENV = Path(os.environ.get("LIT_GRPO_VLLM_VENV", ROOT / ".venv-vllm"))
PYTHON = VENV / "bin" / "python"
needs_vllm = pytest.mark.skipif(
    not (VENV / ".lit-grpo-vllm-cpu").exists(),  # which it writes when all is installed
    reason="scripts/setup_vllm_cpu has not been run",
)


def launch_on_cpu(**settings: Any) -> Launch:
    """Servers for the tests; every setting can be another one."""
    settings["flags"] = FLAGS | settings.pop("flags", {})
    settings["env"] = ENV | settings.pop("env", {})
    return Launch(**({"python": str(PYTHON), "max_model_len": MAX_MODEL_LEN} | settings))
