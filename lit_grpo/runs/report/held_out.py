"""Tell whether accuracies were measured on the same held-out prompts, so they can be compared.

A run records the hash of its held-out prompts in ``events.jsonl`` when it starts and when it
resumes. What is not recorded, as by older versions of lit-grpo, counts as the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lit_grpo.runs.files.event_log import LEAKED, read_events, read_starts
from lit_grpo.runs.report.history import ACCURACY, UNSCORED, Run


def held_out_hashes(run: Run) -> list[str]:
    """Return for each accuracy of a run the hash of the prompts it was measured on, if recorded."""
    steps = list(run.values(ACCURACY).index) if run.has(ACCURACY) else []
    hashes = dict.fromkeys(steps, "")
    for event in read_starts(run.path):
        hashes |= {step: event.held_out for step in steps if max(1, step) > event.step}
    return list(hashes.values())


def are_comparable(hashes: Sequence[str]) -> bool:
    """Return whether all these are of the same prompts, as far as is known."""
    return len({*hashes} - {""}) <= 1


def accuracies_compare(runs: Sequence[Run]) -> bool:
    """Return whether all accuracies of these runs were measured on the same prompts."""
    return are_comparable([one for run in runs for one in held_out_hashes(run)])


def _accuracy_of(unscored: str) -> str:
    """Return the accuracy that leaves out what a metric of completions without a score counts."""
    return ACCURACY if unscored == UNSCORED else unscored.replace(f"{UNSCORED}@", "val/avg@")


def describe_unscored(run: Run, *, above: float = 0.0) -> list[str]:
    """Return a sentence for each accuracy that leaves out more than a share of the completions."""
    return [
        f"up to {fraction:.0%} of the held-out completions could not be scored ({name}). "
        f"{_accuracy_of(name)} leaves them out."
        for name, fraction in run.unscored_fractions.items()
        if fraction > above
    ]


def held_out_notes(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for each reason why accuracies of these runs are not what they seem."""
    groups: dict[str, list[str]] = defaultdict(list)
    notes = []
    for run in runs:
        notes += _leaks(run)
        notes += [f"{run.label}: {sentence}" for sentence in describe_unscored(run)]
        notes += _left_out(run)
        hashes = held_out_hashes(run)
        if hashes and hashes[-1]:
            groups[hashes[-1]].append(run.label)
        if not are_comparable(hashes):
            notes.append(
                f"{run.label} was resumed with different held-out prompts: do not compare its "
                "accuracies before and after."
            )
    if len(groups) > 1:
        of_runs = " and those of ".join(map(" and ".join, groups.values()))
        notes.append(
            f"The accuracies of {of_runs} were measured on different held-out prompts, or with "
            "other gold answers: do not compare them."
        )
    return notes


def _left_out(run: Run) -> list[str]:
    """Return which sources of a mixture the accuracy leaves out, if it covers any by name."""
    covered = [one for one in run.sources if run.has(f"val/{one}/accuracy")]
    absent = [one for one in run.sources if one not in covered]
    if not covered or not absent:
        return []
    return [
        f"{run.label}: the held-out accuracy covers {', '.join(covered)}, and not "
        f"{', '.join(absent)} (no held-out prompts, or none that model.evaluation.accuracy scored)."
    ]


def _leaks(run: Run) -> list[str]:
    """Return what the run was warned of when it last began."""
    events = read_events(run.path)
    starts = [number for number, one in enumerate(events) if one.kind in ("start", "resume")]
    last = events[starts[-1] :] if starts else []
    return [f"{run.label}: {one.message}" for one in last if one.cause == LEAKED]


def title_of(title: str, metric: str, runs: Sequence[Run]) -> str:
    """Return the title of a picture, which says whether its accuracies cannot be compared."""
    is_mixed = metric == ACCURACY and not accuracies_compare(runs)
    return f"{title}, different prompts" if is_mixed else title
