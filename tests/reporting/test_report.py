"""What a report finds wrong, and the page itself."""

from __future__ import annotations

import math
import shlex
from html.parser import HTMLParser
from typing import Any

import pytest

from dcp_s3 import KeepBest, KeepEvery, KeepLatest
from dcp_s3.checkpoint.info import CheckpointInfo, LeftoverObject
from dcp_s3.reporting.page import MOST_METRICS, render, state_of
from dcp_s3.reporting.report import Problem, ReportData, gather
from dcp_s3.retention.catalog import CatalogSnapshot
from dcp_s3.retention.plan import OpenUpload
from tests.retention.histories import DAY, NOW, info

HOUR = 3600.0
ROOT = "s3://bucket/run"


def saved(step: int | None, hours_ago: float, **fields: Any) -> CheckpointInfo:
    """A committed checkpoint; other names by ``name``."""
    at = NOW - hours_ago * HOUR
    name = fields.pop("name", f"step-{step}")
    usual = {
        "created_at": at,
        "modified_at": at,
        "started_at": at - 60,
        "size": 2**30,
        "metrics": {"loss": 1 / (1 + (step or 0))},
    }
    return info(name, **({"step": step} | usual | fields))


def hourly(count: int, **fields: Any) -> list[CheckpointInfo]:
    """One each hour until an hour ago, 100 steps apart."""
    return [saved(100 * number, count + 1 - number, **fields) for number in range(1, count + 1)]


def data_of(
    infos: list[CheckpointInfo],
    policy: Any = None,
    *,
    uploads: tuple[OpenUpload, ...] = (),
    leftovers: tuple[LeftoverObject, ...] = (),
) -> ReportData:
    """What a report of these checkpoints shows."""
    snapshot = CatalogSnapshot(ROOT, NOW, tuple(infos), uploads, leftovers)
    return gather(snapshot, policy, grace=DAY)


# --- problems ---------------------------------------------------------------------------------------------


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


# --- the page ---------------------------------------------------------------------------------------------


HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>'\"&{{7*7}}\u2028$&"
POLICY = KeepLatest(3) | KeepEvery(1000) | KeepBest(2, "loss", "min")


def eventful() -> ReportData:
    """Something of everything."""
    infos = hourly(40)
    infos[1] = saved(200, 39, pinned=True, pin_reason="figure 3")
    infos[2] = saved(
        300, 38, metrics={"loss": math.nan, "accuracy": 0.5, "note": "text", "good": True, "huge": 10**400}
    )
    infos[3] = saved(400, 37, damage="its object x is not there")
    infos[4] = saved(500, 36, foreign=True, started_at=None, metrics={})
    infos[5] = saved(600, 35, deletions=("ab",))
    infos[6] = saved(700, 34, leased_until=NOW + 100)
    infos[7] = saved(800, 33, waiting=True)
    infos[8] = saved(900, 32, state="incomplete")
    infos.append(saved(4100, 0.2, state="incomplete"))
    infos.append(saved(None, 10, name="final"))
    upload = OpenUpload("run/step-100/__0_0-abcdef012345.distcp", "1", NOW - 3 * DAY, "step-100")
    return data_of(infos, POLICY, uploads=(upload,))


def hostile() -> ReportData:
    infos = [*hourly(5), saved(501, 0.5, name=f"step-501{HOSTILE}", damage=HOSTILE, pinned=True, pin_reason=HOSTILE,
                               metrics={HOSTILE: 1.0, "text": HOSTILE})]  # fmt: skip

    def keep(checkpoints: Any, now: float) -> dict[str, list[str]]:
        return {info.name: [HOSTILE] for info in checkpoints[-2:]}

    keep.__name__ = HOSTILE
    return data_of(infos, keep)


class Parsed(HTMLParser):
    """The page's tags and texts, as a browser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(each == tag for each, _ in self.tags)


CASES = {
    "eventful": eventful,
    "hostile": hostile,
    "one": lambda: data_of(hourly(1), POLICY),
    "no metrics": lambda: data_of(hourly(5, metrics={})),
    "only incomplete": lambda: data_of([saved(1, 1, state="incomplete", metrics={})]),
    "nothing but an upload": lambda: data_of([], uploads=(OpenUpload("run/a/__0_0-ab.distcp", "1", NOW, "a"),)),
    "only NaN": lambda: data_of(hourly(3, metrics={"loss": math.nan})),
    "no times": lambda: data_of(hourly(3, created_at=None, modified_at=None, started_at=None)),
    "nonsense": lambda: data_of(
        [saved(10**15 + each, 1, created_at=math.nan, size=None, started_at=-1e300) for each in range(3)]
    ),
    "many metrics": lambda: data_of(hourly(3, metrics={f"m{number}": number for number in range(30)})),
}


@pytest.mark.parametrize("case", CASES)
def test_every_checkpoint_is_in_the_table(case: str) -> None:
    data = CASES[case]()
    found = Parsed(render(data))
    assert found.count("tr") == 1 + len(data.plan.decisions)
    text = "".join(found.text)
    for decision in data.plan.decisions:
        assert decision.checkpoint.name in text
        assert "; ".join(decision.reasons) in text
    for problem in data.problems:
        assert problem.text in text
        assert problem.remedy in text


def test_nothing_of_a_name_becomes_markup_and_nothing_is_fetched() -> None:
    found = Parsed(page := render(hostile()))
    assert found.count("img") == found.count("script") == found.count("link") == 0
    assert not any(name.startswith("on") or name == "src" for _, attributes in found.tags for name in attributes)
    assert HOSTILE not in page
    [policy] = [each["content"] for _, each in found.tags if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def charts_of(page: str) -> list[str]:
    """Titles of the charts in a page."""
    parts = page.split("<figcaption>")[1:]
    return [part.partition(",")[0] for part in parts]


def test_the_charts_are_those_that_there_is_data_for() -> None:
    titles = {name: charts_of(render(make())) for name, make in CASES.items()}
    both = ["Size", "Seconds from the beginning of a save to its commit"]
    assert titles["eventful"] == [*both, "accuracy", "good", "loss"]
    assert titles["no metrics"] == titles["only NaN"] == both
    assert titles["only incomplete"] == both[:1]
    assert titles["nothing but an upload"] == []
    assert len(titles["many metrics"]) == 2 + MOST_METRICS


def test_a_mark_stands_at_its_step_and_says_what_would_become_of_it() -> None:
    infos = [saved(0, 3, size=2**30), saved(100, 2, size=2**31), saved(200, 1, size=3 * 2**29, damage="gone")]
    found = Parsed(render(data_of(infos, KeepLatest(2))))
    first = [(each["cx"], each["cy"], each["class"]) for tag, each in found.tags if tag == "circle"][:3]
    assert first == [("12.0", "188.0", "delete"), ("320.0", "12.0", "keep"), ("628.0", "100.0", "broken")]
    assert "step-100: 2.0 GiB" in found.text


def test_every_state_has_its_word() -> None:
    data = eventful()
    words = {state_of(data, each.checkpoint) for each in data.plan.decisions}
    assert words == {
        "committed", "pinned", "foreign", "damaged", "in progress", "waits on disk", "incomplete", "being deleted",
    }  # fmt: skip
    assert words <= {cell.removesuffix(", being read") for cell in Parsed(render(data)).text}
