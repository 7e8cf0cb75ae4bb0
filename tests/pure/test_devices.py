"""Choice of the device: GPUs that torch cannot use are never silently replaced by the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.host.devices import choose_device, unusable_gpus, visible_gpus

AUTO = EditConfig()
NVIDIA, DRIVER, AMD = "dev/nvidia0", "proc/driver/nvidia/gpus/0000:3b:00.0", "dev/kfd"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def machine(root: Path, *files: str) -> Path:
    """Create a file system root with these files."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


@pytest.mark.parametrize("file", [NVIDIA, DRIVER, AMD])
def test_gpu_that_torch_cannot_use_is_refused(file: str, tmp_path: Path) -> None:
    """Catches a GPU job that trains for days on the CPU. Each rank must raise the error itself."""
    with pytest.raises(UsageError) as caught:
        choose_device(AUTO, machine(tmp_path, file))
    message = str(caught.value)
    assert message.startswith("--edit-device auto: ") and str(tmp_path / file) in message
    assert f"torch {torch.__version__}" in message and "--edit-device cpu" in message
    assert caught.value.is_local


def test_several_gpus_are_reported_in_one_line(tmp_path: Path) -> None:
    """Device files and the driver's list name the same GPUs, which count once."""
    root = machine(tmp_path, "dev/nvidia1", NVIDIA, DRIVER, "dev/nvidiactl", "dev/nvidia-uvm")
    assert visible_gpus({}, root) == [str(root / NVIDIA), str(root / "dev/nvidia1")]
    assert "nvidia0 and 1 more)" in str(unusable_gpus({}, root))


@pytest.mark.parametrize("cuda", ["12.4", None])
def test_reason_for_unusable_gpu_is_reported(
    cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU-only torch and an old driver have different remedies."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    message = unusable_gpus({}, machine(tmp_path, NVIDIA)) or ""
    assert ("built for the CPU" in message) == (cuda is None) and ("driver" in message) == bool(
        cuda
    )


def test_machine_without_gpus_uses_cpu(tmp_path: Path) -> None:
    """`/dev/nvidiactl` alone is a driver without a GPU."""
    root = machine(tmp_path, "dev/nvidiactl", "dev/null")
    assert choose_device(AUTO, root) == torch.device("cpu")


@pytest.mark.parametrize(
    ("variable", "value", "files", "is_hidden"),
    [
        ("CUDA_VISIBLE_DEVICES", "", (NVIDIA, DRIVER), True),
        ("CUDA_VISIBLE_DEVICES", "-1", (NVIDIA,), True),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles", (NVIDIA,), True),
        ("CUDA_VISIBLE_DEVICES", "0,1", (NVIDIA,), False),
        ("HIP_VISIBLE_DEVICES", "", (AMD,), True),
        ("HIP_VISIBLE_DEVICES", "", (NVIDIA,), False),
    ],
)
def test_hidden_gpus_are_ignored(
    variable: str, value: str, files: tuple[str, ...], is_hidden: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The variable of another vendor hides nothing."""
    monkeypatch.setenv(variable, value)
    root = machine(tmp_path, *files)
    if is_hidden:
        assert choose_device(AUTO, root) == torch.device("cpu")
        return
    with pytest.raises(UsageError):
        choose_device(AUTO, root)


def test_cpu_can_be_requested_on_gpu_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request for CUDA reports why it is not available."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # put back after the test
    root = machine(tmp_path, NVIDIA)
    with pytest.raises(UsageError, match="--edit-device cuda: the machine has GPUs"):
        choose_device(EditConfig(device="cuda"), root)
    assert choose_device(EditConfig(device="cpu"), root) == torch.device("cpu")
    with pytest.raises(UsageError, match="no CUDA device was found"):
        choose_device(EditConfig(device="cuda"), root)
