"""The Hugging Face Trainer: its checkpoints on S3, and nothing of them on local disk.

>>> from dcp_s3.integrations.transformers import S3Trainer
>>> trainer = S3Trainer(model=model, args=args, train_dataset=data, checkpoint_root="s3://bucket/run")
>>> trainer.train(resume_from_checkpoint=True)

A TrainerCallback cannot do this: ``on_save`` comes after the Trainer has written its files, and when ``on_train_begin``
comes it has decided where in the data it begins.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcp_s3 import ranks
from dcp_s3.checkpoint.info import CheckpointInfo, find_step
from dcp_s3.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from dcp_s3.format.layout import step_of
from dcp_s3.integrations import require
from dcp_s3.integrations.training_parts import agree
from dcp_s3.manager.arguments import resolve_policy
from dcp_s3.manager.manager import CheckpointManager
from dcp_s3.retention.policy import AnyOf, KeepLatest, PolicyFunction, Reasons
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.url import CheckpointURL, URLLike, is_s3_url, parse_url

require("transformers", "transformers", "5.23", "6")
require("transformers", "accelerate", "1.15", "2")

from transformers import PreTrainedModel, Trainer  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402
from transformers.trainer_utils import HubStrategy  # noqa: E402

from dcp_s3.integrations.accelerate import TrainingPart, check_supported, model_part, optimizer_part  # noqa: E402

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
    not at all: model, optimizer, scheduler, gradient scaler, random number generators and the TrainerState; and beside
    them the files of the model's configuration and tokenizer. The evaluation's metrics of that step are stored with it,
    for retention and ``dcp-s3 ls``.

    ``train(resume_from_checkpoint=True)`` goes on from the latest, on any number of ranks, and begins anew if there is
    none yet; a number is a step under the root, an S3 URL a checkpoint under any root. A path is one of the Trainer's
    own checkpoints. No checkpoint under the root may be later than the step at which the training begins.

    Args:
        checkpoint_root: ``s3://bucket/run``. Checkpoints are ``{root}/step-00001000`` and so on.
        retention: see `CheckpointManager`. None: ``save_total_limit`` of the TrainingArguments. The Trainer's
            ``best_model_checkpoint`` is kept besides.
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
        self._source: Any = None
        self._resumed: int | None = None  # the step with which this training goes on
        self._best_before: str | None = None  # URL of the best checkpoint until then
        self._training: Any = None  # the part that was loaded, with the random number generators
        self._files: dict[str, bytes] | None = None
        self._best = _KeepBestModel()

    def train(self, resume_from_checkpoint: str | int | bool | None = None, **kwargs: Any) -> Any:
        """Train, as the Trainer does. Returns when the last checkpoint is committed.

        Args:
            resume_from_checkpoint: True: the latest checkpoint under the root, if there is one. A number: that step.
                The URL of a checkpoint of `S3Checkpoints`: that one.

        Raises:
            SaveFailedError: a checkpoint could not be saved.
            RestoreFailedError, CheckpointNotFoundError, CorruptCheckpointError
            CheckpointError: there are later checkpoints under the root than the step at which this training begins.
                Or it is a hyperparameter search, whose trials would share the root, or uses DeepSpeed, or pushes each
                checkpoint to the Hub.
        """
        check_supported(self.accelerator)
        if self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
            raise CheckpointError(
                f"hub_strategy={self.args.hub_strategy.value!r} pushes the files of each checkpoint to the Hub, and "
                'here are none. Remedy: hub_strategy="end", and trainer.push_to_hub() after training'
            )
        if kwargs.get("trial") is not None:
            raise CheckpointError(
                f"the trials of a hyperparameter search would all save to {self.checkpoint_root}. Remedy: use Trainer"
            )
        wanted, source = resume_from_checkpoint, self.checkpoint_root
        if is_s3_url(wanted):
            url = parse_url(str(wanted))
            source = str(CheckpointURL(url.bucket, url.prefix.rpartition("/")[0]))
            wanted = find_step(url.name, resolve_settings(self.checkpoint_settings))
            if wanted is None:
                raise CheckpointError(
                    f"resume_from_checkpoint = {str(url)!r} names no step. Remedy: the URL of a checkpoint, like "
                    f"{url.child('step-00001000')}; or True for the latest under {self.checkpoint_root}",
                    url=str(url),
                )
        self._best = _KeepBestModel()
        policies: list[PolicyFunction | None] = []
        agree(lambda: policies.append(self._policy()), f"the training under {self.checkpoint_root} does not begin")
        limit = self.args.save_total_limit
        with contextlib.ExitStack() as stack:
            self._source = self._manager = stack.enter_context(
                CheckpointManager(
                    self.checkpoint_root, retention=policies[0], settings=self.checkpoint_settings, overwrite=True
                )
            )
            if source != self.checkpoint_root:
                other = CheckpointManager(source, read_only=True, settings=self.checkpoint_settings)
                self._source = stack.enter_context(other)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            try:
                found = wanted if wanted is None or isinstance(wanted, str) else self._find(wanted, Path(folder))
                if wanted is not True:  # that is the latest
                    self._refuse_later(found)
                self.args.save_total_limit = None  # it would be applied to what lies in output_dir
                return super().train(resume_from_checkpoint=found, **kwargs)
            finally:
                self.args.save_total_limit = limit
                self._manager = self._source = self._resumed = self._training = self._files = None

    def _policy(self) -> PolicyFunction | None:
        limit, ours = self.args.save_total_limit or 0, self.retention
        policy = resolve_policy(
            KeepLatest(limit) if ours is None and limit > 0 else ours, resolve_settings(self.checkpoint_settings)
        )
        return None if policy is None else AnyOf((policy, self._best))

    def _refuse_later(self, folder: str | None) -> None:
        """Check that no checkpoint is later than that of the Trainer in a folder, or than the start if it is None."""

        def look() -> tuple[int, int | None]:
            if ranks.rank() > 0:
                return 0, None
            file = None if folder is None else Path(folder, _STATE_FILE)
            start = 0 if file is None or not file.is_file() else json.loads(file.read_text())["global_step"]
            return start, self._manager.latest_step()

        [(start, latest), *_] = agree(look, f"the training under {self.checkpoint_root} does not begin")
        if latest is not None and latest > start:
            raise CheckpointError(
                f"{self.checkpoint_root} has checkpoints up to step {latest}, and this training would begin after step "
                f"{start}: the new checkpoints would be the first that retention deletes, and a restart would take "
                f"step {latest}. Remedy: resume_from_checkpoint=True to go on from there, another checkpoint_root, or "
                f"delete the later ones (`dcp-s3 rm {self._manager.url(latest)}` and so on)",
                url=self.checkpoint_root,
            )

    def _find(self, wanted: int | bool, folder: Path) -> str | None:
        """The folder with the state of the Trainer, from which it learns where to go on."""
        if wanted is False:
            return None
        state = {"trainer": ""}
        step = self._source.restore(state, None if wanted is True else wanted)
        if step is None:
            logger.warning("nothing was saved under %s yet: training begins anew", self.checkpoint_root)
            return None
        trainer = json.loads(state["trainer"])
        best = trainer["best_model_checkpoint"]
        if is_s3_url(best):  # otherwise the Trainer looks for it
            trainer["best_model_checkpoint"], best = None, self._find_best(best, step)
            if best is not None:
                self._best.add(best)
        self._resumed, self._best_before = step, best
        (folder / _STATE_FILE).write_text(json.dumps(trainer))
        return str(folder)

    def _find_best(self, url: str, latest: int) -> str | None:
        """The best checkpoint under this root, to which the run may have been copied. None: it is gone."""
        step = step_of(url)
        try:
            if step != latest:
                self._manager.restore({"trainer": ""}, step)
        except (CheckpointNotFoundError, CorruptCheckpointError) as error:
            logger.warning("the best checkpoint until now, %s, is not considered any more: %s", url, error)
            return None
        return str(self._manager.url(step))

    def _everything(self) -> dict[str, Any]:
        model = self.model_wrapped
        return {
            "model": model_part(model),
            "optimizer": optimizer_part(self.optimizer, [model]),
            "training": TrainingPart(self.accelerator, [self.lr_scheduler], [], []),
        }

    # --- what the Trainer calls -------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        state, step = self.state, self.state.global_step
        if state.best_global_step == step:
            state.best_model_checkpoint = self._manager.url(step)
            self._best.add(state.best_model_checkpoint)
        callbacks = [
            each for each in [*self.callback_handler.callbacks, self.control] if isinstance(each, ExportableState)
        ]
        trainer = dataclasses.asdict(dataclasses.replace(state, stateful_callbacks=callbacks))
        metrics = {
            name: value
            for entry in state.log_history
            if entry.get("step") == step
            for name, value in entry.items()
            if name != "step" and isinstance(value, (int, float))
        }
        if self._files is None:
            agree(self._collect_files, f"step {step} is not saved")
        self._manager.save(
            step,
            {**self._everything(), "trainer": json.dumps(trainer)},
            metrics=metrics,
            attachments=self._files,
        )

    def _collect_files(self) -> None:
        """Read what belongs to the model besides its weights, on the first rank: its configuration and tokenizer, as
        the Trainer writes them into its checkpoints."""
        self._files = {}
        if ranks.rank() > 0:
            return
        model = self.accelerator.unwrap_model(self.model)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        with tempfile.TemporaryDirectory() as folder:
            if adapters := getattr(model, "peft_config", None):
                for name, config in adapters.items():
                    saved = copy.copy(config)
                    saved.inference_mode = True
                    saved.save_pretrained(folder if name == "default" else str(Path(folder, name)))
            elif isinstance(model, PreTrainedModel):
                model.save_pretrained(folder, state_dict={})
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            for path in Path(folder).rglob("*"):
                if path.is_file() and path.suffix not in (".safetensors", ".bin"):
                    self._files[path.relative_to(folder).as_posix()] = path.read_bytes()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # Now everything is wrapped and sharded: the model is loaded here, too.
        state = self._everything()
        self._source.restore(state, self._resumed)
        self._training = state["training"]
        if self._best_before is not None:
            self.state.best_model_checkpoint = self._best_before

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_rng_state(checkpoint)
        else:  # after the batches of before were skipped
            self._training.set_rng()

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if not is_s3_url(best):
            super()._load_best_model()
            return
        self._manager.wait()
        # Not best_global_step: that one may not have been saved.
        self._manager.restore({"model": model_part(self.model_wrapped)}, step_of(best))


class S3Trainer(S3Checkpoints, Trainer):
    """`transformers.Trainer` with its checkpoints on S3, see `S3Checkpoints`."""


class _KeepBestModel:
    """The policy that keeps the Trainer's ``best_model_checkpoint``. A metric would not do: which of equal values is
    best, and whether a value counts that was not saved, is for the Trainer to say."""

    __name__ = "best_model_checkpoint"

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()

    def add(self, url: str) -> None:
        """Keep this one, and the one before until it is committed. Threads may meanwhile call the policy."""
        self._urls = (*self._urls, url)

    def __call__(self, checkpoints: Sequence[CheckpointInfo], now: float) -> Reasons:
        names = {info.url: info.name for info in checkpoints}
        committed = [names[url] for url in self._urls if url in names]
        return {name: [self.__name__] for name in committed[-1:]}
