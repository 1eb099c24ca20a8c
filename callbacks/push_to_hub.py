"""Upload the final model to the Hugging Face Hub when training is done."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import lightning as L
from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from lightning.pytorch.callbacks import Callback

from lit_grpo.stopping import get_stop_reason
from lit_grpo.types import setting_error
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.keywords import checks_keywords

log = logging.getLogger(__name__)


@checks_keywords
@checks_types
class PushToHub(Callback):
    """Upload ``final/`` with its model card to the Hugging Face Hub when training is done.

    The card contains the run's config. A run that was stopped uploads nothing. A failed upload does
    not fail the run: a warning gives the command that repeats it. The token comes from the
    environment variable ``HF_TOKEN`` or from ``hf auth login``.

    Args:
        repo_id: Repository on the Hub, such as ``me/my-model``; it is created if there is none.
        private: Make a new repository private; an existing one stays as it is.

    Raises:
        UserError: ``repo_id`` is not a valid id.
    """

    def __init__(self, repo_id: str, private: bool = True) -> None:
        try:
            validate_repo_id(repo_id)
        except ValueError as error:
            key = "PushToHub.init_args.repo_id"
            raise setting_error(key, "an id such as me/my-model", repo_id, str(error)) from error
        self.repo_id = repo_id
        self.private = private
        self._path = Path()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._path = Path(trainer.log_dir or ".") / "final"
        if stage == "fit" and trainer.is_global_zero and get_token() is None:
            log.warning(
                "PushToHub finds no token, so the upload to %s at the end will fail. Set the "
                "environment variable HF_TOKEN, or run `hf auth login`; a login during the run is "
                "used, too.",
                self.repo_id,
            )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Other callbacks write final/ in on_train_end.
        if stage == "fit" and trainer.is_global_zero and get_stop_reason(trainer) is None:
            self._upload()

    def _upload(self) -> None:
        log.info("uploading %s to %s on the Hugging Face Hub", self._path, self.repo_id)
        try:
            api = HfApi()
            url = api.create_repo(self.repo_id, private=self.private, exist_ok=True)
            api.upload_folder(
                repo_id=url.repo_id, folder_path=self._path, commit_message="Upload the final model"
            )
        except Exception as error:  # the model is on disk, so no failure of the Hub may end the run
            log.warning(
                "The upload to %s failed (%s: %s). Repeat it with: hf upload %s %s . %s",
                *(self.repo_id, type(error).__name__, error, self.repo_id),
                *(shlex.quote(str(self._path)), "--private" if self.private else "--no-private"),
            )
        else:
            log.info("uploaded: %s", url)
