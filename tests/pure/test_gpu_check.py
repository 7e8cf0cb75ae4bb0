"""benchmarks/gpu_check.py without a GPU: its cases, and its analysis of made-up data and traces.

Would catch: replicas that differ from each other or from the CPU and still pass; a case that hangs
and uses up the time of the others.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_check
import pytest
import torch
from frame.launch import REPOSITORY, RunFailedError
from gpu_parts.cases import Case, Software, cases_for, chosen, lacking
from gpu_parts.device import DeviceError, Devices, describe_devices, look, nccl_version
from gpu_parts.plan import Plan
from gpu_parts.report import Analysis, markdown
from gpu_parts.runs import (
    Bench,
    Reading,
    _after_hub,
    _after_kill,
    backend,
)

CASES = {case.name: case for case in cases_for("cuda", 4)}
NUM_SYNCS = 5
SYNCED = ["a"] * NUM_SYNCS


def reading(case: str, **changed: Any) -> Reading:
    """Return the reading of a case that passes."""
    found = Reading(
        case=case,
        losses=[7.0, 6.0, 5.0],
        iterations=[1, 2, 3],
        digests=[SYNCED, SYNCED],
        step_ms=[10.0] * 60,
        sync_steps=[20, 30, 40, 50, 60],
        exposed_ms=[5.0] * NUM_SYNCS,
        backend="nccl",
        peak_bytes=3000,
        num_parameters=100,
        seconds=20.0,
    )
    return replace(found, **changed)


def analysis(*readings_: Reading) -> Analysis:
    """Return an analysis with CPU losses for `overlap`."""
    return Analysis(CASES, readings_, {"overlap": [[1.0, 2.0, 3.0], [7.0, 6.0, 5.0]]})


def test_most_valuable_cases_come_first() -> None:
    """In the order in which ten minutes of a machine are worth most."""
    one, two, eight = ([case.name for case in cases_for("cuda", count)] for count in (1, 2, 8))
    assert one[:6] == [
        "group-calls", "large-stock", "large-overlap", "large-delayed", "large-offload", "resumed",
    ]  # fmt: skip
    assert one[6:10] == [f"shared-{name}" for name in (
        "overlap", "tp2-overlap", "tp2-int8", "tp2-delayed-int8")]  # fmt: skip
    assert eight[:14] == [
        "group-calls", "delayed-int8-tp2", "stopped", "killed", "overlap", "separate", "te",
        "te-fp8", "te-precision-aware", "vpp", "ep", "cp", "elastic", "muon",
    ]  # fmt: skip
    assert eight[14:17] == ["large-stock", "large-overlap", "large-delayed"]
    assert eight.index("large-offload") < eight.index("blocking") < eight.index("overlap-tp2")
    needs_four = {case.name for case in cases_for("cuda", 4) if case.num_ranks == 4}
    assert set(eight) - set(two) == needs_four >= {"vpp", "ep", "cp", "delayed-int8-tp2"}
    for names in (one, two, eight):
        assert len(set(names)) == len(names)
    assert not any(case.size == "large" for case in cases_for("cpu", 4))
    with pytest.raises(ValueError, match="overlop: must be of group-calls, "):
        chosen(cases_for("cuda", 1), ["overlop"])


@pytest.mark.parametrize(
    ("name", "lacks", "reason"),
    [
        ("overlap", {}, None),
        ("te-fp8", {}, None),
        ("te-fp8", {"has": lambda _: False}, "transformer_engine"),
        ("te-fp8", {"device": "cpu"}, "a GPU"),
        ("muon", {"has": lambda _: False}, "emerging_optimizers"),
        ("elastic", {}, None),
        ("elastic", {"torch": (2, 11)}, "torch 2.14"),
        ("shared-tp2-int8", {}, None),
        ("shared-tp2-int8", {"nccl": (2, 28)}, "NCCL 2.30"),
    ],
)
def test_missing_software_is_named(name: str, lacks: dict[str, Any], reason: str | None) -> None:
    """Catches a case that fails, and one that is skipped, for no reason."""
    cases = {case.name: case for count in (1, 4) for case in cases_for("cuda", count)}
    software = Software("cuda", (2, 14), (2, 30), lambda _: True)
    assert lacking(cases[name], replace(software, **lacks)) == reason


def test_cases_begin_only_while_their_time_fits() -> None:
    """Expected times follow the measured ones. Catches a run that is cut off in a case that it
    should not have begun, and cases that are left out without being named."""
    now = [100.0]
    cases = [CASES[name] for name in ("overlap", "delayed", "resumed", "blocking", "te")]
    seconds = CASES["overlap"].seconds
    plan = Plan(cases, {"te": "transformer_engine"}, 100.0 + 5 * seconds, lambda: now[0])
    assert plan.expected(cases[0]) <= plan.left
    now[0] += 2 * seconds
    plan.end(cases[0], 2 * seconds)  # twice as long as estimated
    assert plan.left == 3 * seconds
    assert [plan.expected(case) / seconds for case in cases[1:3]] == [2, 4]
    plan.end(cases[1], None)  # failed: says nothing about times
    left_out = {each["case"]: each for each in plan.left_out()}
    assert left_out.keys() == {"resumed", "blocking", "te"}
    assert left_out["resumed"]["seconds"] == 4 * seconds
    assert left_out["te"]["lacking"] == "transformer_engine"
    assert "--budget" in left_out["blocking"]["lacking"]


def test_one_gpu_fits_the_default_time() -> None:
    """What matters most, with the start of the check and slower steps than expected."""
    valuable = cases_for("cuda", 1)[:10]
    together = [case.seconds for case in valuable if case.size == "small"]
    alone = [case.seconds for case in valuable if case.size == "large"]
    assert sum(alone) + sum(together) < 420


def test_number_of_syncs_includes_short_last_round() -> None:
    """Training ends with a sync, however short the last round."""
    assert [CASES[name].num_syncs for name in ("stock", "overlap", "a-edit")] == [0, 5, None]
    assert [Case("x", steps=steps).num_syncs for steps in (45, 50, 51)] == [4, 4, 5]


def test_case_flags_select_edit_and_device() -> None:
    """Stock Megatron trains without EDiT; parameters are always initialized on the CPU."""
    stock, overlap = (CASES[name].flags("cuda", "DIR") for name in ("stock", "overlap"))
    assert "--use-edit" not in stock and "--use-edit" in overlap
    for words in (stock, overlap):
        assert "--use-cpu-initialization" in words
        last = len(words) - 1 - words[::-1].index("--edit-device")
        assert words[last + 1] == "cuda"


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({}, None),
        ({"digests": [SYNCED, ["a"] * (NUM_SYNCS - 1) + ["b"]]}, "replicas differ"),
        ({"digests": [SYNCED[1:], SYNCED[1:]]}, f"{NUM_SYNCS - 1} syncs, not {NUM_SYNCS}"),
        ({"losses": [7.0, math.nan, 5.0]}, "not finite"),
        ({"losses": [7.0, 7.1, 7.2]}, "loss 7.000 -> 7.200"),
        ({"losses": [7.0, 6.2, 5.2]}, "from the CPU's, more than 0.002"),
        ({"iterations": [1, 2, 4]}, "losses inf from the CPU's"),
    ],
)
def test_each_failed_check_is_reported_in_one_line(
    changed: dict[str, Any], complaint: str | None
) -> None:
    """There is no complaint if all checks pass."""
    found = analysis(reading("overlap", **changed)).complaints()
    if complaint is None:
        assert found == []
    else:
        assert any(complaint in line for line in found), found
        assert all(line.startswith("overlap: ") for line in found)


def test_a_edit_case_needs_at_least_two_syncs() -> None:
    """The number of its syncs varies, and its losses are not compared with the CPU."""
    few, enough = (reading("a-edit", digests=[["a"] * count] * 2) for count in (1, 2))
    assert analysis(few).complaints() == ["a-edit: 1 syncs, fewer than 2"]
    assert not analysis(enough).complaints() and analysis(enough).distance(enough) is None


def test_rows_compare_time_and_memory_with_stock() -> None:
    """Time beyond the median step; bytes per parameter beyond stock Megatron of the same size."""
    slow_syncs = [110.0 if step % 10 == 1 else 10.0 for step in range(1, 61)]
    rows = analysis(
        reading("stock", digests=[[]], peak_bytes=2000),
        reading("overlap", step_ms=slow_syncs),
        reading("large-stock", digests=[[]], peak_bytes=100),
    ).rows()
    assert [row["bytes_beyond_stock"] for row in rows] == [0.0, 10.0, 0.0]
    assert rows[1]["step_ms"] == 10.0
    # Steps 22 to 60 hold three syncs: 300 of 690 ms.
    assert rows[1]["share_beyond_median_step"] == pytest.approx(300 / 690)


def test_step_beside_an_exchange_is_told_apart() -> None:
    """The steps after the starts of delayed syncs, without the first and the last sync."""
    steps = [25.0 if step in (31, 41, 51) else 10.0 for step in range(1, 61)]
    rows = analysis(reading("delayed", step_ms=steps), reading("overlap", step_ms=steps)).rows()
    assert [row["beside_ms"] for row in rows] == [25.0, None]


def test_losses_are_compared_with_those_of_a_like_case() -> None:
    """Launches of their own, and NCCL on one GPU, must not change the losses."""
    assert CASES["separate"].like == "overlap"
    found = analysis(reading("separate", losses=[7.0, 6.2, 5.2])).complaints()
    assert any("from the CPU's" in line for line in found)


def test_memory_is_compared_at_same_precision_only() -> None:
    """Memory of stock Megatron in bf16 is no baseline for fp32."""
    fp32 = analysis(reading("stock", digests=[[]]), reading("overlap-fp32")).rows()[1]
    assert fp32["bytes_per_parameter"] == 30.0 and fp32["bytes_beyond_stock"] is None


def test_report_lists_cases_and_failures() -> None:
    """The page lists failures before the cases."""
    rows = analysis(reading("stock", digests=[[]]), reading("overlap")).rows()
    summary = {
        "device": "A GPU", "num_devices": 1, "rows": rows,
        "outcomes": [{"case": "killed", "seconds": 9.0, "numbers": {"seconds to the end": 6.0}}],
        "left_out": [{"case": "muon", "seconds": 30.0, "lacking": "more time (--budget)"}],
    }  # fmt: skip
    page = markdown(summary, ["overlap: replicas differ after a sync"])
    assert "A GPU x 1" in page and "- FAILED: overlap: replicas differ" in page
    assert "| killed | seconds to the end | 6.0 |" in page
    assert "| muon | 30 | more time (--budget) |" in page
    assert "All checks passed." in markdown(summary, [])


def test_case_without_readings_fails_alone(tmp_path: Path) -> None:
    """Its logs are kept, and no other exception ends the remaining cases."""
    bench = Bench.__new__(Bench)
    bench._device, bench._count, bench._output = "cpu", 1, tmp_path / "check.json"
    bench._port, bench._choice = 28500, threading.Lock()
    bench._forks = SilentForks()  # type: ignore[assignment]
    with pytest.raises(RunFailedError, match="output is incomplete"):
        bench.measure(CASES["stock"], 5.0)
    assert (tmp_path / "check.stock.console0.log").read_text() == "nothing"


class SilentForks:
    """Trainings that succeed without output."""

    @contextmanager
    def training(self, name: str, folder: Path, ranks: Any, **_: Any) -> Iterator[Any]:
        """Write an empty console log and return a finished training."""
        (folder / "console0.log").write_text("nothing")
        yield SimpleNamespace(to_end=lambda *args, **kwargs: [0])


def test_find_returns_device_or_reason() -> None:
    """The device is examined in a child process; without one, torch's last error line is raised."""
    with pytest.raises(DeviceError, match="torch finds no GPU"):
        look("cuda")
    found = describe_devices("cpu")
    assert (found.name, found.count) == ("CPU", 1)


