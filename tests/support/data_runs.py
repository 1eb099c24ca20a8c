"""Trainings that record the prompts of every batch, and data for them."""

import json
from pathlib import Path

import lightning.pytorch as pl
import torch
from small_runs import make_trainer

from lit_grpo.data import AdditionData
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.types import Prompt


class Recorder(pl.LightningModule):
    """A module that records the ids of its prompts, batch by batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.tokenizer = byte_tokenizer()
        self.trained: list[list[str]] = []
        self.evaluated: list[list[str]] = []

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def training_step(self, prompts, batch_idx):
        assert all(isinstance(prompt, Prompt) for prompt in prompts)
        self.trained.append([prompt.id for prompt in prompts])
        return self.weight * 1.0

    def validation_step(self, prompts, batch_idx):
        self.evaluated.append([prompt.id for prompt in prompts])

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveEverywhere(pl.Callback):
    """Save a checkpoint in every hook that may do so, with the number of steps so far."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.saved: list[tuple[int, str, Path]] = []

    def save(self, trainer, module, hook):
        if not trainer.sanity_checking:
            path = self.directory / f"{len(self.saved)}.ckpt"
            trainer.save_checkpoint(path)
            self.saved.append((len(module.trained), hook, path))

    def on_train_batch_end(self, trainer, module, *_):
        self.save(trainer, module, "batch end")

    def on_validation_end(self, trainer, module):
        self.save(trainer, module, "validation end")

    def on_train_epoch_end(self, trainer, module):
        self.save(trainer, module, "epoch end")


def fit(data, *callbacks, checkpoint=None, **choices) -> Recorder:
    module = Recorder()
    trainer = make_trainer(*callbacks, **({"num_sanity_val_steps": 0} | choices))
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return module


def sums() -> AdditionData:
    """Return data of three steps per epoch, with one prompt left over."""
    return AdditionData(1, train_size=10, validation_size=3, prompts_per_step=3)


def write_rows(path: Path, number: int) -> str:
    """Write questions with numbers from 1 on to a jsonl file; return its path."""
    rows = [{"question": f"q{n}", "answer": str(n), "level": n % 3} for n in range(1, number + 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


SHARD_SIZES = (7, 5, 4)


def write_shards(directory: Path) -> Path:
    """Write sums to three files of a directory, each a shard; return the directory."""
    directory.mkdir()
    for shard, size in enumerate(SHARD_SIZES):
        rows = [{"prompt": f"{shard}+{n}=", "answer": str(shard + n)} for n in range(size)]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (directory / f"part{shard}.jsonl").write_text(lines)
    return directory


def flat(batches: list[list[str]]) -> list[str]:
    return [prompt_id for batch in batches for prompt_id in batch]
