"""Find the answer in prose: in the sentence after a mark, or at the end of a text."""

from __future__ import annotations

import re

from lit_grpo.rewards.math_answers.answers import Answer, parse_answer
from lit_grpo.rewards.math_answers.notation import ASSIGNMENT, clean
from lit_grpo.rewards.math_answers.quantities import NUMBER, RATIO, with_plain_fractions

_DISPLAY = re.compile(
    r"\$\$(?P<dollars>.+?)(?:\$\$|\Z)|\\\[(?P<bracket>.+?)(?:\\\]|\Z)"
    r"|(?P<environment>\\begin\{(?P<name>\w+\*?)\}.+?\\end\{(?P=name)\})",
    re.DOTALL,
)
_FORMULA = re.compile(r"\$[^$\n]+\$|\\\(.+?\\\)|" + _DISPLAY.pattern.replace("|\\Z", ""), re.DOTALL)
_EMPHASIS = re.compile(r"\*\*|__|`|(?<![\w*])\*(?=\w)|(?<=[\w.])\*(?!\w)")
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_CALCULATION = re.compile(r"<<[^<>\n]{1,80}>>")
"""GSM8K's annotations, such as ``<<48/2=24>>``."""
_FILLER = re.compile(
    r"(?:[,:=\s]+|(?:[a-z]+ly|therefore|thus|hence|then|just|about|around|indeed|now|also|equal to"
    r"|given by|found to be|going to be|that|so)\b)+",
    re.IGNORECASE,
)
_NOTE = re.compile(r"(?<=[\w$%}])\s+\((?!\s*mod)[^()]*[A-Za-z]{3,}[^()]*\)(?=\s*[.!]?\s*$)")
"""A remark such as "18 (eggs)"."""
_SPELLED_OUT = re.compile(r"[A-Za-z][A-Za-z -]+\(([^()]*\d[^()]*)\)")
"""A number as in "eighteen (18)"."""
_SENTENCE_END = re.compile(
    r"(?<=\S)[.;!?](?=\s|$)|,?\s(?:because|since|so|which|where|as|after|when|if)\s"
    r"|,\s(?:and|but|while|with|leaving|making|not)\s(?![\d$\\-])"
)
_OPENING_OF = {")": "(", "]": "[", "}": "{"}
_VERB = re.compile(
    r"(?:\b(?:is|are|was|be|equals|equal to)\b|(?<![<>!\\])=)(?!.*\b(?:is|are|was)\b)"
)
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|textbf) ?\{[^{}]*\}|\\\w+")
_POWER = r"-?\d+(?:\.\d+)? ?\^ ?\{?-?\d+\}?"
# A sign after a digit or a bracket is an operator, and an exponent is not a number of its own.
_NUMBER = re.compile(
    rf"(?<!not )(?<![\d.,)}}\w^_])(?<![\^_]\{{)(?:{RATIO}|{_POWER}|{NUMBER})"
    r"|(?<!not )(?<![\^_\d.])(?<![\^_]\{)\d+(?:\.\d+)?",
    re.IGNORECASE,
)

_OPERAND = r"(?:\d+(?:\.\d+)?[a-z]?|[a-z])(?:\^\d)?"
_ALGEBRA = re.compile(
    rf"(?<![^\s:,=])(?<!\d )-?{_OPERAND}(?: ?(?:[-+*/]|\\cdot|\\times) ?{_OPERAND})+$",
    re.IGNORECASE,
)
"""Letters and numbers with operators between them at the end of a text, such as ``3x + 2``."""

_OPERATOR = r"(?:[-+*/×÷·−]|\\(?:cdot|times|div)\b)"
_OPERATOR_BEFORE = re.compile(rf"\d%? *{_OPERATOR} *$")
_OPERATOR_AFTER = re.compile(rf"%? *{_OPERATOR} *\d")
"""What stands beside the operands of a calculation of numbers alone."""


def answer_in_lines(text: str) -> Answer | None:
    """Return the formula or the equations for several variables that a text starts with."""
    if display := _DISPLAY.match(text):
        return parse_answer(display["dollars"] or display["bracket"] or display["environment"])
    return _equations([line for line in text.splitlines() if line.strip()])


