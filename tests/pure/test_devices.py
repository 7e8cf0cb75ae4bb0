"""Where a run trains: GPUs that torch cannot use are never replaced by the CPU in silence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.host.devices import choose_device, gpus_of_machine, unusable_gpus
from tests.harness.launch import REPOSITORY

AUTO = EditConfig()
NVIDIA, DRIVER, AMD = "dev/nvidia0", "proc/driver/nvidia/gpus/0000:3b:00.0", "dev/kfd"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def machine(root: Path, *files: str) -> Path:
    """A file system with these files."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


@pytest.mark.parametrize("sign", [NVIDIA, DRIVER, AMD])
def test_a_gpu_that_torch_cannot_use_is_refused(sign: str, tmp_path: Path) -> None:
    """Catches a job of GPUs that trains for days on the CPU. Each rank must say it by itself."""
    with pytest.raises(UsageError) as caught:
        choose_device(AUTO, machine(tmp_path, sign))
    said = str(caught.value)
    assert said.startswith("--edit-device auto: ") and str(tmp_path / sign) in said
    assert f"torch {torch.__version__}" in said and "--edit-device cpu" in said
    assert caught.value.is_local


def test_several_are_one_line(tmp_path: Path) -> None:
    """Device files and the driver's list are of the same GPUs: counted once."""
    root = machine(tmp_path, "dev/nvidia1", NVIDIA, DRIVER, "dev/nvidiactl", "dev/nvidia-uvm")
    assert gpus_of_machine({}, root) == [str(root / NVIDIA), str(root / "dev/nvidia1")]
    assert "nvidia0 and 1 more)" in str(unusable_gpus({}, root))


@pytest.mark.parametrize("cuda", ["12.4", None])
def test_why_it_cannot(cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch of the wrong build, or a driver that is too old: another remedy."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    said = unusable_gpus({}, machine(tmp_path, NVIDIA)) or ""
    assert ("built for the CPU" in said) == (cuda is None) and ("driver" in said) == bool(cuda)


def test_a_machine_without_gpus_trains_on_the_cpu(tmp_path: Path) -> None:
    """As ever; `/dev/nvidiactl` alone is a driver without a GPU."""
    root = machine(tmp_path, "dev/nvidiactl", "dev/null")
    assert choose_device(AUTO, root) == torch.device("cpu")


@pytest.mark.parametrize(
    ("variable", "value", "signs", "is_hidden"),
    [
        ("CUDA_VISIBLE_DEVICES", "", (NVIDIA, DRIVER), True),
        ("CUDA_VISIBLE_DEVICES", "-1", (NVIDIA,), True),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles", (NVIDIA,), True),
        ("CUDA_VISIBLE_DEVICES", "0,1", (NVIDIA,), False),
        ("HIP_VISIBLE_DEVICES", "", (AMD,), True),
        ("HIP_VISIBLE_DEVICES", "", (NVIDIA,), False),
    ],
)
def test_gpus_that_the_user_has_hidden(
    variable: str, value: str, signs: tuple[str, ...], is_hidden: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Are not there; another maker's variable hides nothing."""
    monkeypatch.setenv(variable, value)
    root = machine(tmp_path, *signs)
    if is_hidden:
        assert choose_device(AUTO, root) == torch.device("cpu")
        return
    with pytest.raises(UsageError):
        choose_device(AUTO, root)


def test_the_cpu_can_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And CUDA that is asked for says why it cannot be had."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # put back after the test
    root = machine(tmp_path, NVIDIA)
    with pytest.raises(UsageError, match="--edit-device cuda: the machine has GPUs"):
        choose_device(EditConfig(device="cuda"), root)
    assert choose_device(EditConfig(device="cpu"), root) == torch.device("cpu")
    with pytest.raises(UsageError, match="no CUDA device was found"):
        choose_device(EditConfig(device="cuda"), root)


def test_branches_for_cuda_are_in_the_docs() -> None:
    """Catches a file with a branch for CUDA that nobody has listed, and one that has it no more."""
    marks = re.compile(r"torch\.cuda\.\w+\(|[!=]= \"cuda\"|\.is_cuda\b|get_device_capability")
    package = REPOSITORY / "megatron_edit"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if marks.search(path.read_text(encoding="utf-8"))
    }
    text = (REPOSITORY / "docs" / "gpu.md").read_text(encoding="utf-8")
    _, _, listed = text.partition("Branches for CUDA that no test on a CPU reaches")
    listed, _, _ = listed.partition("Not there yet")
    named = set(re.findall(r"`((?:comm|engine|host|tools)/[\w/]+\.py)`", listed))
    assert found <= named, found - named
    assert all((package / name).is_file() for name in named)
