"""TensorBoard and W&B that cannot be written.

Would catch: an error of a writer, or of its thread, that reaches training; a warning at every
value; a writer that stays disabled although there is room again.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_edit.host import metrics
from megatron_edit.host.metrics import SafeWriter, reopen_writer
from tests.harness.disk import fill_disk

pytest.importorskip("tensorboard")


def values_in(folder: Path) -> dict[int, float]:
    """Values of the scalar `x` by step, from all event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    found = {}
    for path in folder.iterdir():
        accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
        accumulator.Reload()
        if "x" in accumulator.Tags()["scalars"]:
            found.update({event.step: event.value for event in accumulator.Scalars("x")})
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_recovers_from_a_full_disk(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its thread ends with the error. Earlier values are kept; later values are written once there
    is room."""
    from torch.utils.tensorboard import SummaryWriter

    board: Any = SummaryWriter(str(small_disk / "board"), max_queue=10)
    safe: Any = SafeWriter(board, "TensorBoard", lambda: reopen_writer(board))
    safe.add_scalar("x", 1.0, 1)
    safe.flush()
    filler = fill_disk(small_disk)
    for step in range(2, 2000):
        safe.add_scalar("x", 2.0, step)
    safe.flush()
    monkeypatch.setattr(metrics, "RETRY_SECONDS", 0.0)
    safe._reopens_at = 0.0
    safe.add_scalar("x", 3.0, 2000)  # the disk is still full: opening one anew fails, too
    filler.unlink()
    safe.add_scalar("x", 4.0, 2001)
    safe.flush()
    safe.report_lost_writes()
    found = values_in(small_disk / "board")
    assert found[1] == 1.0 and found[2001] == 4.0 and 2000 not in found
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[edit]")]
    assert len(warnings) == 2
    assert warnings[0].startswith("[edit] TensorBoard cannot be written (OSError: [Errno 28]")
    assert warnings[1].endswith("calls failed, and what they wrote is lost")


def test_failing_wandb_calls_do_not_end_training(capfd: pytest.CaptureFixture[str]) -> None:
    """Each call is tried; attributes, classes and results are those of the module."""

    def log(values: dict[str, float], step: int) -> str:
        if step == 2:
            raise ConnectionError("the service has gone\nand more")
        return "logged"

    def update(values: object) -> None:
        raise ConnectionError

    module = SimpleNamespace(log=log, run="run", Artifact=dict, config=SimpleNamespace())
    module.config.update = update
    safe: Any = SafeWriter(module, "W&B")
    assert [safe.log({}, step) for step in (1, 2, 3)] == ["logged", None, "logged"]
    assert (safe.run, safe.Artifact) == ("run", dict)
    safe.config.update({})
    safe.report_lost_writes()
    first, second, last = capfd.readouterr().err.splitlines()
    assert (
        "W&B cannot be written (ConnectionError: the service has gone); training goes on" in first
    )
    assert "W&B cannot be written (ConnectionError: )" in second
    assert "W&B: 1 calls failed" in last
