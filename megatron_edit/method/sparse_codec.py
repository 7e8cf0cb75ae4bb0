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

Non-finite input: as in `codec.py`. Scratch: that of `codec.py`, and half a byte for each value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit import constants
from megatron_edit.method.coarse_codecs import INT2_OF_64
from megatron_edit.method.codec import Codec, aligned, slab_numel, slabs, target

_BLOCK = 4096
_KEPT = 64  # of a block
_SHARE = _BLOCK // _KEPT  # one of so many values is kept
_INDEX_BITS = 12
_LEAST_BITS = (127 - 100) << 23  # of 2^-100, as in `coarse_codecs`


@dataclass(frozen=True)
class _Largest:
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

    def encoded_bytes(self, numel: int) -> int:
        kept = _num_kept(numel)
        return INT2_OF_64.encoded_bytes(kept) + aligned(_index_bytes(kept))

    def encode(
        self, values: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        data = target(self, values, out)
        if residual is not None:
            values = residual.mul_(self.residual_decay).add_(values)
        places = _largest(values)
        levels, indices = self._parts(data, values.numel())
        kept = values[places]
        INT2_OF_64.encode(kept, out=levels)
        _pack(places % _BLOCK, indices)
        if residual is not None:
            sent = torch.empty_like(kept)
            INT2_OF_64.decode(levels, sent)
            residual[places] = kept.sub_(sent)
            for rows, poison in _poisoned(residual, sent):
                rows.sub_(poison)
        return data

    def decode(self, data: Tensor, out: Tensor) -> None:
        sent, places = self._decoded(data, out)
        for rows, poison in _poisoned(out, sent):
            rows.copy_(poison)
        out[places] = sent

    def add_decoded(self, data: Tensor, total: Tensor) -> None:
        sent, places = self._decoded(data, total)
        for rows, poison in _poisoned(total, sent):
            rows.add_(poison)
        total[places] = sent.add_(total[places])

    def _parts(self, data: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The bytes of the kept values, and those of the indices, of `numel` values."""
        used = INT2_OF_64.encoded_bytes(_num_kept(numel))
        return data[:used], data[used:]

    def _decoded(self, data: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """The kept values, fp32, and their places in a tensor like `like`, int64."""
        levels, indices = self._parts(data, like.numel())
        sent = torch.empty(_num_kept(like.numel()), dtype=torch.float32, device=data.device)
        INT2_OF_64.decode(levels, sent)
        return sent, _unpack(indices, sent.numel())


def _num_kept(numel: int) -> int:
    return -(-numel // _SHARE)


def _index_bytes(kept: int) -> int:
    return 3 * -(-kept // 2)


def _blocks(values: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slabs of whole blocks, then the short last block if there is one.

    Yields:
        Which values; and these, [blocks, values of a block].
    """
    numel = values.numel()
    whole = numel // _BLOCK * _BLOCK
    last = [slice(whole, numel)] if whole < numel else []
    for where in (*slabs(0, whole, max(slab_numel(values) // _BLOCK, 1) * _BLOCK), *last):
        yield where, values[where].view(-1, min(_BLOCK, where.stop - where.start))


def _largest(values: Tensor) -> Tensor:
    """Places of the kept values, int64 [ceil(n / 64)], ascending; in blocks of zeros, the first
    place of the block for each."""
    found = [torch.empty(0, dtype=torch.int64, device=values.device)]
    for where, rows in _blocks(values):
        width = rows.shape[1]
        # Unique keys: the bits of magnitudes order as these do; then the lower index is larger.
        last = torch.arange(_BLOCK - 1, _BLOCK - 1 - width, -1, device=values.device)
        keys = (rows.view(torch.int32) & 0x7FFFFFFF).long().bitwise_left_shift_(_INDEX_BITS)
        largest = keys.bitwise_or_(last).topk(_num_kept(width), dim=1).values
        index = (_BLOCK - 1 - (largest % _BLOCK)).sort(dim=1).values
        index.mul_(largest[:, :1] >= _LEAST_BITS << _INDEX_BITS)
        first = torch.arange(where.start, where.stop, _BLOCK, device=values.device)
        found.append(index.add_(first.unsqueeze(1)).flatten())
    return torch.cat(found)


def _poisoned(values: Tensor, sent: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The blocks of `values` with NaN for each that is not finite, and 0 for the others.

    Yields:
        Some blocks, [blocks, values of a block], and what to combine them with, [blocks, 1].
    """
    poison = sent[::_KEPT].abs().mul_(0.0).unsqueeze(1)
    for where, rows in _blocks(values):
        yield rows, poison[where.start // _BLOCK : -(-where.stop // _BLOCK)]


def _pack(indices: Tensor, data: Tensor) -> None:
    """Pack indices in blocks, int64 [k], into uint8 [_index_bytes(k), aligned]. Mutates `data`."""
    pairs = torch.nn.functional.pad(indices, (0, indices.numel() % 2)).int().view(-1, 2)
    words = (pairs[:, 0] | (pairs[:, 1] << _INDEX_BITS)).view(torch.uint8).view(-1, 4)
    used = 3 * len(words)
    data[:used].view(-1, 3).copy_(words[:, :3])
    data[used:].zero_()


def _unpack(data: Tensor, kept: int) -> Tensor:
    """Places of `kept` packed indices, int64."""
    words = torch.zeros(-(-kept // 2), dtype=torch.int32, device=data.device)
    words.view(torch.uint8).view(-1, 4)[:, :3] = data[: _index_bytes(kept)].view(-1, 3)
    pairs = torch.stack((words % _BLOCK, words >> _INDEX_BITS), dim=1).flatten()[:kept]
    first = torch.arange(kept, device=data.device).div_(_KEPT, rounding_mode="floor")
    return first.mul_(_BLOCK).add_(pairs)


TOP64: Codec = _Largest()
