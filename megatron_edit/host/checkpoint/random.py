"""States of all random number generators of a rank, saved in one small file for each rank.

Megatron saves one set for all data-parallel ranks with the same part of the model. In timed rounds
replicas have drawn different numbers, so each rank saves its own.
"""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel

from megatron_edit.checkpoint.files import REMEDY
from megatron_edit.errors import UsageError


def streams_name(replica: int) -> str:
    """Return the file name of this rank's random streams."""
    return _name(replica, parallel_state.get_data_parallel_rank(with_context_parallel=True))


def save_streams(path: Path) -> None:
    """Write the present states of this rank's random streams.

    Raises:
        OSError: the file cannot be written.
    """
    data = BytesIO()  # if it cannot write a file, `torch.save` does not report the cause
    torch.save(_capture(), data)
    path.write_bytes(data.getbuffer())


def load_streams(folder: Path, replica: int) -> None:
    """Restore this rank's random streams from a replica that was saved with the same TP and PP.

    If the replica had fewer data-parallel ranks, those of its first rank are used.

    Raises:
        UsageError: the file is damaged.
    """
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for path in (folder / _name(replica, rank), folder / _name(replica, 0)):
        if path.is_file():
            try:
                _restore(torch.load(path, weights_only=True))
            except Exception as error:
                raise UsageError(
                    str(path), f"is broken ({type(error).__name__})", REMEDY
                ) from error
            return


def _name(replica: int, data_rank: int) -> str:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor = parallel_state.get_tensor_model_parallel_rank()
    return f"replica{replica}_pp{stage}_tp{tensor}_dp{data_rank}.pt"


def _capture() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {
            name: tensor_parallel.convert_cuda_rng_state(state, to_graphable=False)
            for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()
        },
    }


def _restore(streams: dict[str, Any]) -> None:
    version, numbers, gauss = streams["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, position, has_gauss, cached = streams["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(streams["torch"])
    torch.cuda.set_rng_state(streams["device"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    is_graphable = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
    tracker.set_states(
        {
            name: tensor_parallel.convert_cuda_rng_state(state, to_graphable=is_graphable)
            for name, state in streams["tracker"].items()
        }
    )
