"""Convergence of the strategies on real text: a long study that can be interrupted and resumed.

    python benchmarks/convergence.py --list
    python benchmarks/convergence.py --limit-minutes 60

A GPT of about a million parameters trains on Python's standard library, with replicas of one rank
on the cores of this machine. The questions, in order of priority, are in
`convergence_parts/study.py`. Each finished run is stored as a JSON file, named by the hash of its
configuration, in a folder that git ignores (`--records`). OUTPUT,
`benchmarks/results/convergence.json`, has a row for each run; runs in either are not repeated. The
page and the pictures next to OUTPUT are made from it alone, and so are the parts of
docs/results.md on expected losses.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from convergence_parts.answers import Answers, Backlog, make_backlog
from convergence_parts.bench import Bench, Corpus
from convergence_parts.cases import Case, Size
from convergence_parts.expectations import draw_gaps, make_blocks, replace_blocks
from convergence_parts.records import Record, Records, RunTable, corpus_identity, make_record
from convergence_parts.report import draw, markdown
from convergence_parts.study import SEEDS, Study
from frame.launch import BENCHMARKS, REPOSITORY, RunFailedError
from frame.readings import read_console
from frame.study import parse_quick, say, split_commas

from megatron_edit.tools.compare.follow import Bar, progress_bar

OUTPUT = BENCHMARKS / "results" / "convergence.json"
USER_PAGE = REPOSITORY / "docs" / "results.md"
GAPS = USER_PAGE.with_name("convergence_gaps.png")
OUT = BENCHMARKS / "out"
CORPUS = Path(tempfile.gettempdir()) / "megatron_edit_convergence_corpus"
INTERRUPTED = 130
# Approximate seconds per step of a replica on two idle cores.
SECONDS_PER_STEP = 0.04
QUICK = Size(
    num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=16, vocab_size=320,
    micro_batch_size=1, train_iters=30, eval_interval=15, eval_samples=16, lr_warmup_iters=2,
)  # fmt: skip
MEGABYTES, QUICK_MEGABYTES = 8.0, 0.4


def main(argv: Sequence[str]) -> int:
    """List, or run and report; returns 1 where a run failed, 130 where interrupted."""
    args = parse(argv)
    study = Study(QUICK if args.quick else Size(), seeds=args.seeds)
    if args.report:
        return report(study, args.output)
    megabytes = QUICK_MEGABYTES if args.quick else MEGABYTES
    corpus = Corpus.ensure(args.corpus, study.size.vocab_size, max_megabytes=megabytes)
    table, identity = RunTable.read(args.output), corpus_identity(corpus.summary)
    if table.corpus and corpus_identity(table.corpus) != identity:
        print(f"convergence: {args.output} is of another text ({table.corpus['source']}); "
              "give another --output", file=sys.stderr)  # fmt: skip
        return 1
    records = Records(args.records, identity, table)
    backlog = make_backlog(study, records.find, args.only)
    if args.list:
        print(format_backlog(backlog, records))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the ranks are stopped, too
    code = 0
    runner = Runner(Bench(corpus.flags, args.time_limit), records, args.limit_minutes)
    try:
        runner.run(backlog)
    except KeyboardInterrupt:
        say("interrupted; the same command resumes")
        code = INTERRUPTED
    labels = {
        case: f"{question.name}: {member.label}, seed {case.seed}"
        for question in reversed(study.questions)
        for member in question.members
        for case in member.cases
    }
    table.with_runs(corpus.summary, records, labels).write(args.output)
    return report(study, args.output) or code or bool(runner.failures)


def report(study: Study, output: Path) -> int:
    """Write the page and the pictures of OUTPUT next to it; returns 1 where OUTPUT is missing.

    For the default OUTPUT, update the generated parts of docs/results.md, too.
    """
    table = RunTable.read(output)
    if not table.corpus:
        print(f"convergence: there is no {output}", file=sys.stderr)
        return 1
    page, picture = (output.with_suffix(suffix) for suffix in (".md", ".png"))
    draw(picture, study, table.find)
    text = markdown(study, table.find, table.corpus, picture.name)
    page.write_text(text, encoding="utf-8")
    say(f"page: {page}")
    answers = Answers(study, table.find)
    gaps = GAPS if output == OUTPUT else output.with_name(f"{output.stem}_gaps.png")
    is_drawn = draw_gaps(gaps, answers)
    if output == OUTPUT:
        texts = make_blocks(answers, GAPS.name if is_drawn else "")
        USER_PAGE.write_text(
            replace_blocks(USER_PAGE.read_text(encoding="utf-8"), texts), encoding="utf-8"
        )
        say(f"page: {USER_PAGE}")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--list", action="store_true", help="list the missing runs and how long they may take")
    add("--report", action="store_true", help="only write the page of OUTPUT again")
    add("--only", default="", help="names of questions, separated by commas (default: all)")
    add("--limit-minutes", type=float, default=math.inf, help="start no run that would not "
        "finish by then (default: no limit)")  # fmt: skip
    add("--seeds", default=",".join(map(str, SEEDS)), help="(default: %(default)s)")
    add("--output", type=Path, default=OUTPUT, help="JSON file with a row for each finished run, "
        "page and picture next to it (default: benchmarks/results/convergence.json)")  # fmt: skip
    add("--records", type=Path, default=OUT / "convergence", help="folder of finished runs "
        "(default: benchmarks/out/convergence)")  # fmt: skip
    add(
        "--corpus",
        type=Path,
        default=CORPUS,
        help="folder of the corpus; prepared if there is none",
    )
    add("--time-limit", type=float, default=1800.0, help="seconds until a stage of a run is "
        "stopped (default: %(default)g)")  # fmt: skip
    add("--quick", action="store_true", help="a smoke test: a tiny model and a few steps")
    quick = {"output": OUT / "convergence_quick.json", "records": OUT / "convergence_quick"}
    args = parse_quick(parser, argv, quick)
    args.only = split_commas(args.only)
    names = [question.name for question in Study().questions]
    if unknown := set(args.only) - set(names):
        parser.error(f"--only {','.join(sorted(unknown))}: must be of {', '.join(names)}")
    try:
        args.seeds = tuple(int(word) for word in args.seeds.split(","))
    except ValueError:
        parser.error(f"--seeds {args.seeds}: must be whole numbers; give for example 1,2,3")
    if not args.limit_minutes >= 0:
        parser.error(f"--limit-minutes {args.limit_minutes:g}: must be 0 or more")
    return args


def format_backlog(backlog: Sequence[Backlog], records: Records) -> str:
    """Return a table of finished and missing runs, by question."""
    rate = seconds_per_step(backlog, records)
    rows: list[tuple[int, ...]] = [
        (each.planned, each.finished, each.refused, each.cost, each.refused_cost)
        for each in backlog
    ]
    rows.append(tuple(map(sum, zip(*rows, strict=True))))
    names = [*(each.question.name for each in backlog), "total"]
    lines = [f"{'question':14} {'runs':>5} {'finished':>9} {'refused':>8} {'hours left':>11} "
             f"{'and refused':>12}"]  # fmt: skip
    for name, (planned, finished, refused, cost, more) in zip(names, rows, strict=True):
        hours = [steps * rate / 3600 for steps in (cost, more)]
        lines.append(f"{name:14} {planned:5} {finished:9} {refused:8} {hours[0]:11.1f} "
                     f"{hours[1]:12.1f}")  # fmt: skip
    return "\n".join(lines)


def seconds_per_step(backlog: Sequence[Backlog], records: Records) -> float:
    """Return seconds per step of a replica: of the finished runs, else an estimate."""
    found = [
        record.seconds / case.cost
        for each in backlog
        for case in each.question.cases
        if (record := records.find(case)) is not None
    ]
    return sorted(found)[len(found) // 2] if found else SECONDS_PER_STEP


class Runner:
    """Makes the missing runs in order, and records each as soon as it is finished.

    Args:
        bench: runs the cases.
        records: of finished runs.
        limit_minutes: of the study; a run that would not finish by then is not started.
    """

    def __init__(self, bench: Bench, records: Records, limit_minutes: float) -> None:
        self._bench, self._records = bench, records
        self._deadline = time.monotonic() + 60 * limit_minutes
        self.failures: list[str] = []

    def run(self, backlog: Sequence[Backlog]) -> None:
        """Make all missing runs. A failed run does not stop the study."""
        total = sum(each.cost for each in backlog)
        rate = seconds_per_step(backlog, self._records)
        with progress_bar("study", total=total, unit="step") as bar:
            for each in backlog:
                for case in each.todo:
                    if time.monotonic() + case.cost * rate > self._deadline:
                        say("time limit reached; the same command resumes")
                        return
                    name = f"{each.question.name}: {case.strategy}, seed {case.seed}"
                    bar.set_postfix_str(name)
                    record = self._run_case(case, name, bar)
                    rate = record.seconds / case.cost if record is not None else rate

    def _run_case(self, case: Case, name: str, bar: Bar) -> Record | None:
        load = os.getloadavg()[0]
        start = bar.n
        try:
            with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
                stages = self._bench.run(case, Path(folder), _make_follower(case, bar, start))
                record = make_record(case, stages, load)
        except (RunFailedError, ValueError) as error:
            self.failures.append(f"{name}: {error}")
            say(f"{name}: {error}")
            return None
        finally:
            bar.update(start + case.cost - bar.n)
        self._records.keep(case, record)
        spent = f"{record.seconds:.0f} s, {record.cpu_seconds:.0f} s of computing"
        say(f"{name}: {record.final_loss:.4f} in {spent}")
        return record


def _make_follower(case: Case, bar: Bar, start: float) -> Callable[[Path], None]:
    """Return a callback that moves the bar to the last iteration of a console."""

    def follow(console: Path) -> None:
        if not console.exists():
            return
        iteration = read_console(console).last_iteration
        reached = start + case.cost * iteration / case.stages[-1].until
        if reached > bar.n:
            bar.update(reached - bar.n)

    return follow


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
