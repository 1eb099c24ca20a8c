"""Gold for verifiable rows: right and wrong answers, each checked by a reward.

A row of which no right answer, or no wrong one, passes the check has no gold, and a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import batched
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from lit_grpo.cli.parser_errors import explain
from lit_grpo.cli.precompute.gold_cache import CheckedAnswers
from lit_grpo.cli.precompute.perturb import stated, with_answer, wrong_answers
from lit_grpo.cli.prepare.join_gold import Checked, check_key
from lit_grpo.cli.prepare.recipe import Verifier
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring import RewardSuite
from lit_grpo.types import Completion, Prompt, Score, UserError
