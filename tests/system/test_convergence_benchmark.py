"""benchmarks/convergence.py: its plan, its calculations on made-up results, and small runs.

Would catch: a question whose lines share a name, a run repeated for two questions, pairs of
different seeds, bad data in an evaluation or on another replica, an interrupted study that starts
from scratch, and results that depend on the location of the corpus.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from convergence_parts.answers import Answers, FindRun, make_backlog, make_lines
from convergence_parts.cases import Case, Size, Stage
from convergence_parts.corruption import LABELS, TEXT, Corruption
from convergence_parts.expectations import make_blocks, replace_blocks
from convergence_parts.pretrain_corrupted import corrupt
from convergence_parts.records import Record, Records, RunSummary, RunTable, bin_losses, left_out
from convergence_parts.report import draw, markdown
from convergence_parts.study import Study
from frame.launch import DONE, is_over

from megatron_edit.tools.compare.flags import canonical
from tests.harness.launch import REPOSITORY

CORPUS = {"train": "a", "valid": "b"}
SUMMARY = {"source": "a text", "train": {"tokens": 1000}}
SCRIPT = str(REPOSITORY / "benchmarks" / "convergence.py")
STUDY = Study()


def record(loss: float, **changes: Any) -> Record:
    """Make the record of a finished run."""
    fields: dict[str, Any] = {
        "final_loss": loss, "validation": [[960, 1e5, loss]], "training": [[20, 1e3, 9.0]],
        "bytes_per_step": 1e6, "num_syncs": 2, "effective_replicas": 3.5,
        "left_out": [0.0, 0.25, 0.0, 0.0], "rollbacks": 0, "clipped": 0.0, "seconds": 100.0,
        "cpu_seconds": 200.0, "exit_codes": [[0]], "load": [1.0, 1.0], "versions": {"torch": "2"},
    }  # fmt: skip
    return Record(**fields | changes)


def case(**changes: Any) -> Case:
    """Make a case of EDiT with four replicas."""
    found = Case("edit", 1, (Stage(4, 960),), Size(), 96, 16, 2e-3, 32)
    return replace(found, **changes)


# ---- the plan


def test_questions_are_well_formed() -> None:
    """Every base is a line of the same question with common seeds, the first of the study."""
    names = [question.name for question in STUDY.questions]
    assert len(set(names)) == len(names)
    for question in STUDY.questions:
        labels = [member.label for member in question.members]
        assert len(set(labels)) == len(labels)
        for member in question.members:
            assert member.base == "" or (member.base in labels and member.base != member.label)
            seeds = tuple(each.seed for each in member.cases)
            assert seeds and seeds == STUDY.seeds[: len(seeds)]
            base = next((m for m in question.members if m.label == member.base), member)
            assert {each.seed for each in base.cases} & set(seeds)
            assert bool(question.axis) == bool(member.series)
        for each in question.cases:
            assert each.stages[-1].until == each.size.train_iters
            assert each.refusal or "--edit-num-replicas" not in each.words


def test_stages_continue_from_checkpoints() -> None:
    """All stages but the first load, all but the last save; samples per step are constant."""
    elastic = next(q for q in STUDY.questions if q.name == "elastic")
    (down,) = (m.cases[0] for m in elastic.members if m.label == "4, 2, 1")
    assert [(s.num_replicas, s.until) for s in down.stages] == [(4, 320), (2, 640), (1, 960)]
    words = [down.stage_words(number, "S") for number in range(3)]
    assert [("--load" in w, "--save" in w) for w in words] == [
        (False, True), (True, True), (True, False),
    ]  # fmt: skip
    assert {w[w.index("--global-batch-size") + 1] for w in words} == {"32"}
    assert [w[w.index("--edit-num-replicas") + 1] for w in words] == ["4", "2", "1"]
    assert down.cost == case().cost == 4 * 960


def test_hash_depends_on_computation_only() -> None:
    """All these cases have different hashes; ddp does not depend on the sync interval."""
    bad = Corruption(1, ((5, 9),), 1)
    different = [
        case(), case(seed=2), case(tau=64), case(lr=1e-3), case(strategy="ddp"),
        case(flags=("--edit-no-clip",)), case(corruption=bad),
        case(corruption=replace(bad, seed=2)), case(corruption=replace(bad, kind=LABELS)),
        case(stages=(Stage(2, 480), Stage(4, 960))),
        case(stages=(Stage(2, 960),)), case(size=Size(num_layers=3)), case(samples_per_step=64),
    ]  # fmt: skip
    hashes = [each.hash(CORPUS) for each in different]
    assert len(set(hashes)) == len(hashes)
    assert case().hash(CORPUS) != case().hash({"train": "c", "valid": "b"})
    assert case(strategy="ddp").hash(CORPUS) == case(strategy="ddp", tau=64).hash(CORPUS)


def test_cases_refused_by_this_version_are_skipped(tmp_path: Path) -> None:
    refused = case(strategy="no-such-strategy")
    assert refused.refusal and not case().refusal
    assert case(flags=("--edit-clip", "-1")).refusal.startswith("--edit-clip -1")
    assert Records(tmp_path, CORPUS).find(refused) is None


def test_backlog_counts_each_run_once(tmp_path: Path) -> None:
    """Finished runs are not in the backlog."""
    records = Records(tmp_path, CORPUS)
    first = make_backlog(STUDY, records.find)
    todo = [each.hash(CORPUS) for one in first for each in one.todo]
    assert len(set(todo)) == len(todo)
    by_name = {each.question.name: each for each in first}
    assert by_name["warm-up"].planned == 0  # they are also runs of `marks`
    assert by_name["marks"].planned == 15 and by_name["ablation"].planned == 21
    alone = make_backlog(STUDY, records.find, ["warm-up"])
    assert [each.planned for each in alone] == [9]

    records.keep(alone[0].todo[0], record(4.5))
    assert records.find(alone[0].todo[0]) == record(4.5)
    after = make_backlog(STUDY, records.find, ["warm-up"])[0]
    assert (after.finished, after.todo) == (1, alone[0].todo[1:])
    assert after.cost == alone[0].cost - alone[0].todo[0].cost


# ---- bad data


def test_random_tokens_depend_on_seed_and_step_only() -> None:
    plan = Corruption(1, ((3, 5), (8, 9)), seed=7)
    assert Corruption.from_json(plan.to_json()) == plan
    other = replace(plan, kind=LABELS)
    assert Corruption.from_json(other.to_json()) == other
    assert "kind" not in plan.configuration and other.configuration["kind"] == LABELS
    assert [step for step in range(12) if plan.is_corrupted(1, step)] == [3, 4, 8]
    assert not any(plan.is_corrupted(0, step) for step in range(12))
    drawn = plan.tokens(3, (2, 5), 100)
    assert torch.equal(drawn, plan.tokens(3, (2, 5), 100))
    assert not torch.equal(drawn, plan.tokens(4, (2, 5), 100))
    assert not torch.equal(drawn, replace(plan, seed=8).tokens(3, (2, 5), 100))


@pytest.mark.parametrize("kind", [TEXT, LABELS])
def test_only_training_data_is_corrupted(kind: str) -> None:
    """Step 3 of replica 1 is corrupted; evaluations, other steps and other replicas are not."""
    clean = {"tokens": torch.zeros(2, 4, dtype=torch.int64), "labels": torch.ones(2, 4), "x": 1}

    def losses(replica: int) -> Iterator[tuple[int, bool, dict[str, Any]]]:
        megatron = SimpleNamespace(curr_iteration=0, vocab_size=50)
        script = SimpleNamespace(get_args=lambda: megatron, get_batch=lambda *args: clean)
        script.forward_step = lambda data, model: script.get_batch(data, 0)
        corrupt(script, Corruption(1, ((3, 4),), 1, kind), replica)
        for step in range(1, 5):
            megatron.curr_iteration = step - 1
            for is_training in (True, False):
                model = SimpleNamespace(training=is_training)
                yield step, is_training, script.forward_step(None, model)

    for replica in (0, 1):
        for step, is_training, batch in losses(replica):
            if (replica, step, is_training) != (1, 3, True):
                assert batch is clean
                continue
            assert batch["labels"].shape == (2, 4) and batch["x"] == 1
            assert not torch.equal(batch["labels"], clean["labels"])
            if kind == TEXT:
                assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
            else:
                assert batch["tokens"] is clean["tokens"]


# ---- results


def test_records_are_small() -> None:
    points = [(i, 10.0 * i, 8.0 if i <= 50 else 6.0) for i in range(1, 101)]
    thin = bin_losses(points)
    assert len(thin) <= 48 and thin[0] == [3, 30.0, 8.0] and thin[-1] == [100, 1000.0, 6.0]
    assert bin_losses([]) == []
    syncs = [{"anomalous": [[False, True], [False, True]]}, {"anomalous": [[False, False]] * 2}]
    assert left_out(syncs) == [0.0, 0.5] and left_out([]) == []


def finished(losses: dict[str, list[float | None]], name: str) -> FindRun:
    """Return a function that finds the given losses of a question, by case."""
    question = next(q for q in STUDY.questions if q.name == name)
    table = {
        each: record(loss)
        for member in question.members
        for each, loss in zip(member.cases, losses.get(member.label, []), strict=False)
        if loss is not None
    }
    return table.get


def test_differences_pair_equal_seeds() -> None:
    """A seed that only one of two lines has does not count in the difference."""
    losses: dict[str, list[float | None]] = {
        "ddp": [4.0, 4.2, None],
        "edit, warm-up 10 %": [4.1, 4.1, 9.0],
    }
    find = finished(losses, "warm-up")
    question = next(q for q in STUDY.questions if q.name == "warm-up")
    lines = {line.member.label: line for line in make_lines(question, find)}
    edit = lines["edit, warm-up 10 %"]
    assert edit.difference is not None and edit.difference.num == 2 and edit.num_better == 1
    assert edit.difference.mean == pytest.approx(0.0)
    assert edit.loss is not None and edit.loss.num == 3
    assert edit.left_out == "0.0% 25.0% 0.0% 0.0%"
    assert lines["ddp"].difference is None and not lines["edit, warm-up 25 %"].records


def test_page_and_picture_are_written(tmp_path: Path) -> None:
    """The page has tables of the existing results, with a row for each curve of a sweep."""
    two = finished({"ddp": [4.0, 4.2, 4.1], "edit, warm-up 10 %": [4.1, 4.1, 4.4]}, "warm-up")
    labels = [f"ddp, N = 1, {rate}" for rate in ("0.0005", "0.001", "0.002", "0.004", "0.008")]
    rates = finished({x: [5 - i, 5 - i] for i, x in enumerate(labels)}, "rates")

    def find(each: Case) -> RunSummary | None:
        return two(each) or rates(each)

    text = markdown(STUDY, find, SUMMARY, "x.png")
    for line in text.splitlines():
        assert "None" not in line
    assert "| +0.1000 ± 0.2000 (+2.48%) to ddp | 1 of 3 |" in text
    assert "| ddp, N = 1 | 5.0000 ± 0.0000 |" in text and "| 0.008 |" in text
    assert "Not run yet: edit, warm-up 25 %." in text and "## One of four replicas" not in text
    assert draw(tmp_path / "x.png", STUDY, find)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert not draw(tmp_path / "y.png", STUDY, lambda each: None)


def test_run_table_replaces_run_records(tmp_path: Path) -> None:
    """Runs in the table are not repeated, and its page equals that of the run records."""
    corpus: dict[str, Any] = {
        part: {"sha256": text, "tokens": 1000} for part, text in CORPUS.items()
    }
    corpus["source"] = "a text"
    records, path = Records(tmp_path / "runs", CORPUS), tmp_path / "runs.json"
    warm_up = next(q for q in STUDY.questions if q.name == "warm-up")
    labels = {each: f"seed {each.seed}" for each in warm_up.cases}
    losses = [3.0830049, 3.1742, 3.21, 3.3]
    for each, loss in zip(labels, losses, strict=False):
        records.keep(each, record(loss, effective_replicas=None if loss > 3.2 else 3.5))
    RunTable({}, {}, {}).with_runs(corpus, records, labels).write(path)
    table = RunTable.read(path)
    assert len(table.runs) == len(losses) and table.corpus == corpus
    assert all(type(run) is RunSummary for run in table.runs.values())
    texts = [markdown(STUDY, find, corpus, "x.png") for find in (table.find, records.find)]
    assert texts[0] == texts[1] and "3.1915 ± " in texts[0]

    elsewhere = Records(tmp_path / "none", CORPUS, table)
    (backlog,) = make_backlog(STUDY, elsewhere.find, ["warm-up"])
    assert backlog.finished == len(losses)
    again = table.with_runs(corpus, elsewhere, {})  # without any new run
    assert again == table


def test_committed_page_matches_committed_results() -> None:
    """Would catch changed tables or questions without `convergence.py --report`."""
    path = REPOSITORY / "benchmarks" / "results" / "convergence.json"
    table = RunTable.read(path)
    text = markdown(STUDY, table.find, table.corpus, "convergence.png")
    assert text == path.with_suffix(".md").read_text(encoding="utf-8")


def test_results_page_matches_committed_results() -> None:
    """Would catch changed runs or targets without `convergence.py --report`."""
    table = RunTable.read(REPOSITORY / "benchmarks" / "results" / "convergence.json")
    page = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    drawing = "convergence_gaps.png"
    assert (REPOSITORY / "docs" / drawing).is_file()
    assert replace_blocks(page, make_blocks(Answers(STUDY, table.find), drawing)) == page


def test_rank_failure_after_training_does_not_fail_run(tmp_path: Path) -> None:
    """Replica 0 reports the end of training on its console, the others in their files."""
    assert not is_over(tmp_path, 0)
    (tmp_path / "console0.log").write_text(f"x\n{DONE} at noon\n")
    (tmp_path / "replica-1.log").write_text(f"{DONE}\n")
    (tmp_path / "console1.log").write_text("")
    assert is_over(tmp_path, 0) and is_over(tmp_path, 1) and not is_over(tmp_path, 2)


@pytest.mark.parametrize(
    "words", [["--only", "nonsense"], ["--seeds", "a"], ["--limit-minutes", "-1"]]
)
def test_bad_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("convergence", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.raises(SystemExit) as stop:
        script.parse(words)
    assert stop.value.code == 2 and words[0] in capsys.readouterr().err


# ---- real runs


def study(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start the study of a tiny model."""
    argv = [sys.executable, SCRIPT, "--quick", "--seeds", "1", "--records", str(folder / "runs"),
            "--output", str(folder / "runs.json"), "--corpus", str(folder / "corpus"),
            *words]  # fmt: skip
    return subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def files(folder: Path) -> dict[Path, int]:
    """Return the files of finished runs with their modification times."""
    return {path: path.stat().st_mtime_ns for path in (folder / "runs").glob("*.json")}


