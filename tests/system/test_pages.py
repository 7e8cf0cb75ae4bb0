"""The HTML pages in a real browser: no errors, and all pictures are complete and readable.

Would catch: a script that fails, a picture that is not drawn, a request to the network, a page that
scrolls sideways on a phone, and text that is too small to read.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from megatron_edit.tools.cli import main
from tests.harness.browser import MISSING, SMALLEST_FONT, WIDTHS, PageView, chromium, look
from tests.harness.elastic_event_files import FENCED, SyntheticElasticRun, SyntheticEpoch
from tests.harness.event_files import SyntheticRun
from tests.harness.resumed_event_files import RunPart, write_runs

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}"),
    pytest.mark.timeout(240),
]
ALL_CHARTS = 10  # without a chart of bytes, which are the same at every sync


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start one browser for all tests of this file."""
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def check(seen: PageView, num_pictures: int) -> None:
    """Check the properties that every page must have."""
    assert seen.complaints == []
    assert seen.from_outside == []
    assert seen.document_width <= seen.width
    assert len(seen.pictures) == num_pictures
    for width, height, text in seen.pictures:
        assert width >= 280 and height >= 180
        assert len(text) >= 10, "the text alternative is missing"
    size, letters = seen.smallest
    assert size >= SMALLEST_FONT, letters
    assert seen.screenshot.stat().st_size > 10_000


RUNS: dict[str, tuple[SyntheticRun, int]] = {
    "usual": (
        SyntheticRun(train_iters=400, slow={2: 1.4}, anomalous_replica=1, rollbacks=(12,)),
        ALL_CHARTS,
    ),
    "ddp": (SyntheticRun(strategy="ddp", rounds=0, warmup=50), 2),
    "warm-up": (SyntheticRun(rounds=0, warmup=30, train_iters=100), 2),
    "first-sync": (
        SyntheticRun(rounds=1, train_iters=100),
        9,
    ),  # a bar chart of bytes, as there is only one sync
    "one-replica": (SyntheticRun(replicas=1, rounds=9), 7),
    "plain-averages": (SyntheticRun(strategy="diloco", rounds=9), 7),
    "large": (
        SyntheticRun(replicas=64, units=40, rounds=40, tau=2, anomalous_replica=63),
        ALL_CHARTS,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "usual" else [pytest.mark.full]) for n in RUNS]
)
def test_report_page(driver: Any, tmp_path: Path, name: str) -> None:
    made_up, num_pictures = RUNS[name]
    folder = made_up.write(tmp_path / name)
    assert main(["report", str(folder)]) == 0
    for width in WIDTHS:
        shot = tmp_path / f"{name}-{width}.png"
        check(look(driver, folder / "report.html", width, shot), num_pictures)


ELASTIC_RUNS: dict[str, tuple[SyntheticElasticRun, int]] = {
    "usual": (
        SyntheticElasticRun([
            SyntheticEpoch("abc", 4),
            SyntheticEpoch("ac", 3, {"b": FENCED}),
            SyntheticEpoch(("a", "c", "node-17.rack-4.example.org"), 9),
        ]),
        ALL_CHARTS,
    ),
    "large": (
        SyntheticElasticRun(
            [SyntheticEpoch(tuple(f"{n:02}-{'x' * 60}" for n in range(first, 50)), 3)
             for first in (0, 5, 0, 9)],
            nominal=50,
        ),
        ALL_CHARTS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "usual" else [pytest.mark.full]) for n in ELASTIC_RUNS],
)
def test_report_page_of_an_elastic_run(driver: Any, tmp_path: Path, name: str) -> None:
    """With the picture of the members; names may be long."""
    made_up, num_pictures = ELASTIC_RUNS[name]
    logs = made_up.write(tmp_path)
    assert main(["report", str(logs), "--state-dir", str(tmp_path / "hub")]) == 0
    for width in WIDTHS:
        shot = tmp_path / f"elastic-{name}-{width}.png"
        check(look(driver, logs / "report.html", width, shot), num_pictures)


@pytest.mark.full
def test_report_page_in_dark_mode(driver: Any, tmp_path: Path) -> None:
    """The page and its pictures follow the preferred color scheme."""
    page = tmp_path / "report.html"
    folder = SyntheticRun().write(tmp_path / "log")
    assert main(["report", str(folder), "--output", str(page)]) == 0
    for is_dark in (False, True):
        shot = tmp_path / f"dark-{is_dark}.png"
        check(
            look(driver, page, 1280, shot, dark=is_dark), ALL_CHARTS - 1
        )  # no replica was rejected
        inks = driver.execute_script(
            "return Array.from(document.querySelectorAll('body, svg text'))"
            ".map(e => e.tagName == 'BODY' ? getComputedStyle(e).color : getComputedStyle(e).fill)"
        )
        assert len(set(inks)) == 1 and len(inks) > 50
        brightness = sum(int(x) for x in inks[0].strip("rgb()").split(","))
        assert (brightness > 380) == is_dark


