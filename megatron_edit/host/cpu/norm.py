"""Enables sequence parallelism with torch's norms; Megatron supports only Apex's and TE's.

Under sequence parallelism each tensor-parallel rank normalizes its own part of the sequence. Norms
treat each token separately, so that the forward computation is unchanged. Only the gradients of
norm parameters are partial sums. Megatron sums them over the tensor-parallel group for every
parameter that is marked ``sequence_parallel``; its wrapper of torch's norms does not mark them but
refuses sequence parallelism.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from torch.nn import Module

from megatron_edit.host.seams.megatron import NormConfig
from megatron_edit.host.seams.patching import Patcher


def patch_sequence_parallelism(patcher: Patcher) -> None:
    """Make Megatron's wrapper of torch's norms mark parameters instead of refusing.

    Imports Megatron. The constructor is patched because Megatron imports the wrapper's class under
    several names in several modules. Without sequence parallelism nothing changes.

    Mutates: the class, through `patcher`.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    patcher.wrap(WrappedTorchNorm, "__new__", _marking)


def _marking(new: Callable[..., Module]) -> staticmethod[..., Module]:
    """Wrap `__new__`; the result is a static method, as `__new__` is."""

    @functools.wraps(new)
    def marked(cls: type, config: NormConfig, *args: object, **kwargs: object) -> Module:
        if not config.sequence_parallel:
            return new(cls, config, *args, **kwargs)
        plain = copy.copy(config)  # Megatron's other checks still see the original config
        plain.sequence_parallel = False
        norm = new(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return staticmethod(marked)
