"""Refuse keywords that a constructor does not have, and values that it takes only by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NoReturn, TypeVar, get_type_hints

from lit_grpo.types.errors import UserError
from lit_grpo.types.foreign_keys import KEYS
from lit_grpo.types.settings import list_some, shown
from lit_grpo.types.spelling import did_you_mean, other_form

NAMES = {
    **KEYS,
    "model": "model.policy",
    "lr": "model.optimizer.lr",
    "tokenizer": KEYS["processing_class"],
    "args": "args",
    "train_dataloaders": "data.train",
    "val_dataloaders": "data.validation",
    "gpus": "trainer.devices",
    "resume": "ckpt_path",
}
"""Names of other libraries in programs; as a key of a config, ``model`` has another meaning."""
OWNERS = {"model": "GRPOModule", "data": "PromptData", "trainer": "Trainer", "judge": "Judge"}
"""Section of a config -> the class whose arguments its keys are."""
IN_PROGRAMS = {
    "model.optimizer.lr": "optimizer, such as functools.partial(torch.optim.AdamW, lr=1e-5, "
    "weight_decay=0.0)",
    "seed_everything (or model.seed for the training alone)": "seed of GRPOModule",
    "model.rewards (the weight of each)": "weight of Reward objects: MathReward(weight=0.5) "
    "or FunctionReward(my_function, weight=0.5)",
    "run_dir": "run_dir of Trainer",
    "every_n_steps of Checkpoints, among trainer.callbacks": "every_n_steps of Checkpoints, among "
    "the callbacks of Trainer",
    "keep_last of Checkpoints, among trainer.callbacks": "keep_last of Checkpoints, among the "
    "callbacks of Trainer",
    "model.engine (see --config engines/vllm)": "engine of GRPOModule, such as VLLMEngine() of "
    "lit_grpo.rollout",
    KEYS["processing_class"]: "tokenizer of Policy to a path, if it is not the model's own",
    "args": "its values as arguments of GRPOModule, PromptData and Trainer",
    "ckpt_path": "ckpt_path of Trainer.fit",
}
"""Name of a config setting -> what to set in a program, if it is more than the name of a class."""
OF_ROLLOUTS = ("rewards", "group_size", "objective", "advantage", "update", "outage")
"""Settings of GRPOModule that SFTModule, which imitates answers, does not have."""
A_MODEL = "path to the directory into which save_pretrained of the model has written it"

Class = TypeVar("Class", bound=type)


def checks_keywords(of: Class) -> Class:
    """Let a constructor refuse unknown keywords, and values without their names, in words.

    Its signature stays.
    """
    init = of.__init__  # type: ignore[misc]
    parameters = [one for name, one in signature(init).parameters.items() if name != "self"]
    known = [one.name for one in parameters]
    num_placed = sum(one.kind is Parameter.POSITIONAL_OR_KEYWORD for one in parameters)
    by_name = [one.name for one in parameters if one.kind is Parameter.KEYWORD_ONLY]

    @wraps(init)
    def checked(self: object, *args: object, **keywords: object) -> None:
        if len(args) > num_placed and by_name:
            unset = [name for name in by_name if name not in keywords]
            _refuse_nameless(of.__name__, args[num_placed], unset)
        if not keywords.keys() <= {*known}:
            refuse_unknown(type(self).__name__, keywords, known, inner=_inner_names(init))
        init(self, *args, **keywords)

    of.__init__ = checked  # type: ignore[misc]
    return of


def _refuse_nameless(owner: str, value: object, names: Sequence[str]) -> NoReturn:
    raise UserError(
        f"{owner} takes {list_some(names, 8)} by name, got {shown(value)} without one (which of "
        f"them is meant would be a guess). Write {owner}(NAME=...)."
    )


def refuse_unknown(
    owner: str, names: Iterable[str], known: Iterable[str], inner: dict[str, str] | None = None
) -> None:
    """Refuse keywords that a class does not have.

    Args:
        owner: Name of the class.
        known: The keywords that it has.
        inner: Name of a setting -> where in the arguments of the class it belongs.

    Raises:
        UserError: one is unknown.
    """
    known = list(known)
    for name in names:
        if name in known:
            continue
        if (owner, name) == ("Policy", "model"):
            hint = f" Set {A_MODEL}."
        elif owner == "SFTModule" and _section(NAMES.get(name, name)) in OF_ROLLOUTS:
            hint = " Completions are sampled and scored by GRPOModule; SFTModule imitates answers."
        elif f"{name}_variable" in known:  # of a secret
            hint = f" Did you mean {name}_variable?"
        elif name in NAMES:
            hint = f" Set {_in_program(NAMES[name], owner, known)}."
        elif inner and name in inner:
            hint = f" Set {inner[name]} of {owner}."
        else:
            hint = did_you_mean(name, known, similarity=0.8) or other_form(name, known)
        hint = hint or " For settings of other trainers see docs/guides/migrate.md."
        raise UserError(f"{name}: {owner} has no such setting.{hint}")


def _section(key: str) -> str:
    return key.removeprefix("model.").split(".")[0].split(" ")[0]


def _in_program(key: str, owner: str, known: Sequence[str]) -> str:
    """Return the counterpart of a config's key in Python: ``objective.kl.coef of GRPOModule``.

    Args:
        owner: Name of the class that was given the keyword, whose own settings are ``known``.
    """
    if key.startswith("model.optimizer"):
        key = "model.optimizer.lr"
    if key in IN_PROGRAMS:
        return IN_PROGRAMS[key]
    sections = key.split(" ")[0].split(".")
    if sections[0] not in OWNERS:
        return key  # of a class that it names
    depth = next((depth for depth, name in enumerate(sections) if depth and name in known), None)
    outer = ".".join(sections[: depth or 1]) + "."
    return f"{key.replace(outer, '')} of {owner if depth else OWNERS[sections[0]]}"


def _inner_names(init: Any) -> dict[str, str]:
    """Return the fields of a constructor's dataclasses, with the way to each; the first counts."""
    found: dict[str, str] = {}
    level = [("", get_type_hints(init))]
    while level:
        path, hints = level.pop(0)
        for name, kind in hints.items():
            found.setdefault(name, f"{path}{name}")
            if is_dataclass(kind):
                kinds = get_type_hints(kind)
                inner = {one.name: kinds[one.name] for one in fields(kind)}
                level.append((f"{path}{name}.", inner))
    return found
