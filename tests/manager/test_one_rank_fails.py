"""What goes wrong on one rank of a manager is told to all, and the next call works."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_s3 import CheckpointManager, errors
from tests.faulty import BUCKET, serve
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.servers import S3Server


class _Module:
    """A Stateful whose methods fail on one rank when they are told to."""

    def __init__(self, value: float = 0.0) -> None:
        self.weight = torch.full((100,), value)
        self.fails = ""

    def _fail(self, where: str) -> None:
        if self.fails == where and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError(f"out of memory in {where}")

    def state_dict(self) -> dict[str, Any]:
        self._fail("state_dict")
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._fail("load_state_dict")
        self.weight = state["weight"]


def _interrupt() -> dict[str, Any]:
    raise KeyboardInterrupt


def _caught(call: Callable[[], Any]) -> tuple[str, str, list[int]]:
    """What it raises: type, text, ranks."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - what it is, is what is looked at
        return type(error).__name__, str(error), sorted(getattr(error, "failures", {}))
    return "nothing", "", []


def _fail_in_the_state(root: str) -> list[Any]:
    seen = []
    module = _Module(1.0)
    last = dist.get_rank() == dist.get_world_size() - 1
    with CheckpointManager(root) as manager:
        manager.save(1, {"module": module}, blocking=True)
        for blocking in (True, False):
            module.fails = "state_dict"
            seen.append(_caught(lambda blocking=blocking: manager.save(2, {"module": module}, blocking=blocking)))  # type: ignore[misc]
            module.fails = ""
            manager.save(2 + blocking, {"module": module}, blocking=blocking)
            manager.wait()
        for where in ("state_dict", "load_state_dict"):
            module.fails = where
            seen.append(_caught(lambda: manager.restore({"module": module})))
            module.fails = ""
            module.weight = torch.zeros(100)
            assert manager.restore({"module": module}) == 3
            assert module.weight.tolist() == [1.0] * 100
        module.state_dict = _interrupt if last else module.state_dict  # type: ignore[method-assign]
        seen.append(_caught(lambda: manager.save(4, {"module": module})))
    return seen


def test_a_state_dict_that_raises_on_one_rank_is_an_error_on_all_and_the_next_call_works(
    memory_server: Any, root: str
) -> None:
    first, last = run_ranks(2, _fail_in_the_state, root)
    assert first[:4] == last[:4]
    for kind, text, ranks in first[:2]:
        assert (kind, ranks) == ("SaveFailedError", [1])
        assert "step 2 is not saved: rank 1 cannot go on: RuntimeError: out of memory in state_dict" in text
    for where, (kind, text, ranks) in zip(("state_dict", "load_state_dict"), first[2:], strict=False):
        assert (kind, ranks) == ("RestoreFailedError", [1])
        assert f"out of memory in {where}" in text
        assert "rank 1" in text
    assert last[4][0] == "KeyboardInterrupt"
    assert first[4][0] == "SaveFailedError"


def _refuse_to_be_made(root: str, directory: str) -> list[Any]:
    alone = dist.get_rank() == 1
    not_a_directory = Path(directory, "file")
    not_a_directory.write_text("")
    wrong: list[dict[str, Any]] = [
        {"settings": {"part_size": "1"}},
        {"settings": {"durability": "local"}},
        {"settings": 5},
        {"retention": "latest:many"},
        {"retention": 5},
        {"root": "http://bucket/run"},
        {"root": 5},
        {"root": f"{root}-other"},
        {"drain_timeout": "long"},
    ]
    seen = []
    for options in wrong:
        given = {"root": root, **(options if alone else {})}
        seen.append(_caught(lambda given=given: CheckpointManager(given.pop("root"), **given))[:2])  # type: ignore[misc]
    # What is there and cannot be used is no reason to stop: saves go to S3.
    with CheckpointManager(root, settings={"spill_dir": str(not_a_directory)} if alone else None) as manager:
        manager.save(1, {"w": torch.ones(3)})
        assert manager.restore({"w": torch.zeros(3)}) == 1
    return seen


def test_arguments_that_are_wrong_on_one_rank_are_an_error_on_all(
    memory_server: Any, root: str, tmp_path: Path
) -> None:
    first, alone = run_ranks(2, _refuse_to_be_made, root, str(tmp_path))
    expected = ["SettingsError", "SettingsError", "SettingsError", "SettingsError", "SettingsError", "InvalidURLError",
                "InvalidURLError", "CheckpointError", "SettingsError"]  # fmt: skip
    assert [kind for kind, _ in alone] == expected
    for number, (kind, text) in enumerate(first):
        assert kind == "CheckpointError"
        if expected[number] != "CheckpointError":
            assert text == (
                f"no CheckpointManager is made: rank 1 cannot go on: {expected[number]}: {alone[number][1]}"
            )
    assert "the ranks have different roots" in first[7][1] == alone[7][1]


