"""The introduction of README.md: the order of its parts."""

from __future__ import annotations

from tests.harness.launch import REPOSITORY

TEXT = (REPOSITORY / "README.md").read_text(encoding="utf-8")
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
