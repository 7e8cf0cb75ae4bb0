"""Coming to meetings, and seeing that what they began lands at its time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_edit.comm.timeouts import AdaptiveTimeout
from megatron_edit.engine.host import Host
from megatron_edit.engine.rounds.rounds import Rounds
from megatron_edit.engine.rounds.trigger import SyncTrigger
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.sync.inflight import InflightSync
from megatron_edit.engine.sync.queue import SyncQueue


@dataclass
class SyncController:
    """Leads a rank through its syncs.

    Attributes:
        settings: say when results land.
        host: says whether units can land in the forward pass.
        trigger: when the replicas meet.
        rounds: what is decided there.
        traffic: what follows from it.
        adaptive_timeout: follows the length of the rounds.
    """

    settings: EngineSettings
    host: Host
    trigger: SyncTrigger
    rounds: Rounds
    traffic: SyncQueue
    adaptive_timeout: AdaptiveTimeout

    def meet(self, step: int) -> bool:
        """Come to a meeting and do what it decides; to the next at once, where nothing is left.

        Returns:
            Whether nobody obeys a stop there.
        """
        while True:
            selection = self.rounds.selection(step)
            before = self.traffic.of_units(selection)
            is_first_taken = self.settings.landing.at_next_meeting
            if not is_first_taken:
                self._land_all(before)
            run = self.rounds.meet(step, selection)
            if run is None:
                return not self.rounds.has_left
            if is_first_taken:
                self._land_all(before)
                if not before:  # nothing was sent a round ago: the next begins where this one did
                    self.traffic.go_back(run)
            self.adaptive_timeout.after_round()
            self._take(run)
            if not (self.trigger.must_meet_again or self._must_level):
                return True

    def land_due(self, step: int) -> None:
        """Land the syncs whose time has come with step `step`."""
        for run in self.traffic.due(step):
            self.traffic.begin_landing(run)
            self._land()

    def replaces_parameters(self, step: int, *, is_meeting: bool) -> bool:
        """Whether the result of a sync comes right after step `step`.

        Args:
            step: s.
            is_meeting: whether replicas meet after it.
        """
        if self.traffic.due(step):
            return True
        if not is_meeting:
            return False
        landing = self.settings.landing
        is_immediate = landing.is_immediate or landing.at_next_meeting or self.trigger.is_last
        return is_immediate or bool(self.traffic.of_units(self.rounds.selection(step)))

    @property
    def _must_level(self) -> bool:
        """Whether training is over, and the replicas do not hold the same yet."""
        return self.trigger.is_over and not self.rounds.replicas_identical

    def _take(self, run: InflightSync) -> None:
        """A sync begins."""
        if not run.rules.landing.is_immediate:
            self.traffic.fly(run)
            run.exposed = time.monotonic() - run.began
            return
        run.exposed = time.monotonic() - run.began  # where a replica broke it is reported now
        self.traffic.begin_landing(run)
        run.exposed = time.monotonic() - run.began
        self._land()

    def _land(self) -> None:
        """Land what lands now; in the forward pass, if nothing comes before it."""
        is_later = self.settings.overlap and self.host.lands_in_forward
        if not is_later or self.trigger.must_meet_again or self._must_level:
            self.traffic.settle()

    def _land_all(self, runs: Sequence[InflightSync]) -> None:
        for run in runs:
            self.traffic.begin_landing(run)
            self.traffic.settle()
