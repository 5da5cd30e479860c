"""The page itself, also in a real browser."""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest


from dcp_s3 import KeepBest, KeepEvery, KeepLatest
from dcp_s3.reporting.page import MOST_METRICS, STATES, render, state_of
from dcp_s3.reporting.report import ReportData
from dcp_s3.retention.plan import OpenUpload
from tests.reporting.making import data_of, hourly, saved
from tests.retention.histories import DAY, NOW

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
def test_every_checkpoint_is_in_the_table_without_javascript(case: str) -> None:
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


def test_nothing_of_a_name_becomes_markup_or_script() -> None:
    page = render(hostile())
    plain = Parsed(render(data_of([*hourly(5), saved(501, 0.5, damage="x")])))
    found = Parsed(page)
    assert found.count("img") == 0
    assert found.count("script") == plain.count("script")
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert "<script>window.hacked" not in page
    assert HOSTILE not in page


def test_the_policy_of_the_page_allows_its_own_scripts_only() -> None:
    found = Parsed(render(eventful()))
    [policy] = [
        each["content"] or "" for tag, each in found.tags if each.get("http-equiv") == "Content-Security-Policy"
    ]
    directives = dict(each.strip().partition(" ")[::2] for each in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert all(each.startswith("'sha256-") for each in directives["script-src"].split())
    assert not any(each.get("src") or (tag == "link") for tag, each in found.tags)


def charts_of(page: str) -> list[str]:
    """Titles of the charts in a page."""
    [model] = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL) or [""]
    return re.findall(r'"name":"Title",.*?"text":"(.*?)"', html.unescape(model))


def test_the_charts_are_those_that_there_is_data_for() -> None:
    titles = {name: charts_of(render(make())) for name, make in CASES.items()}
    both = ["Size", "Seconds from the beginning of a save to its commit"]
    assert titles["eventful"] == [*both, "accuracy", "good", "loss"]
    assert titles["no metrics"] == titles["only NaN"] == both
    assert titles["only incomplete"] == both[:1]
    assert titles["nothing but an upload"] == []
    assert len(titles["many metrics"]) == 2 + MOST_METRICS


def test_every_state_is_shown_with_a_marker_of_its_own() -> None:
    data = eventful()
    assert {state_of(data, each.checkpoint) for each in data.plan.decisions} == set(STATES)
    assert len({marker for marker, *_ in STATES.values()}) == len(STATES)
    text = "".join(Parsed(render(data)).text)
    assert all(f"{sign} {state}" in text for state, (_, _, sign) in STATES.items())


# --- in a browser --------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")


def show(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page as a headless Chromium without network has it once its scripts have run, and what the console says."""
    done = subprocess.run(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--virtual-time-budget=20000", "--proxy-server=http://127.0.0.1:9", f"--user-data-dir={profile}",
            "--dump-dom", f"file://{page}",
        ],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]


@pytest.mark.docs
@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium: apt-get install chromium")
def test_every_chart_is_drawn_without_a_complaint(tmp_path: Path) -> None:
    """What its own security policy refuses, and what it cannot fetch, would be complaints."""
    pages = {case: CASES[case]() for case in ("eventful", "hostile", "nonsense")} | {"2,000": data_of(hourly(2000))}
    for case, data in pages.items():
        path = tmp_path / f"{case.replace(' ', '-')}.html"
        path.write_text(render(data), encoding="utf-8")
        shown, said = show(path, tmp_path / "profile")
        assert [line for line in said if "setting log level" not in line] == [], case
        assert shown.count('class="bk-Figure"') == len(charts_of(path.read_text())), case
        assert Parsed(shown).count("img") == 0, case
