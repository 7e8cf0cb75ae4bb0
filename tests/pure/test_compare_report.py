"""`megatron-edit compare`: from logs to numbers, and from numbers to table, pictures and page.

Would catch: warm-up or start-up in the speed, evaluations in the time, bytes of a sync that did not
happen, runs of different seeds compared with each other, a page that needs the network.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_edit.tools.compare.entries import parse_entries
from megatron_edit.tools.compare.page import Spread, make_rows, results_table, write_report
from megatron_edit.tools.compare.plan import ComparisonSetting, RunPlan, make_plan
from megatron_edit.tools.compare.readings import (
    Reading,
    RunKind,
    RunLog,
    Timeline,
    edit_validation,
    make_reading,
    read_run,
)
from megatron_edit.tools.compare.runs import (
    ComparisonResult,
    Limits,
    RunFailedError,
    carry_out,
    folder_of,
    follow,
    kind_of,
    tail,
)
from megatron_edit.tools.compare.traffic import (
    ElementBytes,
    Layout,
    baseline_bytes,
    warmup_bytes,
)
from megatron_edit.tools.pages.charts import EMPTY, RunCurves
from megatron_edit.tools.pages.drawing import smoothed

SEQ = 10
LINE = (
    " [2026-01-02 03:04:05.6] iteration {i:8d}/      12 | consumed samples: {samples:12d} |"
    " elapsed time per iteration (ms): {ms:.1f} | global batch size:     4 | lm loss: {loss:.6E} |"
)
VALIDATION = " validation loss at iteration {} | lm loss value: {} | lm loss PPL: 1 | "
PARAMETERS = " > number of parameters on (tensor, pipeline) model parallel rank (0, {}): {}"
KIND = RunKind(Layout(2, 2, 0), seq_length=SEQ, warmup_steps=0)
RUN = {"config": {"warmup_steps": 6}, "versions": {"torch": "2"}}
SETTING = ComparisonSetting(
    Path(__file__),
    ("--seq-length", "10", "--train-iters", "12", "--edit-num-replicas", "2", "--num-layers", "2"),
    4,
)
FAILING = """
print("the reason")
print("E0101 api.py:1] failed (exitcode: 3) local_rank: 0")
print("what the launcher adds")
raise SystemExit(3)
"""
STUB = """
import json, pathlib, sys
argv = sys.argv[1:]
if "ddp" in argv:
    print("no ddp today")
    raise SystemExit(7)
events = pathlib.Path(argv[argv.index("--edit-log-dir") + 1])
events.mkdir(parents=True)
(events / "run.json").write_text("{{}}")
with (events.parents[2] / "calls").open("a") as calls:
    calls.write("x")
