"""Inspection of HTML pages in headless Chromium, if installed: errors, sizes, screenshots."""

from __future__ import annotations

import base64
import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
MISSING = ", ".join(
    name
    for name, is_there in (
        ("chromium", CHROMIUM),
        ("chromedriver", DRIVER),
        ("selenium", importlib.util.find_spec("selenium")),
    )
    if not is_there
)
WIDTHS = (1280, 390)
SMALLEST_FONT = 10.0  # CSS pixels
_SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
# Font sizes of all visible text; in an SVG picture, scaled as the picture is.
_FONT_SIZES = """
const sizes = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), owner = walker.currentNode.parentElement;
    if (!text || !owner.getClientRects().length || owner.closest('script, style, defs')) continue;
    let size = parseFloat(getComputedStyle(owner).fontSize);
    const svg = owner.closest('svg');
    if (svg) size *= svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    sizes.push([size, text]);
}
sizes.sort((a, b) => a[0] - b[0]);
return sizes[0];
"""
_OUTSIDE = """
return performance.getEntriesByType('resource').map(entry => entry.name)
    .filter(name => !name.startsWith('data:'));
"""
_PICTURES = """
return Array.from(document.querySelectorAll('figure')).map(figure => {
    const shown = figure.querySelector('svg, img');
    const box = shown ? shown.getBoundingClientRect() : {width: 0, height: 0};
    const named = figure.querySelector('[role=img], img');
    return [box.width, box.height,
            named ? named.getAttribute('aria-label') || named.getAttribute('alt') || '' : ''];
});
"""
_DUPLICATES = """
const ids = Array.from(document.querySelectorAll('[id]')).map(e => e.id);
return ids.filter((id, place) => ids.indexOf(id) !== place);
"""
# Texts of a picture that overlap, have less than two pixels between them, or are cut off.
_UNREADABLE = """
const found = [];
for (const svg of document.querySelectorAll('figure svg')) {
    const frame = svg.getBoundingClientRect();
    const texts = Array.from(svg.querySelectorAll('text')).map(e => [
        `${svg.closest('figure').innerText.split('\\n')[0]}: ${e.textContent.trim()}`,
        e.getBoundingClientRect(),
    ]);
    texts.forEach(([name, a], place) => {
        if (Math.min(a.left - frame.left, frame.right - a.right) < -1 ||
            Math.min(a.top - frame.top, frame.bottom - a.bottom) < -1)
            found.push(`${name} is cut off`);
        for (const [other, b] of texts.slice(place + 1)) {
            const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (across > -2 && down > 2) found.push(`${name} runs into ${other}`);
        }
    });
}
return found;
"""


@dataclass(frozen=True)
class PageView:
    """A page as shown at one window width.

    Attributes:
        width: width of the window, CSS pixels.
        document_width: width of the page; if larger than `width`, it scrolls sideways.
        smallest: smallest font size, CSS pixels, and a text of that size.
        pictures: width, height and text alternative of each picture.
        complaints: errors of scripts and of the browser, duplicate ids, and texts of pictures that
            run into each other or are cut off.
        from_outside: other files or network addresses that the page requested.
        screenshot: path of a PNG file.
    """

    width: int
    document_width: int
    smallest: tuple[float, str]
    pictures: list[tuple[float, float, str]]
    complaints: list[str]
    from_outside: list[str]
    screenshot: Path


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """Start a browser and yield its driver.

    Args:
        profile: an empty folder for the browser's profile.
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for switch in (*_SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.binary_location = str(CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_page_load_timeout(60)
        yield driver
    finally:
        driver.quit()


def look(driver: Any, page: Path, width: int, screenshot: Path, *, dark: bool = False) -> PageView:
    """Open a page, inspect it and take a screenshot.

    Args:
        driver: driver that `chromium` yields.
        page: path of the page.
        width: width of the window, CSS pixels; below 500 a phone is emulated.
        screenshot: path for a PNG of the complete page.
        dark: whether the browser prefers dark colors.
    """
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    _resize(driver, width, 900)
    driver.get_log("browser")
    driver.get(page.resolve().as_uri())
    size = driver.execute_script(
        "const e = document.documentElement; return [e.scrollWidth, e.scrollHeight];"
    )
    smallest = driver.execute_script(_FONT_SIZES)
    pictures = [(w, h, text) for w, h, text in driver.execute_script(_PICTURES)]
    duplicates = [f"id {name} twice" for name in driver.execute_script(_DUPLICATES)]
    unreadable = driver.execute_script(_UNREADABLE)
    outside = driver.execute_script(_OUTSIDE)
    _resize(driver, width, min(size[1], 8000))
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    screenshot.write_bytes(base64.b64decode(shot["data"]))
    message = [entry["message"] for entry in driver.get_log("browser")]
    complaints = [*message, *duplicates, *unreadable]
    return PageView(width, size[0], tuple(smallest), pictures, complaints, outside, screenshot)


def _resize(driver: Any, width: int, height: int) -> None:
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )
