"""The introduction of README.md: the order of its parts, and its numbers."""

from __future__ import annotations

import re
from pathlib import Path

from draw_gains import DELAYED, EDIT, LOSSES, STOCK, TORCHFT, costs, draw, shares_of_ideal

from tests.harness.launch import REPOSITORY

TEXT = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FLAT = re.sub(r"\s+", " ", TEXT)
MOST_LINES = 120


def test_readme_introduction_comes_before_any_table() -> None:
    """Would catch: a table before the purpose and the first commands, and a second picture."""
    assert len(TEXT.splitlines()) <= MOST_LINES
    in_order = ["**Use it**", "**Do not use it**", "has run on one GPU only", "git clone ",
                "bash scripts/quickstart.sh", "bash scripts/test.sh", "docs/gains.png",
                "At 100 Mbit/s", "2 to 3 minutes", "## Use it with Megatron-LM", "--use-edit",
                "|---"]  # fmt: skip
    assert TEXT.count("![") == 1
    places = [TEXT.index(part) for part in in_order]
    assert places == sorted(places)


def test_readme_speeds_equal_the_results() -> None:
    """Would catch: numbers in the text that differ from benchmarks/results."""
    share = shares_of_ideal()
    medians = {(label, rate): f"{spread.median:.2g}" for label, by_rate in share.items()
               for rate, spread in by_rate.items()}  # fmt: skip
    assert (
        f"At 100 Mbit/s EDiT keeps {medians[EDIT, 100e6]} of the speed of a training that "
        f"exchanges nothing, and stock Megatron {medians[STOCK, 100e6]}; with a delay of 8 steps "
        f"and int8 EDiT keeps {medians[DELAYED, 100e6]}, and {medians[DELAYED, 20e6]} at 20 "
        f"Mbit/s, where torchft's streaming DiLoCo keeps {medians[TORCHFT, 20e6]}." in FLAT
    )


def test_readme_losses_equal_the_results() -> None:
    """Would catch: numbers in the text that differ from the means of three seeds."""
    percent = {
        loss.runs: f"{cost.percent:.1f} %" for loss, cost in zip(LOSSES, costs(), strict=True)
    }
    assert (
        f"by {percent['marks-delay: edit, tau 40']} at tau 40 "
        f"({percent[LOSSES[1].runs]} with the delay), {percent['marks: edit, tau 16']} at tau 16, "
        f"{percent['marks: edit, tau 16, warm-up 25 %']} after a warm-up of 25 % of the steps, and "
        f"{percent['marks-batch: edit, 16 samples']} with 16 samples per step instead of 8." in FLAT
    )


def test_readme_figure_is_drawn_on_white(tmp_path: Path) -> None:
    """On a white background: its labels could not be read on a dark page without it."""
    import matplotlib.image

    draw(tmp_path / "gains.png")
    pixels = matplotlib.image.imread(tmp_path / "gains.png")
    committed = matplotlib.image.imread(REPOSITORY / "docs" / "gains.png")
    for image in (pixels, committed):
        assert image[0, 0].tolist() == [1, 1, 1, 1]
    assert pixels.shape == committed.shape
