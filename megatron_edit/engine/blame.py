"""Errors of an engine say where training stood, and who was lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from megatron_edit.engine.rounds import Rounds
from megatron_edit.errors import ReplicaLostError


class Engine(Protocol):
    """What there is to say.

    Attributes:
        step: s.
        rounds: of this replica.
    """

    step: int
    rounds: Rounds

    @property
    def current_round(self) -> int:
        """The round whose sync is under way, or comes next."""


@contextmanager
def blaming(engine: Engine) -> Iterator[None]:
    """Tell who was lost, and in which sync."""
    try:
        yield
    except ReplicaLostError as error:
        absent = engine.rounds.meetings.absent()
        raise error.in_sync(absent, engine.current_round, engine.step) from error
    except Exception as error:
        error.add_note(f"in round {engine.current_round} of EDiT, after step {engine.step}")
        raise
