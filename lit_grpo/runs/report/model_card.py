"""The model card of a final model, ``final/README.md``, with its curves and the Hub's header.

It is made from the trainer and the module, so it also works without a ``config.yaml``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from huggingface_hub import ModelCard, ModelCardData

from lit_grpo import __version__
from lit_grpo.policy import Policy
from lit_grpo.runs.checkpoints.files import read_manifest, read_state
from lit_grpo.runs.checkpoints.resume_checks import enclosing_run
from lit_grpo.runs.files.config import read_config
from lit_grpo.runs.files.secrets import without_secrets
from lit_grpo.runs.report.history import ACCURACY, UNSCORED, Run, load_runs
from lit_grpo.runs.report.setting_changes import describe_changes
from lit_grpo.types import UserError
from lit_grpo.types.plain import import_path, plain_value

log = logging.getLogger(__name__)

TEMPLATE = Path(__file__).with_name("model_card.jinja")
RESULTS = {
    "Held-out accuracy": ACCURACY,
    "Reward": "reward/mean",
    "SFT loss": "sft/loss",
}
MIN_STEPS_OF_CURVES = 10
MODULE_SETTINGS = (
    "group_size", "sampling", "objective", "advantage", "update", "lr_schedule", "warmup_steps",
    "seed",
)  # fmt: skip
"""Settings that a card shows of a run without ``config.yaml``, as far as the module has them."""


def write_model_card(
    directory: Path, run_dir: Path, trainer: L.Trainer, module: L.LightningModule
) -> None:
    """Write ``README.md`` and ``curves.png`` into the directory of a final model.

    A card or a picture that fails is left out with a warning.
    """
    with _kept_from_failing("model card"):
        run = _load_run(run_dir)
        has_curves = run is not None and _draw_curves(run, directory / "curves.png")
        card = _make_card(run_dir, run, trainer, module, has_curves=has_curves)
        card.save(directory / "README.md")


def write_exported_card(directory: Path, checkpoint: Path, policy: Policy) -> None:
    """Write ``README.md`` for a model that is made from a checkpoint, which it names with its step.

    Args:
        directory: The model's directory.
        checkpoint: If it lies in the directory of its run, the card names that, and shows the
            settings of its ``config.yaml``.
    """
    with _kept_from_failing("model card"):
        of_run, settings, changes = "", {}, ""
        if (run_dir := enclosing_run(checkpoint)) is not None:
            of_run = f" of {'/'.join(run_dir.resolve().parts[-2:])}"
            settings = read_config(run_dir / "config.yaml")
            changes = describe_changes(run_dir)
        manifest = read_manifest(checkpoint)
        steps = "" if manifest is None else (
            f", after rollout step {manifest.rollout_step}, {manifest.optimizer_step} optimizer "
            "steps"
        )  # fmt: skip
        facts = {
            "Checkpoint": f"{checkpoint.name}{of_run}{steps}",
            "Exported with": f"lit-grpo {__version__}",
            "Start": _start(policy),
            "Adapter": _adapter(policy),
            "Changed at resumes": changes,
        }
        method = "GRPO" if "rewards" in read_state(checkpoint) else "SFT"
        text = _as_yaml(settings) if settings else ""
        _fill(policy, method, facts, {}, text).save(directory / "README.md")


@contextmanager
def _kept_from_failing(name: str) -> Iterator[None]:
    """Log a warning if a file next to the model fails, which must not lose the model."""
    try:
        yield
    except Exception as error:
        log.warning("no %s was written (%s: %s)", name, type(error).__name__, error)


def _load_run(run_dir: Path) -> Run | None:
    try:
        (run,) = load_runs([run_dir])
    except UserError:  # a trainer without loggers
        return None
    return run


def _draw_curves(run: Run, path: Path) -> bool:
    """Draw the curves of a run that is long enough for them; return whether there are any."""
    if run.num_steps < MIN_STEPS_OF_CURVES:
        return False
    with _kept_from_failing(path.name):
        from lit_grpo.runs.report.curves import draw_curves  # matplotlib takes a second

        draw_curves([run], path)
    return path.exists()


def _make_card(
    run_dir: Path, run: Run | None, trainer: L.Trainer, module: Any, *, has_curves: bool
) -> ModelCard:
    is_grpo = hasattr(module, "group_size")
    facts = {
        "Trained with": f"lit-grpo {__version__}, {trainer.global_step} optimizer steps",
        "Start": _start(module.policy),
        "Method": _describe_grpo(module) if is_grpo else "supervised fine-tuning (SFT)",
        "Adapter": _adapter(module.policy),
        "Rewards": _describe_rewards(module.rewards.weights) if is_grpo else "",
        "Data": _describe_data(getattr(trainer, "datamodule", None)),
        "Changed at resumes": describe_changes(run_dir),
    }
    method = "GRPO" if is_grpo else "SFT"
    results = {} if run is None else _results(run)
    settings = _settings(run_dir, trainer, module)
    return _fill(module.policy, method, facts, results, settings, has_curves=has_curves)


def _fill(
    policy: Policy,
    method: str,
    facts: Mapping[str, str],
    results: Mapping[str, tuple[float, float | None]],
    settings: str,
    *,
    has_curves: bool = False,
) -> ModelCard:
    """Return the card of a model; facts without a text are left out."""
    is_adapter = policy.lora is not None and not policy.merge_lora
    header = ModelCardData(
        base_model=_base_model(policy.path),
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["lit-grpo", method.lower()],
    )
    card: ModelCard = ModelCard.from_template(
        header,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        title=f"{method} from {_start(policy)}",
        facts={name: value for name, value in facts.items() if value},
        results=results,
        has_curves=has_curves,
        is_adapter=is_adapter,
        settings=settings,
    )
    return card


def _start(policy: Policy) -> str:
    if policy.path:
        return policy.path
    assert policy.architecture is not None
    return f"a {policy.architecture.get('model_type')} model with random weights"


def _adapter(policy: Policy) -> str:
    return f"LoRA of rank {policy.lora.rank}" if policy.lora else ""


def _base_model(path: str | None) -> str | None:
    """Return the id on the Hub of the model that training started from, if it has one.

    The Hub accepts only ids. A directory counts as the model that its own card names, so that GRPO
    after SFT names the model that SFT started from.
    """
    if path is None or not Path(path).exists():
        return path
    card = Path(path, "README.md")
    if not card.is_file():
        return None
    base = ModelCard.load(card, ignore_metadata_errors=True).data.get("base_model")
    return base if isinstance(base, str) and not Path(base).exists() else None


def _describe_grpo(module: Any) -> str:
    """Return ``GRPO: surrogate clip, aggregation token, …``, which are the keys of a preset."""
    objective, advantage = module.objective, module.advantage
    loss = {"surrogate": objective.surrogate, "aggregation": objective.aggregation}
    if objective.function is not None:
        loss = {"objective function": objective.function}
    compared = {"baseline": advantage.baseline, "deviation": advantage.deviation}
    if advantage.function is not None:
        compared = {"advantage function": advantage.function}
    choices = ", ".join(
        f"{name} {import_path(choice) if callable(choice) else choice}"
        for name, choice in (loss | compared).items()
    )
    kl = f"KL coefficient {objective.kl.coef:g}"
    return f"GRPO: groups of {module.group_size}, {choices}, {kl}"


def _describe_rewards(weights: Mapping[str, float]) -> str:
    return ", ".join(
        name if weight == 1 else f"{name} (weight {weight:g})" for name, weight in weights.items()
    )


def _describe_data(data: Any) -> str:
    """Return the class of the data, and the files or the sources that it trains on."""
    if data is None:
        return ""
    train, sources = getattr(data, "train", None), getattr(data, "sources", None)
    names = ", ".join(map(str, train)) if isinstance(train, list) else ""
    if isinstance(sources, Mapping):
        names = "; ".join(f"{name} = {_describe_data(one.data)}" for name, one in sources.items())
    return type(data).__name__ + (f": {names}" if names else "")


def _results(run: Run) -> dict[str, tuple[float, float | None]]:
    """Return the first and the last value of each result that was logged; None if it was one.

    The name of a result says at which step its last value was measured, if not at the end.
    """
    logged = [(name, metric) for name, metric in RESULTS.items() if run.has(metric)]
    notes = {}
    if fraction := run.unscored_fractions.get(UNSCORED):
        notes[ACCURACY] = f", without up to {fraction:.0%} that could not be scored"
    return {
        f"{name} {run.when(metric)}".strip() + notes.get(metric, ""): run.change(metric)
        for name, metric in logged
    }


def _settings(run_dir: Path, trainer: L.Trainer, module: Any) -> str:
    """Return the run's ``config.yaml``, or else what the module knows, as YAML without secrets."""
    config = run_dir / "config.yaml"
    if config.is_file():
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    else:
        known = {name: getattr(module, name, None) for name in MODULE_SETTINGS}
        settings = {
            name: plain_value(value, import_path)
            for name, value in known.items()
            if value is not None
        }
        settings |= {"optimizer": _describe_optimizer(trainer), "max_steps": trainer.max_steps}
    return _as_yaml(settings)


def _as_yaml(settings: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(
        without_secrets(settings),
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
    return text


def _describe_optimizer(trainer: L.Trainer) -> dict[str, Any]:
    (optimizer,) = trainer.optimizers
    group = optimizer.param_groups[0]
    return {"class_path": type(optimizer).__name__, "lr": group.get("initial_lr", group["lr"])}
