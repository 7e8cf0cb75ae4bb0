"""Sequence parallelism with torch's norms, where Megatron leaves it to Apex and Transformer Engine.

Under sequence parallelism each tensor-parallel rank normalises its own part of the sequence, and
norms every token by itself: the computation is the plain one. Only the gradients of the norm's
parameters are partial sums. Megatron adds them up over the tensor-parallel group for every
parameter that is marked ``sequence_parallel``; its wrapper of torch's norms marks none, and
refuses instead.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from torch.nn import Module

from megatron_edit.host.seams.megatron import NormConfig
from megatron_edit.host.seams.patching import Patcher


def serve_sequence_parallelism(patcher: Patcher) -> None:
    """Let Megatron's wrapper of torch's norms mark parameters instead of refusing.

    Imports Megatron. The wrapper is one class, which Megatron binds under several names in
    several modules: its construction is the one place that all of them come through. Without
    sequence parallelism it is left alone.

    Mutates: the class, through `patcher`.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    patcher.wrap(WrappedTorchNorm, "__new__", _marking)


def _marking(new: Callable[..., Module]) -> staticmethod[..., Module]:
    """A function that stands for `__new__`, so it must not bind to the class."""

    @functools.wraps(new)
    def marked(cls: type, config: NormConfig, *args: object, **kwargs: object) -> Module:
        if not config.sequence_parallel:
            return new(cls, config, *args, **kwargs)
        plain = copy.copy(config)  # Megatron's other checks still see what was asked for
        plain.sequence_parallel = False
        norm = new(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return staticmethod(marked)
