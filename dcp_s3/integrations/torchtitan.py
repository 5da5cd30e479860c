"""torchtitan on S3: `S3CheckpointManager` takes the place of torchtitan's CheckpointManager in ``config.checkpoint``.
torchtitan decides when to save and load which states, this decides how. See docs/torchtitan.md."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from dcp_s3 import errors
from dcp_s3.failures import name_failed
from dcp_s3.format.layout import step_of
from dcp_s3.integrations import require
from dcp_s3.integrations.saves import Saves, load_state
from dcp_s3.manager.agree import Ranks
from dcp_s3.manager.background import retain
from dcp_s3.manager.select_checkpoint import ChosenCheckpoint, choose, impatient, latest_order, step_order
from dcp_s3.retention.catalog import CheckpointCatalog
from dcp_s3.retention.policy import KeepLatest, parse_policy, policy_from_settings
from dcp_s3.retention.prune import check_grace
from dcp_s3.settings import resolve_settings
from dcp_s3.stage.stager import S3Stager
from dcp_s3.url import is_s3_url

require("torchtitan", "0.3", "0.4")

from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager  # noqa: E402
from torchtitan.observability import structured_logger  # noqa: E402
from torchtitan.tools.utils import GarbageCollection  # noqa: E402

# Of CheckpointManager it overrides _load, _wait_for_saving, _purge_stale_checkpoints and _close, and
# calls _states_to_load. They are private: the versions above are those that were looked at.

logger = logging.getLogger(__name__)


class S3CheckpointManager(CheckpointManager):
    """torchtitan's CheckpointManager for a folder on S3: checkpoints are ``{folder}/step-{N}``. A save replaces what an
    earlier run left at its step. One that fails in the background is logged at once, and raised by the next `save` or
    `close`.

    Raises:
        SettingsError: ``retention`` is not a policy, or the folder is not on S3.
        InvalidURLError
        ValueError: ``last_save_in_hf``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        retention: str = ""
        """Which checkpoints stay, for example "latest:3 every:10000". Empty: the policy in
        DCP_S3_RETENTION, or without one the latest keep_latest_k."""

        def __post_init__(self) -> None:
            given: Any = self
            path = (given.initial_load_path or "").strip()
            is_ours = given.initial_load_in_hf and not given.initial_load_in_hf_quantized and is_s3_url(path)
            if is_ours:
                given.initial_load_path = None  # torchtitan has no reader for it, and refuses it
            CheckpointManager.Config.__post_init__(self)
            if is_ours:
                given.initial_load_path = path
            parse_policy(self.retention)

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        if not self.enable:
            return
        if not is_s3_url(self.folder):
            raise errors.SettingsError(
                f"S3CheckpointManager needs a folder on S3, and the folder is {self.folder}. Remedy: set "
                "checkpoint.folder to an s3:// URL, or use torchtitan's CheckpointManager.Config"
            )
        if self.last_save_in_hf:
            raise ValueError("last_save_in_hf is not supported on S3. Remedy: leave it out, then `dcp-s3 export`")
        self._ranks = Ranks(self.pg)
        self._chosen: ChosenCheckpoint | None = None

        def configure() -> None:
            self._settings = resolve_settings(None)
            policy = parse_policy(config.retention) if config.retention else policy_from_settings(self._settings)
            if policy is None and config.keep_latest_k:
                policy = KeepLatest(config.keep_latest_k)
            if policy is not None:
                check_grace(None, self._settings, force=False)  # or every retention run would fail
            # torchtitan makes one of its own only where there is none, and closes it.
            self.stager = S3Stager(self._settings, asynchronous=self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM)
            retention = None
            if policy is not None and self._ranks.is_first:
                retention = retain(self.folder, policy, self._settings)
            self._saves = Saves(self._ranks, self._settings, self.stager, retention=retention)

        why = "no S3CheckpointManager is made: "
        self._ranks.agree(configure, lambda found: errors.CheckpointError(why + name_failed(found), url=self.folder))

    # --- save ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def dcp_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode,
        enable_garbage_collection: bool = False, to_hf: bool = False,
    ) -> Any:  # fmt: skip
        """Save to S3. Returns what torchtitan's does in each mode: None, a Future, or an AsyncSaveResponse."""
        # In threads of this process: another process, as torchtitan has for pinned memory, takes 10 s to start, and
        # gains nothing, because uploads run outside of Python's lock.
        blocking = async_mode == AsyncMode.DISABLED
        step = step_of(checkpoint_id) or 0
        result = self._saves.save(checkpoint_id, step, state_dict, lambda: (None, {}), blocking=blocking)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None if blocking else result

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._saves.wait()

    def _purge_stale_checkpoints(self) -> None:
        pass  # it is called when a save has begun: ours are pruned when it is committed

    # --- load ----------------------------------------------------------------------------------------

    @structured_logger.log_trace_span("checkpoint_load")  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        # torchtitan's looks for the folder and the initial path through fsspec, which needs s3fs for S3.
        catalog = CheckpointCatalog(self.folder, settings=self._settings)
        self._chosen = choose(catalog, self._ranks, latest_order if step == -1 else step_order(step))
        url: str | None
        if self._chosen is not None:
            # A checkpoint of step 0 is a seed: it has nothing but the model.
            url, model_only, hf = self._chosen.url, self._chosen.step == 0, False
        elif step != -1:
            raise errors.CheckpointNotFoundError(
                f"checkpoint.load_step = {step}, and there is no checkpoint under {self.folder}", url=self.folder
            )
        else:
            url, model_only, hf = self.initial_load_path, self.initial_load_model_only, self.initial_load_in_hf
            if hf:
                url = url or getattr(self.sd_adapter, "hf_assets_path", None)
                if self.sd_adapter is None or not url:
                    raise ValueError("initial_load_in_hf needs a state_dict_adapter, and a directory to load from")
            if not url:
                logger.info("there is no checkpoint under %s: a fresh start", self.folder)
                return False
        logger.info("Loading the checkpoint from %s.", url)
        quantized = hf and self.initial_load_in_hf_quantized
        self.dcp_load(self._states_to_load(model_only), url, from_hf=hf, from_quantized=quantized)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        if from_quantized or not is_s3_url(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        chosen = self._chosen
        local = chosen is not None and chosen.local
        settings = impatient(self._settings) if local else self._settings
        wanted = self.sd_adapter.to_hf(state_dict) if from_hf else state_dict
        load_state(checkpoint_id, wanted, self._ranks.group, settings, include_uncommitted=local)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(wanted) if from_hf else wanted)
        if chosen is not None:
            self._saves.in_flight.last_good = chosen.step

    # --- end -----------------------------------------------------------------------------------------

    def _close(self) -> None:
        if not hasattr(self, "_saves"):  # it is called even if __init__ has raised
            super()._close()
            return
        self._saves.in_flight.settle()  # failures are kept
        self.save_future = None
        super()._close()
        self._saves.close()
