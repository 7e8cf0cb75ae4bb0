"""docs/choosing.md: its computed numbers are those of `megatron-edit plan`, its measured ones are
those of the pages that it cites."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_edit.method.auto import SyncSettings
from megatron_edit.tools.cli import main
from tests.harness.launch import REPOSITORY
from tests.harness.pages import commands
from tests.system.test_docs import LINK

PAGE = REPOSITORY / "docs" / "choosing.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECONDS_OF_DAY = 86400
CODE = re.compile(r"`([^`]+)`")
NUMBER = re.compile(r"\d+\.\d+")


def computed(name: str) -> str:
    """Return the text of the page between a mark and the next end."""
    found = re.search(rf"<!-- computed: {name} -->\n?(.*?)<!-- end -->", TEXT, re.DOTALL)
    assert found is not None, f"{PAGE.name} has no computed part {name}"
    return found[1]


def rows(table: str) -> list[list[str]]:
    """Return the cells of a table without its head."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@cache
def base_command() -> list[str]:
    """Return the words of the page's plan command, without its link."""
    (line,) = (c.words for c in commands("megatron-edit plan", document="docs/choosing.md"))
    at = line.index("--link")
    return [*line[1:at], *line[at + 2 :]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that plans the page's example over a link, with further flags."""
    monkeypatch.chdir(REPOSITORY)

    def run(link: str, flags: str = "") -> Any:
        words = shlex.split(flags)
        files = [word for word in words if word.endswith(".args")]
        head, *rest = base_command()
        at = next(i for i, word in enumerate(rest) if word.startswith("--"))
        argv = [head, *rest[:at], *files, *rest[at:], "--link", link]
        argv += [*(word for word in words if word not in files), "--json"]
        assert main(argv) == 0, shlex.join(argv)
        return json.loads(capsys.readouterr().out)

    return run


def link_of(cell: str) -> str:
    """Return the value of --link for "10 Gbit/s"."""
    return cell.removesuffix("/s").replace(" ", "")


def steps(number: float) -> str:
    """Return a ratio with two digits, or all digits of its integer part."""
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def row_of(plan: Any, link: str) -> list[str]:
    """Return the row of a link: its exchange, stock Megatron, and what EDiT chooses and takes."""
    found = plan(link_of(link))
    step, strategies, total = found["step_seconds"], found["strategies"], iterations()
    edit, choice = strategies["edit"], strategies["edit"]["choice"]
    warmup, final = choice["since"], round(total * edit["final_phase"]["share_of_training"])
    synchronous = step + strategies["stock"]["exposed_seconds"]  # fp32 gradients, overlapped
    averaged = step + choice["measured"]["averaging"]
    rounds = (total - warmup - final) * step / edit["share_of_ideal"] + final * averaged
    seconds = (total * synchronous, warmup * averaged + rounds, warmup * averaged,
               warmup * step * found["replicas"] + rounds)  # fmt: skip
    settings = SyncSettings(**choice["settings"])
    words = settings.words
    if settings.final_sync_fraction:
        words += f", final {settings.final_sync_fraction:g}"
    exchange = strategies["ddp"]["exchange_seconds"] / step
    days = [f"{value / SECONDS_OF_DAY:.1f}" for value in seconds]
    return [link, steps(exchange), f"{strategies['stock']['share_of_ideal']:.3f}", words,
            f"{choice['share']:.3f}", f"{choice['loss']:+.1%}", *days]  # fmt: skip


@cache
def iterations() -> int:
    """Return the iterations of the example's configuration."""
    text = "\n".join((REPOSITORY / word).read_text(encoding="utf-8")
                     for word in base_command() if word.endswith(".args"))  # fmt: skip
    found = re.search(r"^--train-iters (\d+)$", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_choices_are_those_of_the_plan(plan: Any) -> None:
    """Would catch a changed cost model, loss table or configuration."""
    table = rows(computed("choices"))
    assert len(table) >= 6
    for row in table:
        assert row == row_of(plan, row[0])
    ideal = iterations() * plan("10Gbit")["step_seconds"] / SECONDS_OF_DAY
    assert computed("ideal days") == f"{ideal:.1f}"


def test_latency_follows_from_the_plan(plan: Any) -> None:
    """Would catch a changed cost of latency."""
    shares = [plan("10Gbit", f"--latency {ms}ms")["strategies"]["edit"]["share_of_ideal"]
              for ms in (30, 100, 200)]  # fmt: skip
    assert computed("latency") == "{:.3f}, {:.3f} and {:.3f}".format(*shares)


def test_measured_numbers_are_in_the_cited_pages() -> None:
    """Would catch a result that has changed, and a row without a source."""
    seen = 0
    for heading, part in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE):
        for line in re.sub(r"<!-- computed.*?end -->", "", part, flags=re.DOTALL).splitlines():
            links = [link.partition("#")[0] for link in LINK.findall(line) if "://" not in link]
            numbers = NUMBER.findall(CODE.sub("", re.sub(r"\]\([^)]*\)", "]", line)))
            if not line.startswith("|") or not numbers:
                continue
            assert links, f"{heading}: a measured number without a source: {line}"
            cited = "\n".join((PAGE.parent / link).resolve().read_text(encoding="utf-8")
                              for link in links if Path(link).suffix == ".md")  # fmt: skip
            missing = [number for number in numbers if number not in cited]
            assert missing == [], f"{heading}: {missing} not in {links}"
            seen += 1
    assert seen >= 10
