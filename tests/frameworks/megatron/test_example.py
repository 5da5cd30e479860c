from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from dcp_s3 import list_checkpoints
from tests.frameworks.megatron import cpu
from tests.frameworks.ranks import run_ranks


def _run(url: str, steps: int) -> list[str]:
    from examples import megatron

    cpu.pretend()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        megatron.main(["--url", url, "--steps", str(steps)])
    return output.getvalue().splitlines()


@pytest.mark.servers("memory")
def test_the_example_goes_on_where_it_was_on_other_ranks(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = run_ranks(1, _run, f"{root}/whole", 15)[0]
    run_ranks(2, _run, f"{root}/cut", 10)
    rest = run_ranks(1, _run, f"{root}/cut", 15)[0]
    assert rest[0] == f"restored {root}/cut/iter_0000010 on 1 ranks"
    # Sums over ranks round otherwise than sums on one.
    assert [float(line.split()[-1]) for line in rest[1:]] == pytest.approx(
        [float(line.split()[-1]) for line in whole[10:]], abs=1e-4
    )
    assert [info.name for info in list_checkpoints(f"{root}/cut")] == ["iter_0000010", "iter_0000015"]
    assert list(tmp_path.iterdir()) == []
