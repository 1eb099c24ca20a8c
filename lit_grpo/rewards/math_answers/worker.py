"""The functions of a worker process that compares single formulas by computer algebra.

LaTeX is parsed by math-verify's parser. Expressions are compared by their values at a few points,
everything else by math-verify. Some formulas hang, so the caller needs a deadline. Nothing of this
package is imported, so workers start fast.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom

DIGITS = 60
EXACT = sympy.Float("1e-45")
"""Relative difference below which two values that were computed to 60 digits are equal."""
MAX_RELATIVE_ERROR = sympy.Float("1e-5")
MAX_ERROR = sympy.Float("5e-7")
"""Tolerances between a decimal and an exact number: six places, and few enough of small numbers."""
MIN_POINTS = 3
RANGES = [(0, 1), (-3, 0), (5, 30), (1, 3), (0, 2), (-1, 1)]
"""Where variables are sampled, one point in each range."""
MAX_DIGITS = 20_000
"""Numbers with more digits are not computed."""
MAX_TERMS = 1000
VERIFY_DIGITS = 200
"""math-verify's default of 15 makes all numbers below 1e-15 equal."""

_NORMALIZATION = NormalizationConfig(
    units=False, malformed_operators=True, nits=False, boxed="none"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_OPERATIONS = (sympy.Derivative, sympy.Integral, sympy.Limit, sympy.Sum, sympy.Product)
_SERIES = (sympy.Sum, sympy.Product)
_INTEGER_FUNCTIONS = (sympy.floor, sympy.ceiling, sympy.factorial, sympy.binomial, sympy.Mod)

logging.disable(logging.CRITICAL)


@lru_cache(maxsize=10_000)
def is_equal(gold: str, answer: str) -> bool:
    """Return whether two formulas are equal; an answer that cannot be read equals nothing.

    Results are cached, since the completions of a group often agree.

    Raises:
        ValueError: the gold answer cannot be read.
    """
    is_complex = should_treat_as_complex(gold + answer)
    try:
        parsed_gold = _parse(gold, is_complex=is_complex)
    except Exception as error:
        raise ValueError(f"gold answer {gold!r} is not readable") from error
    try:
        parsed_answer = _parse(answer, is_complex=is_complex)
        return _is_defined(parsed_answer) and _are_equal(parsed_gold, parsed_answer)
    except Exception:  # sympy raises all kinds of errors on formulas that make no sense
        return False


@lru_cache(maxsize=10_000)
def is_near(exact: str, decimal: str) -> bool:
    """Return whether a decimal is a number, rounded or cut off."""
    try:
        number, rounded = (_value(_parse(latex), {}) for latex in (exact, decimal))
    except Exception:
        return False
    if number is None or rounded is None:
        return False
    digits, _, decimals = decimal.strip().partition(".")
    num_zeros = len(digits) - len(digits.rstrip("0")) if not decimals else -len(decimals)
    missing = (abs(number) - abs(rounded)) / sympy.Integer(10) ** num_zeros
    return bool(number * rounded >= 0 and -0.5 <= missing < 1)


def is_readable(latex: str) -> bool:
    """Return whether a formula can be parsed and, if it is a number, computed."""
    try:
        parsed = _parse(latex)
        if isinstance(parsed, sympy.Expr) and not parsed.free_symbols and not _is_huge(parsed):
            _value(parsed, {})
        return _is_defined(parsed)
    except Exception:
        return False


@lru_cache(maxsize=1000)
def _parse(latex: str, *, is_complex: bool | None = None) -> Any:
    if is_complex is None:
        is_complex = should_treat_as_complex(latex)
    letters = set(_COMMAND.sub("", latex))
    parsed = latex2sympy(
        normalize_latex(latex, _NORMALIZATION),
        is_real=not is_complex,
        normalization_config=None,
        # N and n are two variables where both occur, otherwise case is ignored.
        conversion_config=ConversionConfig(
            lowercase_symbols=not any(one.swapcase() in letters for one in letters if one.isalpha())
        ),
    )
    return _with_values_of_functions(parsed)


def _with_values_of_functions(parsed: Any) -> Any:
    """Replace ``f(x)`` by a symbol; ``f`` and what it is applied to have no values."""
    if isinstance(parsed, Relational):
        return parsed.func(*map(_with_values_of_functions, parsed.args), evaluate=False)
    functions = parsed.atoms(AppliedUndef) if isinstance(parsed, sympy.Expr) else ()
    names = {one: sympy.Symbol(re.sub(r"\W", "_", str(one))) for one in functions}
    return parsed.xreplace(names) if names else parsed


def _is_defined(parsed: Any) -> bool:
    return not parsed.has(sympy.nan, sympy.zoo)


def _are_equal(gold: Any, answer: Any) -> bool:
    if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        return _are_equal_matrices(gold, answer)
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        return _are_equal_expressions(gold, answer)
    if _is_truth_value(gold) or _is_truth_value(answer):
        return False
    if isinstance(gold, Relational) and isinstance(answer, Relational):
        if _are_equal_relations(gold, answer):
            return True
        if isinstance(gold, sympy.Eq) or isinstance(answer, sympy.Eq):
            return False
    return _verify(gold, answer)


def _is_truth_value(parsed: Any) -> bool:
    """Return whether an equation has no variables, and so is just true or false."""
    return isinstance(parsed, BooleanAtom | Relational) and not parsed.free_symbols


def _verify(gold: Any, answer: Any) -> bool:
    return bool(
        verify(
            gold,
            answer,
            numeric_precision=VERIFY_DIGITS,
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
    )


def _are_equal_matrices(gold: Any, answer: Any) -> bool:
    gold, answer = gold.doit(), answer.doit()
    if getattr(gold, "shape", None) != getattr(answer, "shape", None):
        return False
    return all(map(_are_equal_expressions, gold.flat(), answer.flat()))


def _are_equal_expressions(gold: Any, answer: Any) -> bool:
    if gold == answer:
        return True
    if _is_huge(gold) or _is_huge(answer):
        return False
    has_decimals = gold.has(sympy.Float) or answer.has(sympy.Float)
    gold, answer = (_without_series(_with_fractions(one)) for one in (gold, answer))
    if not gold.free_symbols and not answer.free_symbols:
        return _are_equal_numbers(gold, answer, has_decimals=has_decimals)
    num_points = 0
    for values in _points(gold, answer):
        one, other = _value(gold, values), _value(answer, values)
        if one is None or other is None:
            continue
        if _is_close(one, other, MAX_RELATIVE_ERROR / 10 if has_decimals else EXACT):
            num_points += 1
            if num_points == MIN_POINTS:
                return True
        elif one.is_real and other.is_real:
            return False
    return _verify(gold, answer)


def _are_equal_numbers(gold: Any, answer: Any, *, has_decimals: bool) -> bool:
    one, other = gold.doit(), answer.doit()
    if one == other:
        return True
    are_fractions = one.is_Rational and other.is_Rational
    if are_fractions and not has_decimals:
        return False
    one, other = _value(one, {}), _value(other, {})
    if one is None or other is None:
        return _verify(gold, answer)
    if has_decimals:
        return bool(abs(one - other) <= MAX_ERROR) and _is_close(one, other, MAX_RELATIVE_ERROR)
    size = 2 * math.ceil(abs(sympy.log(abs(one) + 1, 10).evalf(5))) + DIGITS
    return _is_close(gold.evalf(size), answer.evalf(size), sympy.Float(10) ** (15 - size))


def _are_equal_relations(gold: Any, answer: Any) -> bool:
    """Return whether one equation or inequality is a multiple of the other."""
    sides = [sympy.together(one.lhs - one.rhs) for one in (gold, answer)]
    if isinstance(gold, sympy.Eq):
        sides = [side.as_numer_denom()[0] for side in sides]
    ratios = []
    for values in _points(*sides):
        one, other = (_value(_with_fractions(side), values) for side in sides)
        if one is not None and other:
            ratios.append(one / other)
    if len(ratios) < MIN_POINTS or not all(_is_close(ratios[0], one, EXACT) for one in ratios):
        return False
    if isinstance(gold, sympy.Eq | sympy.Ne):
        return type(gold) is type(answer) and ratios[0] != 0
    return type(gold) is (type(answer) if ratios[0] > 0 else type(answer.reversed))


def _points(*expressions: Any) -> Iterator[dict[Any, Any]]:
    """Yield values for all variables; ``i`` is imaginary."""
    symbols = set().union(*(one.free_symbols for one in expressions))
    names = sorted({symbol.name for symbol in symbols})
    is_integral = any(one.has(*_INTEGER_FUNCTIONS) or _has_sign(one) for one in expressions)
    for seed, (low, high) in enumerate(RANGES):
        draw = random.Random(seed)
        values: dict[str, Any] = {}
        for name in names:
            fraction = low + (high - low) * sympy.Rational(draw.randrange(1, 1000), 1009)
            number = sympy.Integer(draw.randrange(2, 12)) if is_integral else fraction.evalf(80)
            values[name] = number
        values["i"] = sympy.I
        yield {symbol: values[symbol.name] for symbol in symbols}


def _has_sign(expression: Any) -> bool:
    """Return whether there is a power such as ``(-1)^n``, which is real for integers only."""
    return any(
        power.base.is_negative and power.exp.free_symbols for power in expression.atoms(sympy.Pow)
    )


def _value(expression: Any, values: dict[Any, Any]) -> Any:
    """Return the value at a point, or None if there is none."""
    value = expression.subs(values) if values else expression
    value = (value.doit() if value.has(*_OPERATIONS) else value).evalf(DIGITS)
    is_finite = value.is_number and not value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo)
    return value if is_finite else None


def _is_close(one: Any, other: Any, relative: Any) -> bool:
    return bool(abs(one - other) <= relative * max(abs(one), abs(other)))


def _with_fractions(expression: Any) -> Any:
    """Replace decimals by the fractions that they are."""
    decimals = {one: sympy.Rational(str(one)) for one in expression.atoms(sympy.Float)}
    return expression.xreplace(decimals) if decimals else expression


def _without_series(expression: Any) -> Any:
    """Replace infinite sums by their general term; such sums are equal term by term."""
    return expression.replace(_is_series, _term_of) if expression.has(*_SERIES) else expression


def _is_series(part: Any) -> bool:
    if not isinstance(part, _SERIES):
        return False
    _, first, last = part.limits[0]
    return not (first.is_Integer and last.is_Integer and last - first <= MAX_TERMS)


def _term_of(series: Any) -> Any:
    variable, first, last = series.limits[0]
    place = 1 + first / 7 + (0 if last is sympy.oo else last) / 11
    return place * series.function.subs(variable, sympy.Rational(1009, 647))


def _is_huge(expression: Any) -> bool:
    """Return whether a power or factorial of numbers has too many digits to be computed."""
    for part in sympy.postorder_traversal(expression):
        if part.free_symbols or not isinstance(part, sympy.Pow | sympy.factorial):
            continue
        with contextlib.suppress(TypeError, ValueError):
            try:
                *base, size = (abs(float(one)) for one in part.args)
                digits = size * math.log10(base[0] if base else size) if size > 1 else 0
            except OverflowError:
                return True
            if digits > MAX_DIGITS:
                return True
    return False
