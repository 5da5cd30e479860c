from __future__ import annotations

import shlex
from typing import Any

import pytest

from dcp_s3.checkpoint.info import LeftoverObject
from dcp_s3.reporting.report import Problem
from dcp_s3.retention.plan import OpenUpload
from tests.reporting.making import ROOT, data_of, hourly, saved
from tests.retention.histories import DAY, NOW


def problems(*infos: Any, **arguments: Any) -> dict[str, Problem]:
    found = data_of(list(infos), **arguments).problems
    assert len({each.kind for each in found}) == len(found)
    return {each.kind: each for each in found}


def test_a_healthy_run_has_none() -> None:
    assert problems(*hourly(30)) == {}


def test_a_silence_after_the_newest_is_bad_and_names_it() -> None:
    found = problems(*(saved(100 * number, 40 - number) for number in range(20)))["no new checkpoint"]
    assert found.severity == "bad"
    assert "step-1900" in found.text
    assert "21.0 h" in found.text
    assert "usual interval is 60.0 min" in found.text
    assert found.remedy == f"dcp-s3 ls {ROOT} --all"


@pytest.mark.parametrize(("hours", "silent"), [(2.9, False), (3.1, True)])
def test_a_silence_is_three_times_the_usual_interval(hours: float, silent: bool) -> None:
    infos = [saved(100 * number, hours + 10 - number) for number in range(11)]
    assert ("no new checkpoint" in problems(*infos)) == silent


def test_a_pause_in_the_past_does_not_make_a_silence() -> None:
    before = [saved(100 * number, 60 - number) for number in range(10)]
    assert problems(*before, *(saved(1000 + 100 * number, 31 - number) for number in range(31))) == {}
    assert problems(saved(100, 90), saved(200, 89), saved(300, 88)) == {}  # too few to tell what is usual


def test_every_kind_of_leftover_names_its_command() -> None:
    upload = OpenUpload("run/step-100/__0_0-abcdef012345.distcp", "1", NOW - 3 * DAY, "step-100")
    leftover = LeftoverObject("run/step-200/__0_0-abcdef012345.distcp", 2**20, NOW - 3 * DAY, "step-200")
    lost = saved(50, 80, state="incomplete", objects=1, size=2**30, name="step-50")
    deleted = saved(60, 90, state="incomplete", deletions=("ab",), modified_at=None, objects=2, pinned=True)
    found = problems(*hourly(30), lost, deleted, uploads=(upload,), leftovers=(leftover,))
    assert set(found) == {"incomplete save", "open uploads", "leftover objects", "unfinished deletion"}
    assert all(each.severity == "warning" for each in found.values())
    assert found["incomplete save"].text == "step-50 was never committed: 1 object, 1.0 GiB of a save that failed"
    assert found["incomplete save"].remedy == f"dcp-s3 prune {ROOT} --dry-run"
    assert found["open uploads"].text.startswith("step-100: 1 multipart upload that nobody finishes")
    assert "step-60" in found["unfinished deletion"].text


def test_what_cannot_be_loaded_from_s3_is_bad() -> None:
    infos = hourly(30)
    infos[3] = saved(400, 27, damage="its object x is not there")
    infos[-1] = saved(3000, 1, waiting=True)
    found = problems(*infos)
    assert [each.severity for each in found.values()] == ["bad", "bad"]
    assert found["damaged"].remedy == f"dcp-s3 verify {ROOT}/step-400"
    assert found["waits on disk"].remedy == "dcp-s3 drain"


def test_a_remedy_can_be_pasted_into_a_shell_whatever_the_name_is() -> None:
    name = "step-1; rm -rf $HOME '`x`"
    infos = [*hourly(5), saved(9, 1, name=name, damage="gone")]
    remedy = problems(*infos)["damaged"].remedy
    assert shlex.split(remedy) == ["dcp-s3", "verify", f"{ROOT}/{name}"]