def test_backend_is_read_from_console() -> None:
    """The backend is named in one console line."""
    assert backend(["x", "megatron_edit: exchanges over gloo (--edit-sync-backend auto)"]) == "gloo"
    assert backend(["x"]) is None


def test_single_replica_case_is_stock() -> None:
    """A case of one replica is stock Megatron."""
    assert Case("x", num_replicas=1).is_stock and Case("x", ranks=2).num_ranks == 4


def bench(count: int, device: str = "cuda") -> Bench:
    """A bench for so many devices that starts nothing."""
    made = Bench.__new__(Bench)
    made._device, made._count, made._port, made._choice = device, count, 28500, threading.Lock()
    return made


def test_ranks_on_a_shared_gpu_use_nccl(tmp_path: Path) -> None:
    """One launch whose ranks all see one local rank, and NCCL told to accept them."""
    (case,) = chosen(cases_for("cuda", 1), ["shared-tp2-delayed-int8"])
    ranks = bench(1)._ranks(case, tmp_path, [], "", apart=False)
    assert len(ranks) == 4
    for rank in ranks:
        assert rank.environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert rank.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert rank.words[rank.words.index("--edit-sync-backend") + 1] == "nccl"
        assert "--edit-rendezvous" not in rank.words


def test_separate_launches_have_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that the user has selected. Catches launches that share the first GPU."""
    (case,) = chosen(cases_for("cuda", 2), ["separate"])
    for visible, expected in ((None, ["0", "1"]), ("5,7", ["5", "7"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        ranks = bench(2)._ranks(case, tmp_path, [], "", apart=True)
        assert [rank.environment["CUDA_VISIBLE_DEVICES"] for rank in ranks] == expected
        assert [rank.words[-1] for rank in ranks] == ["0", "1"]
        assert "--edit-rendezvous" in ranks[0].words


def test_only_the_last_rank_is_harmed(tmp_path: Path) -> None:
    cases = chosen(cases_for("cuda", 2), ["killed", "stopped"])
    killed, stopped = (bench(2)._ranks(c, tmp_path, [], "", apart=False) for c in cases)
    assert [rank.environment.get("GPU_CHECK_FAULT") for rank in killed] == [None, "kill"]
    assert [rank.environment.get("GPU_CHECK_FAULT") for rank in stopped] == [None, "stop"]


@pytest.mark.parametrize(
    ("codes", "complaints"), [([4, -9], []), ([-6, -9], ["rank 0 exited with -6, not 4"])]
)
def test_survivors_of_a_kill_must_name_it(
    tmp_path: Path, codes: list[int], complaints: list[str]
) -> None:
    """Catches a survivor that PyTorch's watchdog aborts. A case that killed nobody has failed."""
    with pytest.raises(ValueError, match="was not killed"):
        _after_kill(tmp_path, codes)
    (tmp_path / "fault").write_text(str(time.time() - 3))
    found, numbers = _after_kill(tmp_path, codes)
    assert found == complaints and 3 <= numbers["seconds until all ranks ended"] < 30


