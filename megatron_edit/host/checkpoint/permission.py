"""Whether a replica of an elastic run may still change checkpoints that others see.

A leader that was frozen in a save, and goes on when the others have a new leader, must not move
the tracker back or remove newer checkpoints. So it asks the hub before each such change.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_edit.elastic.agent import Agent
from megatron_edit.elastic.hub_state import Standing
from megatron_edit.errors import EditError, FencedError, ReplicaLostError


class NotPermittedError(EditError):
    """A checkpoint may not be completed.

    Args:
        text: why.
        exit_code: with which the replica ends; 0 where training is not affected.
    """

    def __init__(self, text: str, exit_code: int = 0) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def permission(agent: Agent | None) -> Callable[[], None]:
    """A function that returns where this replica may change what others see; in a run without a
    hub, always. It may be called in any thread, and raises `NotPermittedError`.

    Args:
        agent: of the replica; None in a run without a hub, and on ranks but 0, which change nothing
            that others see.
    """

    def check() -> None:
        if agent is None:
            return
        try:
            standing = agent.ask_standing()
        except ReplicaLostError as error:
            raise NotPermittedError(str(error), error.exit_code) from error
        if standing is Standing.LEADER:
            return
        if standing is Standing.MEMBER:
            raise NotPermittedError("another replica is the leader now")
        if agent.state.leave:
            raise NotPermittedError("this replica has left")
        raise NotPermittedError(
            "the others went on without this replica; started again, it joins them",
            FencedError.exit_code,
        )

    return check
