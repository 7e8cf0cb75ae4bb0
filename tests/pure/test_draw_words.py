"""`scripts/draw_words.py`: a draw can be repeated, and what it draws is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from draw_words import REPOSITORY, draw, sentences

from megatron_edit.errors import UsageError

PAGE = """# Title of the page

A first sentence that is long enough. And `a second` one, over
two lines of the page.

```bash
megatron-edit check is not a sentence here.
```

| a table | is left out of what is drawn |

- An item of a list, which is a sentence, too.
- Short one.
"""


def test_sentences_of_a_page_without_code_and_tables() -> None:
    assert sentences(PAGE) == [
        "A first sentence that is long enough.",
        "And `a second` one, over two lines of the page.",
        "- An item of a list, which is a sentence, too.",
    ]


def test_same_seed_draws_the_same_items(tmp_path: Path) -> None:
    code = "".join(f'def test_name_{i}() -> None:\n    """Docstring {i}."""\n' for i in range(50))
    pages = "".join(f"Sentence {i} is long enough to be drawn.\n\n" for i in range(50))
    for file, text in {"megatron_edit/a.py": code, "tests/b.py": code, "docs/c.md": pages}.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    (tmp_path / "README.md").write_text(PAGE)
    first = draw(tmp_path, 1, 10)
    assert first == draw(tmp_path, 1, 10) != draw(tmp_path, 2, 10)
    lines = first.splitlines()
    titles = [line for line in lines if line.startswith("## ")]
    assert titles == [
        "## Names (10 of 50)", "## Test names (10 of 50)",
        "## Docstrings (10 of 50)", "## Sentences (10 of 53)",
    ]  # fmt: skip
    assert sum(line.startswith("- ") for line in lines) == 40


@pytest.mark.parametrize(
    ("folder", "count", "rule"),
    [("", 0, "--count 0: must be at least 1"), ("docs", 1, "holds no megatron_edit/")],
)
def test_wrong_arguments_are_refused(folder: str, count: int, rule: str) -> None:
    repository: Path = REPOSITORY / folder
    with pytest.raises(UsageError, match=rule):
        draw(repository, 1, count)
