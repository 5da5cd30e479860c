"""The fenced blocks of our Markdown, and a program that does what a reader of a page does: paste them in order.

    python -m tests.docs.blocks docs/start.md SCRATCH

Python blocks share a namespace. Of the shell's, `dcp-s3`, `torchrun` and `python -m` are run; `pip` and `make`, which
install, are not. A block below `<!-- not run: why -->` is left out; one below `<!-- file: NAME -->` is written there.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
#: Output, formats and configuration, not commands. JSON is parsed, the rest is tested where it belongs.
DATA = {"text", "json", "yaml", "ini", "crontab"}
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>not run|file): (?P<what>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_INSTALL = {"pip", "make"}


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    text: str
    file: str | None
    """The file that it is the content of."""
    not_run: str | None
    """Why it is not run, if it is not."""

    @property
    def runs(self) -> bool:
        """Whether pasting the page does something with it."""
        return self.language in ("python", "sh") and self.not_run is None and not self.installs

    @property
    def installs(self) -> bool:
        """Whether all that it does is to install."""
        return self.language == "sh" and {line.split()[0] for line in self.text.splitlines() if line} <= _INSTALL


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        marked = {match["mark"]: match["what"]}
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(Block(line, match["language"], match["text"], marked.get("file"), marked.get("not run")))
    return found


#: What the reader has before the first block: two checkpoints of a run, and what the fragments of a page name.
_GIVEN = """
import torch
import torch.distributed.checkpoint as dcp
import dcp_s3
from dcp_s3 import CheckpointManager, KeepBest, KeepLatest, S3StorageReader, S3StorageWriter, errors
from torch.distributed.checkpoint.api import CheckpointException
model = torch.nn.Linear(4, 4)
root = "s3://bucket/run"
state = {"model": model, "optim": {"step": torch.zeros(1)}}
"""
_RUN = """
for step in (1000, 2000):
    dcp.save(state, storage_writer=S3StorageWriter(f"{root}/step-{step}", metrics={"val_loss": 1 / step}), no_dist=True)
"""
_TRAINED = _GIVEN + _RUN + "steps, train, validate = 3000, lambda step: None, lambda: 0.5\n"
GIVEN = {
    **dict.fromkeys(("README.md", "start.md", "async.md", "inspect.md", "tutorial.md"), ""),
    "3am.md": _GIVEN
    + """
import os
os.environ["DCP_S3_SPILL_DIR"] = os.path.abspath("nvme/spill")
for step in (800, 900):
    dcp.save(state, storage_writer=S3StorageWriter(f"{root}/step-{step:08}"), no_dist=True)
""",
    **dict.fromkeys(("retention.md", "manager.md"), _TRAINED),
    "export.md": _GIVEN
    + _RUN
    + """
dcp_s3.export(f"{root}/step-1000", "./Llama-3.1-8B", include="model.*", rename={"^model[.]": ""})
torch.save(model.state_dict(), "state.pt")
""",
    "frameworks.md": _GIVEN + _RUN + "import types\ntrainer = types.SimpleNamespace(train=lambda: None)\n",
    "megatron.md": _GIVEN + "dcp.save(state, storage_writer=S3StorageWriter(f'{root}/iter_0001000'), no_dist=True)\n",
}
DEFAULT_GIVEN = _GIVEN + _RUN


def paste(page: Path, scratch: Path) -> None:
    """Paste all of a page, with ``scratch`` as the working directory and for /nvme.

    Raises:
        AssertionError: a command failed.
    """
    os.chdir(scratch)
    (scratch / "nvme" / "spill").mkdir(parents=True)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(GIVEN.get(page.name, DEFAULT_GIVEN), f"<given to {page.name}>", "exec"), namespace)
    for block in blocks(page):
        if not block.runs:
            continue
        if block.file is not None:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
        else:
            for line in block.text.replace("\\\n", " ").splitlines():
                _type(line.replace("/nvme/", f"{scratch}/nvme/"), f"{page.name}:{block.line}")


def _type(line: str, where: str) -> None:
    words = shlex.split(line, comments=True)
    if not words or words[0] in _INSTALL:
        return
    print(f"$ {line}", flush=True)
    if words[0] == "export":
        name, _, value = words[1].partition("=")
        os.environ[name] = value
    elif words[0] == "dcp-s3":
        _dcp_s3(words[1:], where)
    elif words[0] in ("torchrun", "python"):
        module = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
        subprocess.run([sys.executable, *module, *words[1:]], check=True, timeout=300)
    else:
        raise AssertionError(f"{where}: what is {words[0]}? It is neither run nor marked as not run")


def _dcp_s3(arguments: list[str], where: str) -> None:
    """A command as on a terminal: it asks, and is answered yes."""
    from typer.testing import CliRunner

    from dcp_s3.cli import app as cli
    from dcp_s3.cli.main import app

    if arguments[0] == "demo":
        return  # tests/examples does
    cli.someone_is_there = lambda: True
    result = CliRunner().invoke(app, arguments, input="y\n")
    print(result.output)
    assert result.exit_code == cli.DONE, (
        f"{where}: dcp-s3 {shlex.join(arguments)}: {result.output} {result.exception!r}"
    )


if __name__ == "__main__":
    paste(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