def answer_in_sentence(text: str) -> Answer | None:
    """Return the answer in a line, which may be a whole sentence around it."""
    answer = parse_answer(text)
    if answer is None or answer.number is not None:
        return answer
    text = _without_open_end(text)
    text = _NOTE.sub("", _EMPHASIS.sub("", text))
    filler = _FILLER.match(text)
    sentence = _SENTENCE_END.split(text[filler.end() :] if filler else text, maxsplit=1)[0]
    if spelled_out := _SPELLED_OUT.fullmatch(sentence):
        sentence = spelled_out[1]
    answer = parse_answer(sentence)
    if answer is None or answer.number is not None or not has_prose(sentence):
        return answer
    return _answer_in_prose(sentence) or (None if answer.is_sentence else answer)


def last_answer(text: str) -> Answer | None:
    """Return what the last line says, else the last formula or number."""
    text = _CALCULATION.sub("", text)
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    if equations := _equations(lines[::-1]):
        return equations
    line = lines[-1]
    if equations := _equations(line.split(",")):
        return equations
    if formula := _algebra_at_end(line):
        return formula
    for bold in _BOLD.findall(line)[::-1]:
        if (answer := parse_answer(bold)) and answer.number is not None:
            return answer
    is_formula = line.count("{") == line.count("}") and re.search(r"[\\\[({^<>]", line)
    is_part = _FORMULA.search(line) or "\\end" in line or "\\]" in line
    return parse_answer(line) if is_formula and not is_part and not has_prose(line) else _last(text)


def has_prose(text: str) -> bool:
    """Return whether a text has two words in a row outside of formulas."""
    return _PROSE.search(_COMMAND.sub("", text)) is not None


def _answer_in_prose(sentence: str) -> Answer | None:
    """Return what a sentence starts with, else what follows its last verb."""
    verb = _VERB.search(sentence)
    formula = _FORMULA.match(sentence)
    first = formula if formula and not has_prose(formula[0]) else _NUMBER.match(sentence)
    if first and not (verb and verb.start() >= first.end()):
        return parse_answer(first[0])
    if verb:
        rest = sentence[verb.end() :].strip()
        return answer_in_sentence(rest) if rest else None
    return _last(sentence)


def _without_open_end(text: str) -> str:
    """Remove closing brackets that were opened before the text, as in "(Answer: 18)"."""
    while (
        text
        and text[-1] in _OPENING_OF
        and text.count(text[-1]) > text.count(_OPENING_OF[text[-1]])
    ):
        text = text[:-1].rstrip(" \"'.")
    return text


def _equations(lines: list[str]) -> Answer | None:
    """Return the equations that lines start with, if they are for several variables."""
    found: dict[str, str] = {}
    for line in lines:
        equation = line.strip(" \t$.,")
        name = equation.partition("=")[0].strip()
        if name in found or not ASSIGNMENT.fullmatch(equation):
            break
        found[name] = equation
    return parse_answer(", ".join(found.values())) if len(found) > 1 else None


def _algebra_at_end(line: str) -> Answer | None:
    """Return the formula with a variable that a line ends with.

    One of numbers alone, such as ``12 + 22``, is a step of a calculation and not its result.
    """
    found = _ALGEBRA.search(line := clean(line))
    if found is None or not re.search(r"[A-Za-z]", _COMMAND.sub("", found[0])):
        return None
    is_unit = found[0] != line and not re.search(r"\d|[-+*]|\\", found[0])  # m/s
    return None if is_unit else parse_answer(found[0])


def _last(text: str) -> Answer | None:
    """Return the last formula or number."""
    *_, formula = None, *_FORMULA.finditer(text)
    if formula and not has_prose(formula[0]):
        return _last_number(text[formula.end() :]) or parse_answer(formula[0])
    return _last_number(text)


def _last_number(text: str) -> Answer | None:
    """Return the last number of the last line with numbers, operands such as 3 + 4 left out."""
    for line in map(with_plain_fractions, map(clean, reversed(text.splitlines()))):
        if numbers := [*_NUMBER.finditer(line)]:
            *_, last = None, *(one for one in numbers if not _is_operand(one, line))
            return parse_answer(last[0]) if last else None
    return None


def _is_operand(number: re.Match[str], line: str) -> bool:
    """Return whether a number is part of a calculation, whose result is another one."""
    before, after = line[: number.start()], line[number.end() :]
    is_added = number[0].startswith(("-", "+")) and re.search(r"\d%? *$", before)
    return bool(is_added or _OPERATOR_BEFORE.search(before) or _OPERATOR_AFTER.match(after))
