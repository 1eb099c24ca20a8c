"""Where things are: for tests, and for the programs that they start."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
"""Real data, where it is beside the checkout."""