def test_elastic_run_must_commit(tmp_path: Path) -> None:
    """The hub's journal is read."""
    (tmp_path / "hub").mkdir()
    lines = ['{"event": "join"}', '{"event": "commit"}']
    (tmp_path / "hub" / "journal.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert _after_hub(tmp_path) == (["1 commits, fewer than 2"], {"commits": 1.0})


def test_another_nccl_is_loaded_and_asked_for_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the device is described, so that all processes load it. Catches cases that are skipped
    for torch's own, older version."""
    library = tmp_path / "libnccl.so.2"
    library.touch()
    seen: list[str | None] = []

    def described(device: str) -> Devices:
        seen.append(os.environ.get("LD_PRELOAD"))
        return Devices("A GPU", 1, {"nccl": "2.30.7" if seen[-1] else "2.28.9"})

    monkeypatch.setattr(gpu_check, "look", described)
    monkeypatch.setenv("LD_PRELOAD", "")
    words = ["--output", str(tmp_path / "check.json")]
    lacking_own = gpu_check.parse(words).lacking
    lacking_new = gpu_check.parse([*words, "--nccl", str(library)]).lacking
    assert seen == ["", str(library)]
    assert "shared-overlap" in lacking_own and not lacking_new
    assert gpu_check.parse(words).budget == 500


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="a torch without NCCL")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_torch_uses_the_nccl_that_is_loaded_first(tmp_path: Path) -> None:
    """A preloaded library with nothing but a version: torch does not find the rest in its own."""
    source, library = tmp_path / "nccl.c", tmp_path / "other.so"
    source.write_text("int ncclGetVersion(int *v) { *v = 29912; return 0; }")
    argv = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", str(library), str(source)]
    subprocess.run(argv, check=True)
    code = "from gpu_parts.device import nccl_version; print(nccl_version())"
    own, other = (
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | more, capture_output=True, text=True,
            cwd=REPOSITORY / "benchmarks",
        )
        for more in ({}, {"LD_PRELOAD": str(library)})
    )  # fmt: skip
    assert own.stdout.strip() == ".".join(map(str, torch.cuda.nccl.version())), own.stderr
    assert "undefined symbol: nccl" in other.stderr


def test_version_is_that_of_the_loaded_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the version that torch was compiled with, which is another than that of `--nccl`."""

    class Library:
        """NCCL, of which only the version is asked."""

        def __init__(self, name: str) -> None:
            assert name == "libnccl.so.2"

        def ncclGetVersion(self, number: Any) -> None:
            number._obj.value = 23105

    monkeypatch.setattr("gpu_parts.device.ctypes.CDLL", Library)
    assert nccl_version() == "2.31.5"
