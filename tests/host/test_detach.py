"""`detach()` restores the host's modules, classes, instances and environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.harness import run_ranks
from tests.harness.launch import REPOSITORY
from tests.host.runs import edit_flags


def test_detach_restores_host_after_training(tmp_path: Path) -> None:
    """After an EDiT run and a detach, every attribute of the host's modules and classes is the
    original object, and the model's optimizer is Megatron's own again."""
    argv = edit_flags(2, edit_log_dir=tmp_path, train_iters=6, global_batch_size=4)
    results = run_ranks("tests.host.test_detach:train_and_detach", 2, (argv,), check=True)
    for result in results:
        facts = result.value
        assert facts["changed_while_attached"] >= 12
        assert facts["left_behind"] == []
        assert facts["optimizer_class"] == "DistributedOptimizer"
        assert facts["optimizer_attributes"] == []
        assert facts["chain_attributes"] == []
        assert facts["finalize"] is None
        assert facts["environment"] == {"RANK": str(result.rank), "WORLD_SIZE": "2"}


# ---- functions that the ranks run


_ROOTS = ("megatron.", "torch.cuda", "torch.distributed", "torch.utils.data")


def snapshot() -> dict[str, int]:
    """Return the identity of every attribute of the host's modules and of their classes."""
    seen: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if module is None or not (name.startswith(_ROOTS) or name == "torch"):
            continue
        for key, value in list(vars(module).items()):
            if key.startswith("__") or not _is_code(value):
                continue
            seen[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                for inner, attribute in list(vars(value).items()):
                    seen[f"{name}.{key}.{inner}"] = id(attribute)
    for inner, attribute in vars(torch.Tensor).items():
        seen[f"torch.Tensor.{inner}"] = id(attribute)
    return seen


def _is_code(value: Any) -> bool:
    """Whether a value can be patched: a function, class or module, not the host's own state."""
    return callable(value) or isinstance(value, ModuleType | property | staticmethod | classmethod)


def train_and_detach(argv: list[str]) -> dict[str, Any]:
    """Train inside an attachment, detach, and return what differs from before."""
    from megatron.training import training

    from megatron_edit.command_line import config_from_argv
    from megatron_edit.host.attach import Attachment
    from megatron_edit.host.devices import choose_device

    captured: dict[str, Any] = {}
    setup = training.setup_model_and_optimizer

    def capturing(*args: Any, **kwargs: Any) -> Any:
        captured["model"], captured["optimizer"], _ = built = setup(*args, **kwargs)
        return built

    training.setup_model_and_optimizer = capturing
    config = config_from_argv(argv)
    before = snapshot()
    attachment = Attachment(config, choose_device(config))
    attachment.attach()
    attached = snapshot()
    _train(argv)
    attachment.detach()
    attachment.detach()
    after = snapshot()
    inner = captured["optimizer"].chained_optimizers[0]
    return {
        "changed_while_attached": sum(attached.get(k) != v for k, v in before.items()),
        "left_behind": [key for key, value in before.items() if after.get(key) != value],
        "optimizer_class": type(inner).__name__,
        "optimizer_attributes": [k for k in vars(inner) if "edit" in k or k == "_defer_param_sync"],
        "chain_attributes": [k for k in ("step", "zero_grad") if k in vars(captured["optimizer"])],
        "finalize": _finalize_of(captured["model"][0]),
        "environment": {k: os.environ[k] for k in ("RANK", "WORLD_SIZE")},
    }


def _train(argv: list[str]) -> None:
    import runpy

    script = str(REPOSITORY / "scripts/pretrain_gpt.py")
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")


def _finalize_of(model: Any) -> str | None:
    from megatron.core.utils import get_model_config

    function = get_model_config(model).finalize_model_grads_func
    return None if function is None else function.__module__
