"""The examples in docstrings run, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import dcp_s3
from dcp_s3 import events
from tests.faulty import BUCKET, FaultyServer, serve

_MAIN = ("CheckpointCatalog", "CheckpointManager", "S3Stager", "S3StorageReader", "S3StorageWriter")
_DCP = (AsyncStager, StorageReader, StorageWriter)


def _documented() -> Iterator[tuple[str, Any]]:
    """What a user calls: the public names, and the public methods of the main classes that DCP does not call."""
    yield "dcp_s3", dcp_s3
    for name in dcp_s3.__all__:
        if name != "__version__":
            yield name, getattr(dcp_s3, name)
    for name in _MAIN:
        kind = getattr(dcp_s3, name)
        for member in dir(kind):
            found = inspect.getattr_static(kind, member)
            called = inspect.isfunction(found) and not inspect.iscoroutinefunction(found)
            of_dcp = any(base in kind.__mro__ for base in _DCP) and any(hasattr(base, member) for base in _DCP)
            if not member.startswith("_") and not of_dcp and (called or isinstance(found, property)):
                yield f"{name}.{member}", found


def _examples(name: str, found: Any) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=False)
    return [test for test in finder.find(found, name, globs={}) if test.examples]


_NAMED = dict(_documented())


@pytest.mark.parametrize("name", _NAMED)
def test_it_has_an_example(name: str) -> None:
    assert _examples(name, _NAMED[name]), f"{name} has no example (>>>) in its docstring"


def train(state: dict[str, Any]) -> None:
    state["weight"] += 1
    state["step"] += 1


def validate(state: dict[str, Any]) -> float:
    return float(1 / (1 + state["weight"].sum()))


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the page of `help(dcp_s3)` says of the examples."""
    server = FaultyServer()
    with serve(monkeypatch, server):
        assert BUCKET == "bucket"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(events, "_totals", events.Stats())  # other tests of this process have counted, too
        state = {"weight": torch.arange(8.0).view(4, 2), "step": 0}
        with dcp_s3.CheckpointManager("s3://bucket/run") as manager:
            for step, loss in ((1000, 1.25), (2000, 1.5)):
                manager.save(step, {**state, "step": step}, {"val_loss": loss}, blocking=True)
        public = {name: getattr(dcp_s3, name) for name in dcp_s3.__all__}
        yield {**public, "state": state, "train": train, "validate": validate, "torch": torch, "dcp": dcp, "time": time}


def _run(test: doctest.DocTest, namespace: dict[str, Any]) -> None:
    test.globs = namespace
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    assert runner.run(test, out=said.append, clear_globs=False).failed == 0, "".join(said)


@pytest.mark.parametrize("name", _NAMED)
def test_its_example_runs(name: str, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("dcp_s3"), "level", logging.CRITICAL)
    for test in _examples(name, _NAMED[name]):
        namespace["state"]["step"] = 0
        _run(test, namespace)


def _others() -> Iterator[tuple[str, doctest.DocTest]]:
    """Examples elsewhere in dcp_s3, of what is not public."""
    known = {getattr(found, "__doc__", None) for found in _NAMED.values()}
    for path in sorted(Path(dcp_s3.__file__).parent.rglob("*.py")):
        if ">>> " not in path.read_text():
            continue
        module = ".".join(path.relative_to(Path(dcp_s3.__file__).parents[1]).with_suffix("").parts)
        if module.startswith("dcp_s3.integrations.") and module != "dcp_s3.integrations.dcp":
            continue  # their frameworks are not installed here
        found = importlib.import_module(module.removesuffix(".__init__"))
        for test in doctest.DocTestFinder().find(found, module):
            if test.examples and test.docstring not in known:
                yield test.name, test


_OTHERS = dict(_others())


def test_examples_elsewhere_run(namespace: dict[str, Any]) -> None:
    for test in _OTHERS.values():
        _run(test, dict(namespace))
