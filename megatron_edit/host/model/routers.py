"""State of MoE routers outside the optimizer: biases that balance the load of the experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from megatron_edit.host.seams.megatron import ModelChunk, Router


@dataclass(frozen=True)
class Routers:
    """The routers of a model that have a bias, with their units.

    Modules are stored because Megatron replaces the bias tensors when it changes their dtype.

    Attributes:
        modules: unit and Megatron's `TopKRouter`.
    """

    modules: tuple[tuple[str, Router], ...]

    @classmethod
    def of(cls, chunks: Sequence[ModelChunk], unit_of: Mapping[Parameter, str]) -> Routers:
        """Find the routers in unwrapped model chunks."""
        return cls(
            tuple(
                (unit_of[module.weight], module)
                for chunk in chunks
                for module in chunk.modules()
                if _biases(module) and getattr(module, "weight", None) in unit_of
            )
        )

    def biases(self) -> list[tuple[str, Tensor]]:
        """Return unit and bias, fp32 [experts], for averaging at a sync."""
        return [(unit, bias) for unit, module in self.modules for bias in _biases(module)]

    def token_counts(self) -> list[Tensor]:
        """Return the tokens per expert of the current global batch, fp32 [experts].

        Megatron's `_update_router_expert_bias` changes each bias by the sign of their difference
        from the mean.
        """
        return [
            module.local_tokens_per_expert
            for _, module in self.modules
            if getattr(module, "expert_bias", None) is not None
        ]

    def quantile_biases(self) -> list[Tensor]:
        """Return biases of `quantile_balancing`, fp32 [experts], which can be averaged directly."""
        return [
            module.qb_beta
            for _, module in self.modules
            if getattr(module, "qb_beta", None) is not None
        ]


def _biases(module: Router) -> list[Tensor]:
    found = (getattr(module, name, None) for name in ("expert_bias", "qb_beta"))
    return [bias for bias in found if isinstance(bias, Tensor)]