# Numbers of tiles, and how many of them are in the last row, for all numbers down to two.
_LAST_ROWS = """
const tiles = document.querySelector('.tiles'), found = [];
while (tiles.children.length > 1) {
    const tops = Array.from(tiles.children, tile => tile.getBoundingClientRect().top);
    found.push([tops.length, tops.filter(top => top == Math.max(...tops)).length]);
    tiles.lastElementChild.remove();
}
return found;
"""


def test_no_tile_is_alone_in_the_last_row(driver: Any, tmp_path: Path) -> None:
    """With any number of tiles, on a phone, a tablet and a desk."""
    folder = SyntheticRun(rounds=9, train_iters=400).write(tmp_path / "log")
    assert main(["report", str(folder)]) == 0
    for width in (375, 768, 1280):
        look(driver, folder / "report.html", width, tmp_path / f"{width}.png")
        last_rows = driver.execute_script(_LAST_ROWS)
        assert len(last_rows) > 10
        assert [each for each in last_rows if each[1] < 2] == [], width


# A place at the right edge of a table where no text is, the color of the page there without a
# shade, whether the table is scrolled sideways, and numbers that are broken into several lines.
_TABLE_EDGE = """
const region = document.querySelectorAll('section .scroll')[arguments[0]];
region.scrollLeft = arguments[1];
const box = region.getBoundingClientRect(), row = region.querySelector('tbody tr');
const broken = Array.from(region.querySelectorAll('td'), cell => {
    const text = document.createRange();
    text.selectNodeContents(cell);
    const tops = new Set(Array.from(text.getClientRects(), line => line.top));
    return /^[0-9.,]+$/.test(cell.textContent) && tops.size > 1 ? cell.textContent : '';
}).filter(text => text);
return [box.right - 3 + scrollX, row.getBoundingClientRect().top + 3 + scrollY,
        getComputedStyle(region).backgroundColor, region.scrollWidth > region.clientWidth, broken];
"""


def edge_shade(driver: Any, place: int, scrolled: int, picture: Path, *, scrolls: bool) -> float:
    """Return how much darker or lighter the right edge of a table is than the page."""
    x, y, paper, does_scroll, broken = driver.execute_script(_TABLE_EDGE, place, scrolled)
    assert broken == [] and does_scroll == scrolls
    clip = {"x": x, "y": y, "width": 1, "height": 1, "scale": 1}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    picture.write_bytes(base64.b64decode(shot["data"]))
    shown = 255 * imread(picture)[0, 0, :3]
    difference = shown - [int(each) for each in paper.strip("rgb()").split(",")]
    return float(abs(difference).mean())


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_wide_tables_show_that_they_scroll(driver: Any, tmp_path: Path, is_dark: bool) -> None:
    """A shade at the right edge, until the end of the table is in view."""
    folder = SyntheticRun(rounds=9).write(tmp_path / "log")
    assert main(["report", str(folder)]) == 0
    page, shot, spot = folder / "report.html", tmp_path / "page.png", tmp_path / "spot.png"
    look(driver, page, 375, shot, dark=is_dark)
    for place in range(2):  # replicas, syncs
        assert 35 < edge_shade(driver, place, 0, spot, scrolls=True) < 85
        assert edge_shade(driver, place, 9999, spot, scrolls=True) <= 2
    look(driver, page, 1280, shot, dark=is_dark)
    for place in range(2):
        assert edge_shade(driver, place, 0, spot, scrolls=False) <= 2


def test_report_page_of_resumed_training(driver: Any, tmp_path: Path) -> None:
    """Three runs with validation losses; legends are below the data."""
    parts = [RunPart(0, 50), RunPart(44, 75), RunPart(68, 100, "finished", None)]
    folder = write_runs(tmp_path / "log", SyntheticRun(rounds=10, replicas=2), parts)
    assert main(["report", str(folder)]) == 0
    for width in WIDTHS:
        shot = tmp_path / f"resumed-{width}.png"
        check(look(driver, folder / "report.html", width, shot), ALL_CHARTS)
    below = driver.execute_script(
        "return Array.from(document.querySelectorAll('figure svg')).map(svg => {"
        "  const texts = Array.from(svg.querySelectorAll('text'));"
        "  const of = names => texts.filter(e => names.includes(e.textContent.trim()))"
        "    .map(e => e.getBoundingClientRect().top);"
        "  const legend = of(['mean', 'validation', 'median unit', 'wait', 'left out above']);"
        "  return legend.map(top => top > Math.max(...of(['iteration', 'sync'])));"
        "}).flat()"
    )
    assert len(below) >= 5 and all(below)


