"""Paths for tests and the programs that they start."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
"""Real data, which may be beside the checkout."""
