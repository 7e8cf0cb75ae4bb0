"""Errors of an engine say where training stood, and who was lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from megatron_edit.comm.stop import StopBoard
from megatron_edit.errors import ReplicaLostError


class Engine(Protocol):
    """What there is to say.

    Attributes:
        step: s.
        board: knows the replicas' signs of life.
    """

    step: int
    board: StopBoard

    @property
    def current_round(self) -> int:
        """The round whose sync is under way, or comes next."""

    @property
    def is_warmup(self) -> bool:
        """Whether there are no rounds yet."""


@contextmanager
def error_context(engine: Engine, what: str = "") -> Iterator[None]:
    """Tell who was lost, and in what.

    Args:
        engine: knows.
        what: that is done; empty is the sync of the round, or the warm-up.
    """
    try:
        yield
    except ReplicaLostError as error:
        if error.is_placed:
            raise
        usual = f"the sync of round {engine.current_round}"
        where = what or ("the warm-up" if engine.is_warmup else usual)
        heartbeat = engine.board.heartbeat
        lost = error.lost or heartbeat.lost()
        place = f"{where} (step {engine.step})"
        raise error.placed(lost, place, has_come=not heartbeat.is_waiting) from error
    except Exception as error:
        error.add_note(f"in round {engine.current_round} of EDiT, after step {engine.step}")
        raise