def _metrics(root: str) -> list[Any]:
    alone = dist.get_rank() == 1
    state = {"w": torch.ones(3)}
    seen = []
    with CheckpointManager(root) as manager:
        seen.append(_caught(lambda: manager.save(1, state, {"loss": torch.ones(2)} if alone else None))[:2])
        seen.append(_caught(lambda: manager.save(1, {} if alone else state, 5 if alone else None))[:2])  # type: ignore[arg-type]
        seen.append(_caught(lambda: manager.restore(5 if alone else state))[:2])  # type: ignore[arg-type]
        manager.save(1, state, blocking=True)
    return seen


def test_arguments_of_calls_that_are_wrong_on_one_rank_are_an_error_on_all(memory_server: Any, root: str) -> None:
    first, alone = run_ranks(2, _metrics, root)
    assert [kind for kind, _ in alone] == ["SaveProtocolError", "CheckpointError", "CheckpointError"]
    assert [kind for kind, _ in first] == ["SaveFailedError", "SaveFailedError", "CheckpointError"]
    assert all("rank 1 cannot go on" in text for _, text in first)


def _no_thread(root: str) -> list[Any]:
    seen = []
    state = {f"of-{dist.get_rank()}": torch.ones(10)}
    submit = ThreadPoolExecutor.submit

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with CheckpointManager(root) as manager:
        if dist.get_rank() == 1:
            ThreadPoolExecutor.submit = refuse  # type: ignore[method-assign]
        seen.append(_caught(lambda: manager.save(1, state)))
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
        if dist.get_rank() == 0:
            seen[0] = _caught(manager.wait)
        manager.save(2, state)
        manager.wait()
        assert manager.restore(state) == 2
    return seen


def test_a_save_that_can_not_be_begun_on_one_rank_fails_on_all(memory_server: Any, root: str) -> None:
    for kind, text, ranks in (seen for (seen,) in run_ranks(2, _no_thread, root)):
        assert (kind, ranks) == ("SaveFailedError", [1])
        assert "the save of step 1" in text
        assert "failed on rank 1\n  Cause: RuntimeError: can't start new thread" in text


# --- what the log says -----------------------------------------------------------------------------------


def _log_of_failures(root: str) -> list[str]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    logging.getLogger("dcp_s3").addHandler(Keep(logging.WARNING))
    state = {f"of-{dist.get_rank()}": torch.ones(1000)}
    with CheckpointManager(root) as manager:
        manager.save(1, state, blocking=True)
        for number, blocking in enumerate((True, False)):
            with pytest.raises(errors.SaveFailedError) as caught:  # noqa: PT012 - the one or the other
                manager.save(2 + number, state, blocking=blocking)
                manager.wait()
            assert sorted(caught.value.failures) == [0, 1, 2]
            lines.append(str(caught.value))
    return lines


def test_a_failure_of_all_ranks_is_one_panel_with_cause_ranks_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serve(monkeypatch) as server:
        server.rule = lambda request: (
            Fault.error(403, "AccessDenied")
            if request.operation == "PutObject" and "/step-00000001/" not in request.key
            else None
        )
        first, second, third = run_ranks(3, _log_of_failures, f"s3://{BUCKET}/run")
    assert len(first) == 4  # logged and raised, twice
    assert first[0] == first[1]
    assert first[2] == first[3]
    assert second == third == first[1::2]
    for step, text in ((2, first[0]), (3, first[2])):
        assert text.count("AccessDeniedError") == 1
        assert all(len(line) <= 100 for line in text.splitlines())
        head, cause, *_ = text.splitlines()
        assert head == f"the save of step {step} to s3://{BUCKET}/run/step-{step:08} failed on ranks 0 to 2"
        assert cause.startswith("  Cause: AccessDeniedError: ")
        assert text.endswith("  Last good: step 1\n  Resume: manager.restore(state)")


# --- damage of what several ranks read -------------------------------------------------------------------


def _save_shared(root: str) -> None:
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, {"same": torch.full((1000,), float(step))}, blocking=True)


def _restore_damaged(root: str) -> tuple[int | None, float]:
    state = {"same": torch.zeros(1000)}
    with CheckpointManager(root) as manager:
        return manager.restore(state), float(state["same"][0])


def test_damage_that_one_rank_finds_for_the_others_is_passed_over(root: str, s3: Any, memory_server: S3Server) -> None:
    run_ranks(2, _save_shared, root)
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    listed = s3.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/step-00000002/__")["Contents"]
    for found in listed:
        s3.put_object(Bucket=bucket, Key=found["Key"], Body=b"\0" * found["Size"])
    assert run_ranks(2, _restore_damaged, root) == [(1, 1.0), (1, 1.0)]
