"""The Hugging Face Trainer: its checkpoints on S3, and nothing of them on local disk.

>>> from dcp_s3.integrations.transformers import S3Trainer
>>> trainer = S3Trainer(model=model, args=args, train_dataset=data, checkpoint_root="s3://bucket/run")
>>> trainer.train(resume_from_checkpoint=True)

A TrainerCallback cannot do this: ``on_save`` comes after the Trainer has written its files.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from dcp_s3.errors import CheckpointError
from dcp_s3.integrations import require
from dcp_s3.manager.manager import CheckpointManager
from dcp_s3.retention.policy import PolicyFunction
from dcp_s3.url import URLLike, parse_url

require("transformers", "5.23", "6")
require("accelerate", "1.15", "2")

from transformers import Trainer  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from dcp_s3.integrations.accelerate import ModelPart, OptimizerPart, TrainingPart, all_ranks, check_supported  # noqa: E402

logger = logging.getLogger(__name__)

# The private methods of Trainer (transformers 5.23) that are overridden here.
PRIVATE = ("_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state")

_AnyTrainer: Any = object


class S3Checkpoints(_AnyTrainer):
    """Puts the checkpoints of a Trainer on S3: ``class MyTrainer(S3Checkpoints, SFTTrainer): pass``.

    They are saved when the Trainer saves, in the background: model, optimizer, scheduler, gradient scaler, random
    number generators and the TrainerState, with what was logged of that step as metrics.

    ``train(resume_from_checkpoint=True)`` goes on from the latest, on any number of ranks, and begins anew if there is
    none yet; a number is a step under the root. No checkpoint under the root may be later than the step at which the
    training begins.

    Args:
        checkpoint_root: ``s3://bucket/run``. Checkpoints are ``{root}/step-00001000`` and so on.
        retention: see `CheckpointManager`. None: ``save_total_limit`` of the TrainingArguments, and the best
            one by ``metric_for_best_model``.
        args, kwargs: as for the Trainer. Its ``output_dir`` remains, for what is no checkpoint.

    Raises:
        InvalidURLError: ``checkpoint_root`` is not an S3 URL.
    """

    def __init__(
        self, *args: Any, checkpoint_root: URLLike, retention: PolicyFunction | str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.checkpoint_root = str(parse_url(checkpoint_root))
        self.retention = retention
        self._manager: Any = None
        self._resumed: int | None = None  # the step with which this training goes on
        self._training: Any = None  # the part that was loaded, with the random number generators

    def train(self, resume_from_checkpoint: str | int | bool | None = None, **kwargs: Any) -> Any:
        """Train, as the Trainer does. Returns when the last checkpoint is committed.

        Args:
            resume_from_checkpoint: True: the latest checkpoint under the root, if there is one. A number: that step.

        Raises:
            SaveFailedError: a checkpoint could not be saved.
            RestoreFailedError, CheckpointNotFoundError, CorruptCheckpointError
            CheckpointError: there are later checkpoints under the root than the step at which this training begins, it
                uses DeepSpeed, ``resume_from_checkpoint`` is a path, or ``load_best_model_at_end`` is set.
        """
        check_supported(self.accelerator)
        wanted, limit = resume_from_checkpoint or None, self.args.save_total_limit
        if isinstance(wanted, str):
            raise CheckpointError(
                f"resume_from_checkpoint = {wanted!r} is a path. Remedy: the step, a number; to go on from another "
                f"run, `dcp-s3 cp` its checkpoint below {self.checkpoint_root} first"
            )
        if self.args.load_best_model_at_end:
            raise CheckpointError(
                "load_best_model_at_end looks for directories. Remedy: leave it out, and load the best checkpoint "
                "after the training (CheckpointManager.restore of the step 'best')"
            )
        policy, metric = self.retention, self.args.metric_for_best_model
        if policy is None and limit and limit > 0:
            policy = f"latest:{limit}"
            if metric is not None:
                mode = "max" if self.args.greater_is_better else "min"
                policy += f" best:1:eval_{metric.removeprefix('eval_')}:{mode}:drop"
        manager = CheckpointManager(self.checkpoint_root, retention=policy, overwrite=True)
        with manager as self._manager, tempfile.TemporaryDirectory() as folder:
            try:
                resumes = self._find(wanted, folder)
                self.args.save_total_limit = None  # it would be applied to what lies in output_dir
                return super().train(resume_from_checkpoint=folder if resumes else None, **kwargs)
            finally:
                self.args.save_total_limit = limit
                self._manager = self._resumed = self._training = None

    def _find(self, wanted: int | None, folder: str) -> bool:
        """Put the state of the Trainer, from which it learns where to go on, into a folder. False: to begin anew."""
        if wanted is not True:  # that is the latest
            latest = all_ranks().from_first(self._manager.latest_step)
            if latest is not None and latest > (wanted or 0):
                raise CheckpointError(
                    f"{self.checkpoint_root} has checkpoints up to step {latest}, and this training would begin after "
                    f"step {wanted or 0}: retention would delete its new ones first. Remedy: "
                    "resume_from_checkpoint=True to go on from there, another checkpoint_root, or delete the later "
                    "ones (dcp-s3 rm)", url=self.checkpoint_root,
                )  # fmt: skip
        if wanted is None:
            return False
        state = {"trainer": ""}
        self._resumed = self._manager.restore(state, None if wanted is True else wanted)
        if self._resumed is None:
            logger.warning("nothing was saved under %s yet: training begins anew", self.checkpoint_root)
            return False
        trainer = json.loads(state["trainer"])
        trainer["best_model_checkpoint"] = None  # the Trainer would look for a directory
        Path(folder, "trainer_state.json").write_text(json.dumps(trainer))
        return True

    def _everything(self) -> dict[str, Any]:
        model = self.model_wrapped
        return {
            "model": ModelPart(model),
            "optimizer": OptimizerPart(self.optimizer, [model]),
            "training": TrainingPart(self.accelerator, [self.lr_scheduler], [], []),
        }

    # --- what the Trainer calls -------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        state, step = self.state, self.state.global_step
        callbacks = [*self.callback_handler.callbacks, self.control]
        kept = [each for each in callbacks if isinstance(each, ExportableState)]
        trainer = dataclasses.asdict(dataclasses.replace(state, stateful_callbacks=kept))
        logged = (entry.items() for entry in state.log_history if entry.get("step") == step)
        found = {name: value for name, value in itertools.chain(*logged) if isinstance(value, (int, float))}
        metrics = {name: value for name, value in found.items() if name != "step"}
        self._manager.save(step, {**self._everything(), "trainer": json.dumps(trainer)}, metrics)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        pass  # the model is loaded with the optimizer, when everything is wrapped and sharded

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is not None:
            state = self._everything()
            self._manager.restore(state, self._resumed)
            self._training = state["training"]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is not None:  # after the batches of before were skipped
            self._training.set_rng()


class S3Trainer(S3Checkpoints, Trainer):
    """`transformers.Trainer` with its checkpoints on S3, see `S3Checkpoints`."""
