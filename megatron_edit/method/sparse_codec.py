"""Codec of SparseLoCo (arXiv 2508.15706): of a block only the largest values, in 2 bits each.

    TOP64    the 64 largest of every 4096 values: 12 bits for the index of each in its block, and
             2 bits, with two bf16 scales for every 64

The kept values of all blocks are encoded one after another, like those of INT2 in blocks of 64
(`coarse_codecs.py`). All other values decode to zero. A short last block of m values keeps
ceil(m / 64), so that of n values ceil(n / 64) are kept, and blocks of kept values begin where
blocks of values do. Of equal magnitudes the one of lower index is kept, so that a block has the
same bytes on every device. Blocks without a magnitude of 2^-100 or more are zero bytes.

The residual is multiplied by 0.95 before the values are added to it.

A sum of decoded values may have as many non-zero values as all addends together: it is not encoded
again.

Non-finite input: as in `codec.py`. Scratch: 4 bytes for each of at most 2^20 values on the CPU, of
2^24 elsewhere; 20 in encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit import constants
from megatron_edit.method.coarse_codecs import INT2_OF_64
from megatron_edit.method.codec import Codec

_BLOCK = 4096
_KEPT = 64  # of a block
_SHARE = _BLOCK // _KEPT  # one of so many values is kept
_INDEX_BITS = 12
_LEAST_BITS = (127 - 100) << 23  # of 2^-100, as in `coarse_codecs`


@dataclass(frozen=True)
class _Largest(Codec):
    """The largest values of each block.

    Bytes: the kept values, encoded, in the order of their indices; then the indices, two in three
    bytes as a number of 24 bits, the first one as its lower half; then zeros up to a multiple of 4.

    Attributes:
        residual_decay: factor of the residual in each encoding.
    """

    name: str = constants.TOP64
    block_numel: int = _BLOCK
    has_residual: bool = True
    encodes_sums: bool = False
    residual_decay: float = 0.95

    def encode(
        self, values: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if residual is not None:
            residual.mul_(self.residual_decay)
        data = super().encode(values, residual=residual, out=out)
        kept = _num_kept(values.shape[-1])
        data[..., INT2_OF_64.used_bytes(kept) : INT2_OF_64.encoded_bytes(kept)].zero_()
        return data

    def used_bytes(self, numel: int) -> int:
        kept = _num_kept(numel)
        return INT2_OF_64.encoded_bytes(kept) + _index_bytes(kept)

    @property
    def unit(self) -> int:
        return INT2_OF_64.unit * _SHARE

    def slab_numel(self, data: Tensor) -> int:
        # On the CPU more than usual, as most operators take only the kept values.
        return super().slab_numel(data) * (4 if data.device.type == "cpu" else 1)

    def scratch(self, data: Tensor, parts: list[slice], *, decodes: bool) -> list[Tensor]:
        return INT2_OF_64.scratch(data, [_kept_of(part) for part in parts], decodes=decodes)

    def encode_part(
        self, part: Tensor, data: Tensor, numel: int, where: slice, scratch: list[Tensor], *,
        has_residual: bool,
    ) -> None:  # fmt: skip
        index = _largest(part)
        levels, indices = self._sections(data, numel, where)
        places = _places(index)
        kept = part.gather(1, places)
        INT2_OF_64.encode_part(
            kept, levels, _num_kept(numel), _kept_of(where), scratch, has_residual=False
        )
        _pack(index, indices)
        if has_residual:
            sent = self._sent(levels, numel, where, scratch)
            _put(kept.sub_(sent), places, part)
            for blocks, poison in _poisoned(part, sent):
                blocks.sub_(poison)

    def decode_part(
        self, data: Tensor, numel: int, where: slice, out: Tensor, scratch: list[Tensor], *,
        adds: bool,
    ) -> None:  # fmt: skip
        levels, indices = self._sections(data, numel, where)
        sent = self._sent(levels, numel, where, scratch)
        for blocks, poison in _poisoned(out, sent):
            blocks.add_(poison) if adds else blocks.copy_(poison)
        places = _places(_unpack(indices, sent.shape[1]))
        _put(sent.add_(out.gather(1, places)) if adds else sent, places, out)

    def _sections(self, data: Tensor, numel: int, where: slice) -> tuple[Tensor, Tensor]:
        """The bytes of all kept values [rows, bytes], and those of the indices of a part."""
        used, kept = INT2_OF_64.encoded_bytes(_num_kept(numel)), _kept_of(where)
        indices = data[:, used:]
        return data[:, :used], indices[:, _index_bytes(kept.start) : _index_bytes(kept.stop)]

    def _sent(self, levels: Tensor, numel: int, where: slice, scratch: list[Tensor]) -> Tensor:
        """The kept values of a part, decoded, fp32 [rows, kept]."""
        kept = _kept_of(where)
        sent = torch.empty(len(levels), kept.stop - kept.start, device=levels.device)
        INT2_OF_64.decode_part(levels, _num_kept(numel), kept, sent, scratch, adds=False)
        return sent


def _num_kept(numel: int) -> int:
    return -(-numel // _SHARE)


def _kept_of(part: slice) -> slice:
    """Which of the kept values are those of a part, which begins where a block does."""
    return slice(_num_kept(part.start), _num_kept(part.stop))


def _index_bytes(kept: int) -> int:
    return 3 * -(-kept // 2)


def _blocks(values: Tensor) -> list[Tensor]:
    """Whole blocks of values [rows, n], [rows, blocks, _BLOCK]; the short last block, if there is
    one, [rows, 1, its values]."""
    whole = values.shape[1] // _BLOCK * _BLOCK
    parts = (values[:, :whole].unflatten(1, (-1, _BLOCK)), values[:, whole:].unsqueeze(1))
    return [part for part in parts if part.numel()]


def _largest(values: Tensor) -> Tensor:
    """Index in its block of each kept value of [rows, n], int64 [rows, ceil(n / 64)], ascending; 0
    for each in blocks of zeros."""
    found = []
    for blocks in _blocks(values):
        width = blocks.shape[2]
        # Unique keys: the bits of magnitudes order as these do; then the lower index is larger.
        last = torch.arange(_BLOCK - 1, _BLOCK - 1 - width, -1, device=values.device)
        keys = (blocks.view(torch.int32) & 0x7FFFFFFF).long().bitwise_left_shift_(_INDEX_BITS)
        largest = keys.bitwise_or_(last).topk(_num_kept(width), dim=2).values
        index = (_BLOCK - 1 - (largest % _BLOCK)).sort(dim=2).values
        index.mul_(largest[..., :1] >= _LEAST_BITS << _INDEX_BITS)
        found.append(index.flatten(1))
    return torch.cat(found, dim=1)


def _places(index: Tensor) -> Tensor:
    """Places in a part of [rows, kept] indices in blocks, int64."""
    first = torch.arange(index.shape[1], device=index.device).div_(_KEPT, rounding_mode="floor")
    return first.mul_(_BLOCK) + index


def _put(values: Tensor, places: Tensor, out: Tensor) -> None:
    """Write values [rows, kept] to their places in each row of `out`."""
    out[torch.arange(len(out), device=out.device).unsqueeze(1), places] = values


def _poisoned(values: Tensor, sent: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The blocks of `values` with NaN for each that is not finite, and 0 for the others.

    Yields:
        Some blocks, [rows, blocks, values of a block], and what to combine them with, [rows,
        blocks, 1].
    """
    poison, first = sent[:, ::_KEPT].abs().mul_(0.0).unsqueeze(2), 0
    for blocks in _blocks(values):
        yield blocks, poison[:, first : first + blocks.shape[1]]
        first += blocks.shape[1]


def _pack(indices: Tensor, data: Tensor) -> None:
    """Pack indices in blocks, int64 [rows, k], into uint8 [rows, _index_bytes(k)]. Mutates
    `data`."""
    pairs = torch.nn.functional.pad(indices, (0, indices.shape[1] % 2)).int().unflatten(1, (-1, 2))
    words = (pairs[..., 0] | (pairs[..., 1] << _INDEX_BITS)).unsqueeze(2).view(torch.uint8)
    data.unflatten(1, (-1, 3)).copy_(words[..., :3])


def _unpack(data: Tensor, kept: int) -> Tensor:
    """Inverse of `_pack`, int64 [rows, kept]."""
    triples = data.unflatten(1, (-1, 3))
    words = torch.zeros(*triples.shape[:2], 1, dtype=torch.int32, device=data.device)
    words.view(torch.uint8)[..., :3] = triples
    pairs = torch.cat((words % _BLOCK, words >> _INDEX_BITS), dim=2)
    return pairs.flatten(1)[:, :kept].long()


TOP64: Codec = _Largest()