def test_page_of_several_runs(driver: Any, tmp_path: Path) -> None:
    """Five runs, one elastic and one that goes on, with long names; in both color schemes."""
    runs = {
        "ddp": SyntheticRun(strategy="ddp", rounds=0, warmup=260),
        "edit": SyntheticRun(train_iters=400, slow={2: 1.4}, anomalous_replica=1, rollbacks=(12,)),
        "edit-with-a-long-name-and-tau-16-and-more": SyntheticRun(rounds=12, tau=16),
        "diloco": SyntheticRun(strategy="diloco", rounds=9),
    }
    folders = [made_up.write(tmp_path / name / "log") for name, made_up in runs.items()]
    epochs = [SyntheticEpoch("abc", 14), SyntheticEpoch("ac", 13, {"b": FENCED})]
    folders.append(SyntheticElasticRun(epochs, is_over=True).write(tmp_path / "elastic"))
    for folder in folders[:2]:
        with (folder / "loss.jsonl").open("a") as file:
            for iteration in (0, 130, 260):
                line = {"iteration": iteration, "validation_loss": 3.0, "split": "validation"}
                file.write(json.dumps(line) + "\n")
    page = tmp_path / "runs.html"
    assert main(["report", *map(str, folders), "--output", str(page)]) == 0
    for width in WIDTHS:
        for is_dark in (False, True):
            shot = tmp_path / f"runs-{width}-{is_dark}.png"
            check(look(driver, page, width, shot, dark=is_dark), 5)


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_pages_of_short_runs(driver: Any, tmp_path: Path, rounds: int) -> None:
    """Of one run and of two; would catch tick labels like 0.0025 that run into each other."""
    made_up = SyntheticRun(replicas=2, warmup=10 - 2 * rounds, tau=2, rounds=rounds)
    folders = [str(made_up.write(tmp_path / name / "log")) for name in "ab"]
    page = tmp_path / "page.html"
    for given, num_pictures in ((folders[:1], (2, 9, 8)), (folders, (3, 5, 5))):
        assert main(["report", *given, "--output", str(page)]) == 0
        for width, is_dark in ((1280, False), (390, True)):
            seen = look(driver, page, width, tmp_path / f"{width}.png", dark=is_dark)
            check(seen, num_pictures[rounds])


def test_comparison_page(driver: Any, tmp_path: Path) -> None:
    """The page of `megatron-edit compare`, in both color schemes."""
    from megatron_edit.tools.compare.page import write_report
    from tests.pure.test_compare_report import outcome

    page = write_report(tmp_path, outcome())
    for width in WIDTHS:
        for is_dark in (False, True):
            shot = tmp_path / f"compare-{width}-{is_dark}.png"
            check(look(driver, page, width, shot, dark=is_dark), 5)
            inks = driver.execute_script(
                "return Array.from(document.querySelectorAll('body, svg text'))"
                ".map(e => getComputedStyle(e)[e.tagName == 'BODY' ? 'color' : 'fill'])"
            )
            assert len(set(inks)) == 1 and len(inks) > 20


def test_browser_checks_detect_faults(driver: Any, tmp_path: Path) -> None:
    """Each of these faults of a page is detected."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!DOCTYPE html><body><p style='width: 3000px; font-size: 6px'>small</p><b id=a></b>"
        "<b id=a></b><img src='no.png'><script>undefined_name()</script>"
        "<figure><svg viewBox='0 0 400 300' width=400><text x=10 y=50>0.0025</text>"
        "<text x=50 y=50>0.0050</text><text x=390 y=90>cut</text></svg></figure>"
    )
    seen = look(driver, page, 390, tmp_path / "bad.png")
    assert any("undefined_name" in text for text in seen.complaints)
    assert "id a twice" in seen.complaints
    assert any("0.0025 runs into" in text for text in seen.complaints)
    assert any(text.endswith("cut is cut off") for text in seen.complaints)
    assert any(text.endswith("no.png") for text in [*seen.from_outside, *seen.complaints]) or any(
        "no.png" in text for text in seen.complaints
    )
    assert seen.document_width > 390 and seen.smallest[0] == 6
    assert len(seen.pictures) == 1
