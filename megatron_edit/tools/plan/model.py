"""The parameters of a GPT, in closed form from Megatron's flags. Nothing is built or imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_edit.constants import EMBEDDING, FINAL
from megatron_edit.errors import UsageError
from megatron_edit.tools.plan.limits import MOST_LAYERS
from megatron_edit.tools.plan.words import Words

# What would change the count in a way that is not in here.
REFUSED = (
    "--num-experts", "--mtp-num-layers", "--multi-latent-attention", "--spec", "--yaml-cfg",
    "--heterogeneous-layers-config-path", "--hybrid-override-pattern", "--hybrid-layer-pattern",
    "--experimental-attention-variant", "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--num-distributed-optimizer-instances", "--attention-output-gate",
)  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        unit: sync unit that it belongs to.
        numel: elements of the whole parameter.
        is_split: whether tensor parallelism cuts it; otherwise each of its ranks has a copy.
        is_matrix: whether Muon steps it: any matrix but the word embeddings and the head.
    """

    unit: str
    numel: int
    is_split: bool = False
    is_matrix: bool = False

    def on_rank(self, tensor_parallel: int) -> int:
        """Elements on one rank."""
        return self.numel // tensor_parallel if self.is_split else self.numel


@dataclass(frozen=True)
class Architecture:
    """A dense GPT of Megatron's.

    Attributes:
        kv_channels: size of a head.
        num_groups: of keys and values.
        vocabulary: padded.
        has_norm_bias: LayerNorm has one, RMSNorm does not.
        num_positions: of learned position embeddings; 0 where there are none.
        has_transformer_engine: it fuses norms with the matrices behind them, which changes the
            order of the parameters, and so who holds what.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_groups: int
    kv_channels: int
    seq_length: int
    vocabulary: int
    is_gated: bool
    has_bias: bool
    has_qkv_bias: bool
    has_norm_bias: bool
    has_qk_norm: bool
    is_untied: bool
    num_positions: int
    has_transformer_engine: bool

    @classmethod
    def from_flags(cls, argv: Sequence[str]) -> Architecture:
        """Read Megatron's flags, with Megatron's defaults.

        Raises:
            UsageError: a flag is missing, or of a kind of model that is not known here.
        """
        words = Words(argv)
        for name in REFUSED:
            if words.has(name):
                raise UsageError(name, "the planner counts dense GPTs only", "drop the flag")
        hidden, heads = words.count("--hidden-size"), words.count("--num-attention-heads")
        gated = words.has("--swiglu") or words.has("--quick-geglu")
        ffn = (8 * hidden // 3) // 64 * 64 if words.has("--swiglu") else 4 * hidden
        has_bias = not words.has("--disable-bias-linear")
        positions = words.text("--position-embedding-type", "learned_absolute")
        is_rope = words.has("--use-rotary-position-embeddings")  # the old name, which wins
        learned = positions == "learned_absolute" and not is_rope
        grouped = words.has("--group-query-attention")
        return cls(
            num_layers=words.count("--num-layers", most=MOST_LAYERS),
            hidden_size=hidden,
            ffn_hidden_size=words.count("--ffn-hidden-size", ffn),
            num_heads=heads,
            num_groups=words.count("--num-query-groups", 1) if grouped else heads,
            kv_channels=words.count("--kv-channels", max(1, hidden // heads)),
            seq_length=words.count("--seq-length"),
            vocabulary=_vocabulary(words),
            is_gated=gated,
            has_bias=has_bias,
            has_qkv_bias=has_bias or words.has("--add-qkv-bias"),
            has_norm_bias=words.text("--normalization", "LayerNorm") == "LayerNorm",
            has_qk_norm=words.has("--qk-layernorm"),
            is_untied=words.has("--untie-embeddings-and-output-weights"),
            num_positions=words.count("--max-position-embeddings") if learned else 0,
            has_transformer_engine=words.text("--transformer-impl", "transformer_engine")
            == "transformer_engine" and words.text("--edit-device", "auto") != "cpu",
        )  # fmt: skip

    @property
    def unit_names(self) -> tuple[str, ...]:
        """In forward order."""
        layers = (f"layer.{number}" for number in range(1, self.num_layers + 1))
        return (EMBEDDING, *layers, FINAL)

    def unit_numels(self) -> dict[str, int]:
        """Parameters of each unit, of the whole model."""
        numels = dict.fromkeys(self.unit_names, 0)
        for parameter in self.parameters():
            numels[parameter.unit] += parameter.numel
        return numels

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return sum(self.unit_numels().values())

    def parameters(self, stage: int = 0, num_stages: int = 1) -> tuple[Parameter, ...]:
        """Parameters of a pipeline stage, in the order in which Megatron registers them."""
        each = self.num_layers // num_stages
        found: list[Parameter] = []
        word = Parameter(EMBEDDING, self.vocabulary * self.hidden_size, is_split=True)
        is_last = stage == num_stages - 1
        if stage == 0:
            found.append(word)
            if self.num_positions:
                positions = self.num_positions * self.hidden_size
                found.append(Parameter(EMBEDDING, positions, is_matrix=True))
        for number in range(stage * each + 1, (stage + 1) * each + 1):
            found += self._layer(f"layer.{number}")
        if is_last:
            found += self._norm(FINAL)
            if self.is_untied:
                found.append(Parameter(FINAL, word.numel, is_split=True))
            elif stage > 0:
                found.append(word)  # the tied copy
        return tuple(found)

    def flops_per_token(self) -> float:
        """Of forward and backward, without recomputation; causal attention counts half."""
        matrices = sum(p.numel for p in self.parameters() if p.is_split) - (
            0 if not self.is_untied else self.vocabulary * self.hidden_size
        )
        attention = self.num_layers * self.num_heads * self.kv_channels * self.seq_length
        return 6.0 * matrices + 6.0 * attention

    def _norm(self, unit: str) -> list[Parameter]:
        return [Parameter(unit, self.hidden_size)] * (2 if self.has_norm_bias else 1)

    def _layer(self, unit: str) -> list[Parameter]:
        query = self.num_heads * self.kv_channels
        fan_out = query + 2 * self.num_groups * self.kv_channels
        fc1 = self.ffn_hidden_size * (2 if self.is_gated else 1)
        norm = self._norm(unit)
        proj, qkv, up, down = (
            [Parameter(unit, width * self.hidden_size, is_split=True, is_matrix=True)]
            for width in (query, fan_out, fc1, self.ffn_hidden_size)
        )
        if self.has_qkv_bias:
            qkv.append(Parameter(unit, fan_out, is_split=True))
        if self.has_bias:
            proj.append(Parameter(unit, self.hidden_size))
            up.append(Parameter(unit, fc1, is_split=True))
            down.append(Parameter(unit, self.hidden_size))
        if self.has_qk_norm:
            both = 2 * (2 if self.has_norm_bias else 1)
            qkv += [Parameter(unit, self.kv_channels)] * both
        if self.has_transformer_engine:
            return [*proj, *norm, *qkv, *norm, *up, *down]
        return [*norm, *proj, *qkv, *norm, *up, *down]


def _vocabulary(words: Words) -> int:
    """As Megatron pads it."""
    if words.has("--padded-vocab-size"):
        return words.count("--padded-vocab-size")
    if not words.has("--vocab-size"):
        raise UsageError(
            "--vocab-size (not given)",
            "the planner reads no tokenizer, and must be told its size",
            "add --vocab-size",
        )
    multiple = words.count("--make-vocab-size-divisible-by", 128)
    multiple *= words.count("--tensor-model-parallel-size", 1)
    return -(-words.count("--vocab-size") // multiple) * multiple