@pytest.mark.timeout(400)
def test_interrupted_study_resumes(tmp_path: Path) -> None:
    """After an interruption, finished runs are not repeated."""
    words = ("--only", "warm-up")
    first = study(tmp_path, *words)
    try:
        deadline = time.monotonic() + 150
        while not files(tmp_path):
            assert first.poll() is None and time.monotonic() < deadline, first.communicate()
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        _, message = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 130 and "the same command resumes" in message, message
    before = files(tmp_path)
    assert len(before) < 3

    listed = study(tmp_path, *words, "--list")
    out, _ = listed.communicate(timeout=100)
    assert out.splitlines()[1].split()[:3] == ["warm-up", "3", str(len(before))]

    second = study(tmp_path, *words)
    _, message = second.communicate(timeout=200)
    assert second.returncode == 0, message
    after = files(tmp_path)
    assert len(after) == 3 and before.items() <= after.items()
    page = (tmp_path / "runs.md").read_text(encoding="utf-8")
    assert "| edit, warm-up 25 % | 1 of 1 |" in page
    assert (tmp_path / "runs.png").stat().st_size > 5000


@pytest.mark.full
def test_elastic_and_corrupted_runs(tmp_path: Path) -> None:
    """Replica counts change at resumes; bad data on one replica change later losses only."""
    done = study(tmp_path, "--only", "elastic,bursts")
    _, message = done.communicate(timeout=560)
    assert done.returncode == 0, message[-4000:]
    records = [json.loads(path.read_text()) for path in files(tmp_path)]
    by_stages = {json.dumps(r["configuration"]["stages"]): r["result"] for r in records}
    for stages in ("[[1, 10], [2, 20], [4, 30]]", "[[4, 10], [2, 20], [1, 30]]"):
        result = by_stages[stages]
        assert [v[0] for v in result["validation"]] == [15, 30]
        assert [t[0] for t in result["training"]] == list(range(1, 31))
        assert result["training"][-1][1] == 30 * 4 * 16  # tokens continue across stages
    flags = case().words  # of EDiT with default settings
    plain = [
        r
        for r in records
        if r["configuration"]["flags"].keys() == canonical(flags).keys()
        and r["configuration"]["flags"]["--edit-strategy"] == ["edit"]
        and r["configuration"]["stages"] == [[4, 30]]
    ]
    clean, bad = sorted(plain, key=lambda r: r["configuration"]["corruption"] is not None)
    until_burst = bad["configuration"]["corruption"]["bursts"][0][0] - 1
    same = [
        a == b for a, b in zip(clean["result"]["training"], bad["result"]["training"], strict=True)
    ]
    assert all(same[:until_burst]) and not any(same[until_burst:])
