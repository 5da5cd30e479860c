"""The Hugging Face Trainer: its checkpoints on S3, and nothing of them on local disk.

>>> from dcp_s3.integrations.transformers import S3Trainer
>>> trainer = S3Trainer(model=model, args=args, train_dataset=data, checkpoint_root="s3://bucket/run")
>>> trainer.train(resume_from_checkpoint=True)

A TrainerCallback cannot do this: ``on_save`` comes after the Trainer has written its files, and when ``on_train_begin``
comes it has decided where in the data it begins.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_s3.errors import CheckpointError
from dcp_s3.integrations.requirement import require
from dcp_s3.integrations.training_parts import ModelPart
from dcp_s3.manager.manager import CheckpointManager
from dcp_s3.retention.policy import KeepBest, KeepLatest, PolicyFunction
from dcp_s3.settings import SettingsLike
from dcp_s3.url import URLLike, is_s3_url, parse_url

require("transformers", "transformers", "5.23", "6")
require("transformers", "accelerate", "1.15", "2")

from transformers import Trainer, TrainerState  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from dcp_s3.integrations.accelerate import TrainingPart, check_supported, optimizer_part  # noqa: E402

logger = logging.getLogger(__name__)

PRIVATE = (
    "_save_checkpoint",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_best_model",
)
"""The private methods of Trainer (transformers 5.23) that are overridden here."""

_STATE_FILE = "trainer_state.json"

if TYPE_CHECKING:
    _AnyTrainer = Any
else:
    _AnyTrainer = object


class S3Checkpoints(_AnyTrainer):
    """Puts the checkpoints of a Trainer on S3: ``class MyTrainer(S3Checkpoints, SFTTrainer): pass``.

    They are saved when the Trainer saves (``save_strategy``, ``save_steps``), in the background, each of them whole or
    not at all: model, optimizer, scheduler, gradient scaler, random number generators and the TrainerState. The
    evaluation's metrics of that step are stored with it, for retention and ``dcp-s3 ls``.

    ``train(resume_from_checkpoint=True)`` goes on from the latest, on any number of ranks, and begins anew if there is
    none yet; a number is a step. A path is one of the Trainer's own checkpoints.

    Args:
        checkpoint_root: ``s3://bucket/run``. Checkpoints are ``{root}/step-00001000`` and so on.
        retention: see `CheckpointManager`. None: ``save_total_limit`` and ``metric_for_best_model`` of the
            TrainingArguments.
        checkpoint_settings: a `Settings`, or a mapping of settings that override the environment.
        args, kwargs: as for the Trainer. Its ``output_dir`` remains, for what is no checkpoint.

    Raises:
        InvalidURLError: ``checkpoint_root`` is not an S3 URL.
    """

    def __init__(
        self,
        *args: Any,
        checkpoint_root: URLLike,
        retention: PolicyFunction | str | None = None,
        checkpoint_settings: SettingsLike = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.checkpoint_root = str(parse_url(checkpoint_root))
        self.retention = retention
        self.checkpoint_settings = checkpoint_settings
        self._manager: Any = None
        self._resumed: _Resumed | None = None

    def train(self, resume_from_checkpoint: str | int | bool | None = None, **kwargs: Any) -> Any:
        """Train, as the Trainer does. Returns when the last checkpoint is committed.

        Args:
            resume_from_checkpoint: True: the latest checkpoint under the root, if there is one. A number: that step.
            kwargs: as for the Trainer.

        Raises:
            SaveFailedError: a checkpoint could not be saved.
            RestoreFailedError, CheckpointNotFoundError, CorruptCheckpointError
            CheckpointError: this is a hyperparameter search, whose trials would share the root, or DeepSpeed.
        """
        check_supported(self.accelerator)
        if kwargs.get("trial") is not None:
            raise CheckpointError(
                f"the trials of a hyperparameter search would all save to {self.checkpoint_root}. Remedy: use Trainer"
            )
        retention = _retention(self.args) if self.retention is None else self.retention
        with (
            CheckpointManager(
                self.checkpoint_root, retention=retention, settings=self.checkpoint_settings, overwrite=True
            ) as self._manager,
            tempfile.TemporaryDirectory() as folder,
        ):
            try:
                if resume_from_checkpoint is not None and not isinstance(resume_from_checkpoint, str):
                    resume_from_checkpoint = self._find(resume_from_checkpoint, Path(folder))
                return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
            finally:
                self._manager = self._resumed = None

    def _find(self, wanted: int | bool, folder: Path) -> str | None:
        """The folder with the state of the Trainer, from which it learns where to go on. None: begin anew."""
        if wanted is False:
            return None
        state = {"trainer": ""}
        step = self._manager.restore(state, None if wanted is True else wanted)
        if step is None:
            logger.warning("nothing was saved under %s yet: training begins anew", self.checkpoint_root)
            return None
        trainer = json.loads(state["trainer"])
        self._resumed = _Resumed(str(folder), step, trainer.pop("best_model_checkpoint"))
        (folder / _STATE_FILE).write_text(json.dumps(trainer))
        return str(folder)

    def _everything(self) -> dict[str, Any]:
        model = self.model_wrapped
        return {
            "model": ModelPart(model),
            "optimizer": optimizer_part(self.optimizer, [model]),
            "training": TrainingPart(self.accelerator, [self.lr_scheduler], [], []),
        }

    # --- what the Trainer calls -------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        state, step = self.state, self.state.global_step
        if state.best_global_step == step:
            state.best_model_checkpoint = self._manager.url(step)
        callbacks = [
            each for each in [*self.callback_handler.callbacks, self.control] if isinstance(each, ExportableState)
        ]
        trainer = dataclasses.asdict(dataclasses.replace(state, stateful_callbacks=callbacks))
        self._manager.save(step, {**self._everything(), "trainer": json.dumps(trainer)}, metrics=_metrics(state))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # Now everything is wrapped and sharded: the model is loaded here, too.
        state = self._everything()
        self._manager.restore(state, self._resumed.step)
        self._resumed.training = state["training"]
        self.state.best_model_checkpoint = self._resumed.best

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_rng_state(checkpoint)
        else:  # after the batches of before were skipped
            self._resumed.training.set_rng()

    def _load_best_model(self) -> None:
        if not is_s3_url(self.state.best_model_checkpoint):
            super()._load_best_model()
            return
        self._manager.wait()
        self._manager.restore({"model": ModelPart(self.model_wrapped)}, self.state.best_global_step)


class S3Trainer(S3Checkpoints, Trainer):
    """`transformers.Trainer` with its checkpoints on S3, see `S3Checkpoints`."""


@dataclasses.dataclass
class _Resumed:
    """The checkpoint with which a training goes on."""

    folder: str
    step: int
    best: str | None
    """URL of the best checkpoint."""
    training: Any = None
    """The `TrainingPart` that was loaded, with the random number generators."""


def _metrics(state: TrainerState) -> dict[str, float]:
    """What was logged at this step."""
    return {
        name: value
        for entry in state.log_history
        if entry.get("step") == state.global_step
        for name, value in entry.items()
        if name != "step" and isinstance(value, (int, float))
    }


def _retention(args: Any) -> PolicyFunction | None:
    if args.save_total_limit is None:
        return None
    latest = KeepLatest(args.save_total_limit)
    metric = args.metric_for_best_model
    if metric is None:
        return latest
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    return latest | KeepBest(1, name, "max" if args.greater_is_better else "min")