print({lines!r})
"""


def console(times: dict[int, float]) -> RunLog:
    """Return a log with 4 samples per iteration; the loss falls by 0.1 in each."""
    lines = [LINE.format(i=i, samples=4 * i, ms=ms, loss=8 - i / 10) for i, ms in times.items()]
    more = [VALIDATION.format(6, 7.5), VALIDATION.format(12, 7.0)]
    return RunLog.of([PARAMETERS.format(0, 60), PARAMETERS.format(1, 40), *lines, *more])


def sync(iteration: int, **changes: Any) -> dict[str, Any]:
    """Return a line of sync.jsonl."""
    seconds = {"wait": 0.5, "total": 1.0, "exposed": 0.9, "exchange": 0.1, "outer": 0.1}
    return {"iteration": iteration, "wire_bytes": 300, "samples": [2 * iteration] * 2,
            "seconds": seconds} | changes  # fmt: skip


def reading(kind: RunKind, syncs: list[dict[str, Any]], run: dict[str, Any] = RUN) -> Reading:
    """Return the reading of twelve iterations: six of 2 s, then six of 0.5 s."""
    log = console({i: 2000.0 if i <= 6 else 500.0 for i in range(1, 13)})
    return make_reading("run", log, log.losses(), syncs, run, kind)


# ---- readings


def test_final_phase_steps_count_as_exchanges() -> None:
    """Of 12 steps, 6 are warm-up and 3 are of the final phase, with 400 bytes each."""
    run: dict[str, Any] = {
        "config": {"warmup_steps": 6, "final_sync_fraction": 0.25},
        "training": {"last_local_step": 9},
    }
    kind = replace(KIND, warmup_steps=6)
    plain, found = (reading(kind, [sync(9)], each) for each in (RUN, run))
    assert (plain.bytes_per_step, found.bytes_per_step) == (300 / 6, (300 + 3 * 400) / 6)
    tokens, sent = found.curves.sent
    assert tokens.tolist() == [360, 400, 440, 480, 480]
    assert sent.tolist() == [300, 700, 1100, 1500, 1500]


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 2), ("int8", 260 / 256)])
def test_synchronous_steps_count_bytes_of_their_data_type(dtype: str, width: float) -> None:
    """Of 100 parameters; those of stock Megatron are not encoded."""
    ddp = RunKind(KIND.layout, SEQ, warmup_steps=6, is_synchronous=True)
    run = RUN | {"config": {"warmup_steps": 6, "warmup_dtype": dtype}}
    assert reading(ddp, [], run).bytes_per_step == pytest.approx(100 * width)
    assert reading(replace(ddp, is_stock=True), [], run).bytes_per_step > 400


def test_parameter_count_sums_all_stages() -> None:
    """Each model-parallel rank logs its own number; repeated lines count once."""
    lines = [PARAMETERS.format(0, 60), PARAMETERS.format(1, 40), PARAMETERS.format(1, 40)]
    assert RunLog.of(lines).num_parameters == 100


def test_timeline_counts_iterations_between_log_lines() -> None:
    """With a line every third iteration, each line counts for three iterations."""
    line = Timeline.of(console({3: 1000.0, 6: 1000.0, 9: 2000.0}), SEQ)
    assert list(line.iterations) == [0, 3, 6, 9]
    assert list(line.seconds) == [0.0, 3.0, 6.0, 12.0]
    assert line.tokens_at(np.array([4, 99])) == pytest.approx([160, 360])
    assert line.speed(3, 9) == pytest.approx(240 / 9)
    assert line.speed(9, 12) is None and Timeline.of(RunLog(), SEQ).speed(0, 9) is None
    resumed = Timeline.of(console({11: 1000.0, 12: 1000.0}), SEQ)
    assert list(resumed.iterations) == [10, 11, 12] and resumed.tokens[0] == 400


def test_a_edit_timeline_interpolates_between_meetings() -> None:
    """Between two meetings the total number of samples is unknown and is interpolated."""
    log = console({i: 1000.0 for i in range(1, 9)})
    line = Timeline.of(log, SEQ, {4: 8 + 20, 8: 16 + 60})
    assert line.tokens_at(np.array([3, 4, 6, 8])).tolist() == [120, 280, 520, 760]
    assert line.speed(4, 8) == pytest.approx(480 / 4)


def test_reading_of_edit_excludes_warmup() -> None:
    """Speed and bytes are measured after the warm-up; bytes are those of one replica."""
    found = reading(KIND, [sync(9), sync(12, wire_bytes=600, state_bytes=800)])
    assert found.num_parameters == 100 and found.curves.seconds[1][-1] == 15.0
    assert found.curves.speed == pytest.approx(80)
    assert found.bytes_per_step == pytest.approx(900 / 6)
    assert found.peak_bytes_per_second == pytest.approx(600 / 0.5)
    assert found.state_bytes == 800 and found.curves.final_loss == 7.0
    assert [each.tolist() for each in found.curves.validation] == [[240, 480], [7.5, 7.0]]
    assert [each.tolist() for each in found.curves.sent] == [[360, 480, 480], [300, 900, 900]]
    # In 3 s: twice 0.5 s of waiting, 0.1 s of the exchange and 0.1 s of the outer step.
    assert found.curves.parts == pytest.approx([1.6 / 3, 1 / 3, 0.2 / 3, 0.2 / 3])
    assert reading(KIND, [sync(9)]).state_bytes is None


def test_reading_of_resumed_run_counts_steps_since_checkpoint() -> None:
    """Its syncs and losses begin at the checkpoint, so its steps must, too."""
    log = console({i: 500.0 for i in range(7, 13)})
    found = make_reading("run", log, log.losses(), [sync(9), sync(12)], {}, KIND)
    assert found.bytes_per_step == pytest.approx(600 / 6)


def test_reading_of_synchronous_training_counts_every_step() -> None:
    """Bytes are sent in every step; the rate is over a mean step of 0.5 s."""
    ddp = RunKind(KIND.layout, SEQ, warmup_steps=6, is_synchronous=True)
    found = reading(ddp, [], RUN | {"config": {"warmup_steps": 1000}})
    assert (found.bytes_per_step, found.state_bytes) == (400, 0)
    assert found.curves.sent[1].tolist() == [400, 800, 1200, 1600, 2000, 2400, 2400]
    assert found.peak_bytes_per_second == pytest.approx(400 / 0.5)
    stock = RunKind(
        KIND.layout, SEQ, 6, is_stock=True, is_synchronous=True, element=ElementBytes(4, 4)
    )
    # Each of two links carries 3/4 of (4 + 4) * 100 bytes.
    assert reading(stock, [], {}).bytes_per_step == pytest.approx(600)
    instances = replace(stock, layout=Layout(2, 2, 0, num_instances=2))
    # On each machine, two ranks all-reduce 50 gradients of 4 bytes each with the other machine.
    assert reading(instances, [], {}).bytes_per_step == pytest.approx(400)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # Per parameter, with 4 + 4 bytes. Four links, each 7/8 of 8.
        (Layout(4, 2, 1), 28.0),
        # Two shards of 1/2, each in a ring over four machines: 4 links x 2 x 3/4 x 4 / 2.
        (Layout(4, 2, 1, num_instances=4), 24.0),
        # Instances of two machines: 2 x 2 links x 3/4 x 8; and four shards of 1/4, in rings of two.
        (Layout(4, 2, 1, num_instances=2), 24.0 + 8.0),
        # More instances than machines: rings of 8 ranks, in which 4 links lead to other machines.
        (Layout(4, 2, 1, num_instances=8), 4 * 2 * 7 / 8 * 4),
        # A model on two ranks: two rings of four ranks, each with half of the parameters.
        (Layout(4, 2, 1, model_parallel_ranks=2), 4 * 3 / 4 * 8),
        (Layout(4, 2, 1, model_parallel_ranks=2, num_instances=4), 24.0),
        (Layout(1, 8, 1, num_instances=2), 0.0),
    ],
)
def test_baseline_bytes_follow_instances(layout: Layout, expected: float) -> None:
    """Would catch instances that are counted as inside a machine although they span several."""
    found = baseline_bytes(layout, num_steps=1, element=ElementBytes(4, 4))
    assert found == pytest.approx(expected)


def test_instances_inside_replicas_multiply_warmup_bytes() -> None:
    """Each instance of a replica exchanges all gradients with the other replicas."""
    one, two = (warmup_bytes(Layout(2, 2, 100, num_instances=n), num_steps=1) for n in (1, 2))
    assert (one, two) == (800, 1600)


@pytest.mark.parametrize(
    ("flags", "gradient", "rest"),
    [
        (["--use-distributed-optimizer"], 4, 4),
        ([], 4, 4),
        (["--bf16", "--use-distributed-optimizer"], 4, 2),
        (["--bf16"], 4, 4),
        (["--bf16", "--grad-reduce-in-bf16", "--use-distributed-optimizer"], 2, 2),
        (["--fp16", "--use-distributed-optimizer"], 2, 2),
        (["--fp16", "--accumulate-allreduce-grads-in-fp32"], 4, 4),
    ],
)
def test_bytes_per_step_follow_dtype_flags(flags: list[str], gradient: int, rest: int) -> None:
    """Catches fp32 gradients assumed where Megatron reduces them in 16 bits."""
    assert ElementBytes.of_flags(flags.__contains__) == ElementBytes(gradient, rest)


def test_reading_of_ideal_excludes_last_step() -> None:
    """Neither the last step nor the exchange after it is counted."""
    log = console({i: 2000.0 if i in (1, 2, 12) else 500.0 for i in range(1, 13)})
    ideal = RunKind(KIND.layout, SEQ, warmup_steps=2, is_ideal=True)
    found = make_reading(
        "run", log, log.losses(), [sync(12)], RUN | {"config": {"warmup_steps": 2}}, ideal
    )
    assert found.curves.speed == pytest.approx(80) and found.curves.sent[1].tolist() == [0]
    assert (found.bytes_per_step, found.peak_bytes_per_second) == (0, None)


def test_kind_of_run_follows_from_plan() -> None:
    entries = parse_entries("ddp,stock,edit,a-edit", with_ideal=True)
    found = {run.entry.name: kind_of(run) for run in make_plan(SETTING, entries, ())}
    assert [name for name, kind in found.items() if kind.is_synchronous] == ["ddp", "stock"]
    assert [name for name, kind in found.items() if kind.is_timed] == ["a-edit"]
    assert found["ideal"].is_ideal and found["stock"].is_stock
    assert found["edit"].layout == Layout(2, 2, 0) and found["edit"].element == ElementBytes(4, 4)
    flags = (*SETTING.flags, "--use-distributed-optimizer", "--tensor-model-parallel-size", "2")
    (run,) = make_plan(
        replace(SETTING, flags=flags), parse_entries("stock-instances", with_ideal=False), ()
    )
    instances = kind_of(run)
    assert instances.is_stock and instances.is_synchronous
    assert instances.layout == Layout(2, 2, 0, model_parallel_ranks=2, num_instances=2)


# ---- several runs


def test_spread_is_that_of_known_values() -> None:
    spread = Spread.of([1.0, None, 3.0])
    assert spread == Spread(2.0, math.sqrt(2), 2)
    assert Spread.of([1.0]) == Spread(1.0, None, 1) and Spread.of([None]) is None


def made_up(loss: float, speed: float, *, seed: int | None = None, name: str = "edit") -> Reading:
    """Return a reading; all its values become worse with the seed."""
    worse = 0.25 * (seed or 0)
    steps = np.arange(1.0, 13.0)
    tokens, losses = 40 * steps, loss + worse + 12 - steps
    curves = RunCurves(
        name, seconds=(tokens, steps), training=(tokens, losses),
        validation=(tokens[5::6], losses[5::6]), sent=(tokens[[8, 11]], np.array([300.0, 600.0])),
        final_loss=loss + worse, speed=speed / (1 + worse), local=(240, 480),
        exposed=(0.6, 0.3, 0.3) if name.startswith("edit") else (),
    )  # fmt: skip
    return Reading(
        num_parameters=100, iterations=12, curves=curves, bytes_per_step=100.0,
        peak_bytes_per_second=2e6, state_bytes=800, versions={"torch": "2"},
    )  # fmt: skip


def outcome() -> ComparisonResult:
    """Return the result of three entries with two seeds; one run has failed."""
    entries = parse_entries("ddp,edit,edit:no-clip:lr=<b>", with_ideal=True)[:3]
    runs = make_plan(SETTING, entries, (1, 2))
    values = {"ideal": (9.0, 100.0), "ddp": (5.0, 80.0), "edit": (5.5, 90.0)}
    readings = {
        run: made_up(*values[run.entry.name], seed=run.seed, name=run.entry.label) for run in runs
    }
    failed = next(run for run in runs if run.name == "edit, seed 2")
    del readings[failed]
    return ComparisonResult(runs, readings, {failed: "ended with <exit code> 3"})


def test_rows_compare_runs_of_same_seed() -> None:
    """Ratios and differences are between equal seeds; after a failed run one pair remains."""
    rows = {row.label: row for row in make_rows(outcome())}
    assert rows["ideal"].loss is None
    edit, ddp = rows["edit"], rows["ddp"]
    near: Any = pytest.approx
    assert edit.difference == Spread(near(0.5), None, 1)
    assert edit.share == Spread(near(0.9), None, 1)
    assert ddp.share is not None and ddp.share.num == 2 and ddp.difference is None
    assert ddp.loss == Spread(5.375, near(0.25 / math.sqrt(2)), 2)
    assert edit.failed == ("2",)


def test_diverged_run_is_reported_as_nan(tmp_path: Path) -> None:
    """The report is written, also for the other runs."""
    entries = parse_entries("edit,diloco", with_ideal=False)
    runs = make_plan(SETTING, entries, (1, 2))
    readings = {run: made_up(math.nan if run.seed == 2 else 5.0, 80.0, seed=1) for run in runs}
    found = ComparisonResult(runs, readings, {})
    loss = make_rows(found)[0].loss
    assert loss is not None and math.isnan(loss.mean) and loss.deviation is None
    write_report(tmp_path, found)
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert rows[0]["loss"] == {"mean": None, "deviation": None, "num": 2}
    assert "nan" in (tmp_path / "compare.md").read_text()


def test_table_shows_failures_and_differences() -> None:
    lines = results_table(make_rows(outcome())).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 3 and len({line.count("|") for line in table}) == 1
    assert "edit (failed: seed 2)" in table[-1] and "+0.5000" in table[-1]
    assert "| 90.0% |" in table[-1] and "| 0.0 (8.0) |" in table[-1]


class Page(HTMLParser):
    """Collects references to other resources, and checks that tags are closed."""

    VOID = ("meta", "img", "br", "link", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_is_self_contained_and_escaped(tmp_path: Path) -> None:
    """The page needs no other files; external text is escaped."""
    page = write_report(tmp_path, outcome())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"compare.md", "compare.json", "compare.html", "compare-tokens.png",
                     "compare-time.png", "compare-speed.png", "compare-bytes.png",
                     "compare-parts.png"}  # fmt: skip
    text = page.read_text(encoding="utf-8")
    parsed = Page()
    parsed.feed(text)
    assert not parsed.open and parsed.tags.count("svg") == 5 and "img" not in parsed.tags
    assert not parsed.sources
    assert "script" not in parsed.tags and "@import" not in text
    assert not re.search(r"url\((?!#)", text)  # clip paths refer to the picture itself
    assert 'name="viewport"' in text and "&lt;exit code&gt;" in text
    assert "://" not in re.sub(r"xmlns(:\w+)?=\"[^\"]*\"", "", text)
    assert "var(--c0)" in text and "var(--ink)" in text  # pictures adapt to dark mode
    title = re.search("<title>(.*)</title>", text)
    assert title is not None and title[1].startswith("Comparison of ddp, edit")
    assert title[1].endswith(f"on 2 layers, {socket.gethostname()}, {time.strftime('%Y-%m-%d')}")
    markdown = (tmp_path / "compare.md").read_text(encoding="utf-8")
    for name in re.findall(r"\]\(([^)]+)\)", markdown):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_step_and_round_losses_are_smoothed_alike() -> None:
    """Losses per step and per round of the same training give the same curve.

    Would catch a curve of A-EDiT, with one loss per round, that is smoothed more than others.
    """
    rng = np.random.default_rng(0)
    tokens = np.linspace(100.0, 80_000.0, 800)
    losses = 3 + 5 / np.sqrt(np.arange(1, 801)) + rng.normal(size=800)
    width = 80_000 / 25
    x, fine = smoothed(tokens, losses, width)
    y, coarse = smoothed(tokens[9::10], losses.reshape(-1, 10).mean(axis=1), width)
    assert x[0] == y[0] == 0 and x[-1] == y[-1] == 80_000
    inner = slice(20, -20)  # where the full window lies in the curve
    assert np.abs(fine - coarse)[inner].max() < 0.25 * np.std(np.diff(losses))
    place = 200
    window = losses[int((x[place] - width / 2) // 100) : int((x[place] + width / 2) // 100)]
    assert fine[place] == pytest.approx(window.mean(), abs=0.1)
    losses[3] = math.nan
    assert np.isfinite(smoothed(tokens, losses, width)[1]).all()
    for count in (0, 1):
        assert [a.size for a in smoothed(tokens[:count], losses[:count], width)] == [count] * 2


def test_validation_losses_are_read_from_event_files(tmp_path: Path) -> None:
    """With all digits and without the test set; a run without event files uses the console."""
    log = console({i: 500.0 for i in range(1, 13)})
    (tmp_path / "console.log").write_text(
        "\n".join([LINE.format(i=i, samples=4 * i, ms=500, loss=8) for i in range(1, 13)]
                  + [VALIDATION.format(12, 7.0)])
    )  # fmt: skip
    assert edit_validation(tmp_path, log) == {6: 7.5, 12: 7.0}
    lines: list[dict[str, Any]] = [
        {"iteration": 12, "loss": 6.0},
        {"iteration": 12, "validation_loss": 7.000123456, "split": "validation"},
        {"iteration": 12, "validation_loss": 7.9, "split": "test"},
    ]
    (tmp_path / "loss.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = read_run("run", tmp_path / "console.log", tmp_path, KIND).curves
    assert curves.final_loss == 7.000123456 and curves.training[1].tolist() == [6.0]


def test_run_without_losses_has_no_curves(tmp_path: Path) -> None:
    """Every step of fp16 may have been skipped, so that no loss is logged."""
    (run,) = make_plan(SETTING, parse_entries("edit", with_ideal=False), ())
    reading = made_up(5.0, 80.0)
    curves = replace(reading.curves, training=EMPTY, validation=EMPTY, final_loss=None)
    reading = replace(reading, curves=curves)
    page = write_report(tmp_path, ComparisonResult((run,), {run: reading}, {}))
    text = page.read_text(encoding="utf-8")
    assert "<h3>Speed</h3>" in text and "Loss by" not in text


def test_report_is_written_if_all_runs_failed(tmp_path: Path) -> None:
    """The page names the failure; there are no pictures."""
    runs = make_plan(SETTING, parse_entries("edit", with_ideal=False), ())
    page = write_report(tmp_path, ComparisonResult(runs, {}, {runs[0]: "was not done"}))
    assert "edit was not done" in page.read_text(encoding="utf-8")
    assert not list(tmp_path.glob("*.png"))


# ---- following


def run_python(code: str, log: Path, limits: Limits | None = None) -> RunLog:
    """Follow a small program."""
    return follow("run", [sys.executable, "-uc", code], log_path=log, environment={}, limits=limits)


def test_run_output_is_followed_and_logged(tmp_path: Path) -> None:
    """Also a last line without a line break."""
    line = LINE.format(i=4, samples=16, ms=100.0, loss=8.0)
    code = f"print('hello'); print({line!r}); print(b'\\xff')"
    log = run_python(code, tmp_path / "log")
    assert log.losses() == {4: 8.0} and log.num_iterations == 12
    assert (tmp_path / "log").read_text().startswith("hello\n")


def test_failed_run_reports_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="exit code 3") as failure:
        run_python(FAILING, tmp_path / "log")
    assert failure.value.exit_code == 3
    assert failure.value.tail == ["\n", "the reason\n"] or failure.value.tail == ["the reason\n"]
    assert "what the launcher adds" in (tmp_path / "log").read_text()


def test_tail_of_missing_log_is_empty(tmp_path: Path) -> None:
    """Would catch a study that ends in a traceback if a rank ended before it wrote a log."""
    assert tail(tmp_path / "never-begun.log") == []


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        (Limits(seconds=0.5), "not done after 0.5 s"),
        (Limits(silent_seconds=0.5), "printed nothing"),
    ],
)
def test_hung_run_is_stopped(tmp_path: Path, limits: Limits, complaint: str) -> None:
    with pytest.raises(RunFailedError, match=complaint):
        run_python("import time; time.sleep(60)", tmp_path / "log", limits)
    assert Limits().exceeded(running=1e9, silent=1e9) == ""


def test_automatic_silence_limit_follows_the_longest_silence() -> None:
    """A line every ten steps of 5 minutes is no silence once it has been seen."""
    limits = Limits(silent_seconds=1800.0, silent_factor=4)
    assert limits.exceeded(running=0, silent=1801.0, longest=400.0)
    assert not limits.exceeded(running=0, silent=11_000.0, longest=3000.0)
    assert "12000 s" in limits.exceeded(running=0, silent=12_001.0, longest=3000.0)
    assert Limits(silent_seconds=60.0).exceeded(running=0, silent=61.0, longest=3000.0)


def test_growing_event_files_are_no_silence(tmp_path: Path) -> None:
    """A training that prints nothing and writes event files is not aborted; without them it is."""
    events = tmp_path / "events"
    code = (
        "import pathlib, sys, time; folder = pathlib.Path(sys.argv[1]); folder.mkdir()\n"
        "for step in range(20):\n"
        "    time.sleep(0.1); (folder / 'replica-0.jsonl').open('a').write('{}\\n')\n"
    )
    command = [sys.executable, "-c", code, str(events)]
    limits = Limits(silent_seconds=1.2)
    log = tmp_path / "console.log"
    follow("run", command, log_path=log, environment={}, limits=limits, events=events)
    shutil.rmtree(events)
    with pytest.raises(RunFailedError, match="printed nothing"):
        follow("run", command, log_path=log, environment={}, limits=limits)


def test_failed_run_does_not_stop_others_and_results_are_reused(tmp_path: Path) -> None:
    """Of two entries, one fails; the other is run, and only once."""
    lines = "\n".join(LINE.format(i=i, samples=4 * i, ms=10, loss=8) for i in range(1, 4))
    stub = tmp_path / "stub.py"
    stub.write_text(STUB.format(lines=lines))
    setting = ComparisonSetting(SETTING.script, SETTING.flags, 4, (sys.executable, str(stub)))
    plan: tuple[RunPlan, ...] = make_plan(setting, parse_entries("ddp,edit", with_ideal=False), ())
    messages: list[str] = []
    for _ in range(2):
        found = carry_out(plan, tmp_path / "out", Limits(60, 60), messages.append)
        assert [run.name for run in found.readings] == ["edit"]
        assert [run.name for run in found.failures] == ["ddp"]
        assert "exit code 7" in found.failures[plan[0]]
    assert (tmp_path / "out" / "calls").read_text() == "x"
    assert (
        any("no ddp today" in text for text in messages)
        and "edit (2 of 2): finished before" in messages
    )
    assert folder_of(plan[0], tmp_path / "out").is_dir()  # contains the log of the failed run
    (folder_of(plan[1], tmp_path / "out") / "console.log").unlink()  # then it is trained again
    carry_out(plan, tmp_path / "out", Limits(60, 60), messages.append)
    assert (tmp_path / "out" / "calls").read_text() == "xx"
