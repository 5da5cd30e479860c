"""What `import dcp_s3` gives, and what it costs."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dcp_s3


def test_dir_is_what_is_public() -> None:
    assert dir(dcp_s3) == sorted(dcp_s3.__all__)
    assert not [name for name in dir(dcp_s3) if name.startswith("_") and name != "__version__"]


@pytest.mark.parametrize("name", [name for name in dcp_s3.__all__ if name != "__version__"])
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(dcp_s3, name)
    assert (found.__name__ if inspect.ismodule(found) else found.__module__).startswith("dcp_s3.")
    assert found.__doc__


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'dcp_s3' has no attribute 'S3Storagewriter'"):
        dcp_s3.S3Storagewriter  # type: ignore[attr-defined] # noqa: B018
    program = "import dcp_s3; dcp_s3.S3StorageWritr"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.rstrip().endswith("Did you mean: 'S3StorageWriter'?")


def test_torch_is_imported_only_with_what_needs_it() -> None:
    program = "import sys, dcp_s3; assert 'torch' not in sys.modules; dcp_s3.Policy, dcp_s3.S3StorageWriter"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# --- help -----------------------------------------------------------------------------------------------


def test_the_page_of_help_has_every_public_name_once() -> None:
    page = (dcp_s3.__doc__ or "").partition("``s3://bucket/run``.\n")[2]
    assert sorted(re.findall(r"\w+", "".join(re.findall(r"^    .*\n", page, re.MULTILINE)))) == sorted(dcp_s3.__all__)


def test_help_begins_with_the_page_and_ends() -> None:
    text = pydoc.plain(pydoc.render_doc(dcp_s3))
    assert text.index("A training loop needs five lines") < text.index("Looking into checkpoints") < 10_000
    assert "class CheckpointManager" in text


def test_names_are_the_same_to_type_checkers_and_at_run_time() -> None:
    tree = ast.parse(Path(dcp_s3.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    # ``as`` makes a name public to type checkers.
    checked = {name.asname: node.module for node in imports for name in node.names if name.asname == name.name}
    checked = {name: f"dcp_s3.{name}" if module == "dcp_s3" else module for name, module in checked.items()}
    assert checked == dcp_s3._MODULES
    assert list(dcp_s3.__all__) == sorted(dcp_s3.__all__)
    assert (Path(dcp_s3.__file__).parent / "py.typed").exists()


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """Importing ``dcp_s3.x`` sets the attribute ``x`` of the package."""
    for name in set(dcp_s3.__all__) - {"__version__"}:
        if importlib.util.find_spec(f"dcp_s3.{name}") is not None:
            assert inspect.ismodule(getattr(dcp_s3, name)), name


def test_a_star_brings_every_name_and_values_are_pickled_by_theirs() -> None:
    namespace: dict[str, Any] = {}
    exec("from dcp_s3 import *", namespace)
    assert set(dcp_s3.__all__) <= set(namespace)
    for value in (
        dcp_s3.KeepLatest(3) | dcp_s3.KeepDaily(7),
        dcp_s3.SaveEvery(steps=5) | dcp_s3.SaveFirst(),
        dcp_s3.Settings(part_size="8MiB"),
        dcp_s3.CheckpointInfo("s3://bucket/x", "x", "committed", 1, 1.0, 1, 1, 1, extra={"a": 1}),
        dcp_s3.Fused(0, (1, 2)),
    ):
        assert pickle.loads(pickle.dumps(value)) == value
    for kind in (dcp_s3.CheckpointManager, dcp_s3.S3StorageWriter, dcp_s3.prune):
        assert pickle.loads(pickle.dumps(kind)) is kind
