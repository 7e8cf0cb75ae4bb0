"""A hook of mkdocs: files outside of docs/ to which its pages link are on the site, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks/results", "configs", "patches")
SUFFIXES = (".md", ".png", ".json", ".args")
LINK = re.compile(r"\]\(((?:\.\./)+)([^)]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files of `FOLDERS`, at their path in the repository."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                name = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Adapt links between docs/ and `FOLDERS`: on the site these are inside of the former."""
    depth: int = page.file.src_uri.count("/")

    def adapted(link: re.Match[str]) -> str:
        up, target = link[1].count("../"), link[2]
        return "](" + "../" * min(up, depth) + target.removeprefix("docs/")

    return LINK.sub(adapted, markdown)
