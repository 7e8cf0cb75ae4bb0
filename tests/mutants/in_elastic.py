"""Mutants of elastic runs: the hub's decisions, state by names, copies."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_PARTS, _RUNS = "pure/test_elastic_parts.py", "host/test_hub_runs.py"

ELASTIC = (
    Mutant(
        id="elastic/statistics-by-number",
        bug="a replica takes over the statistics of another one that was lost",
        file="engine/plan.py",
        old="rows = [self.members.index(m) if m in self.members else None for m in members]",
        new="rows = [n if n < len(self.members) else None for n, m in enumerate(members)]",
        test=f"{_PARTS}::test_statistics_follow_names",
    ),
    Mutant(
        id="elastic/steps-by-number",
        bug="the blocks of a lost replica count as consumed",
        file="engine/plan.py",
        old="return [steps.get(name, 0) for name in self.assigned_to]",
        new="return list(counts)[: len(self.assigned_to)]",
        test=f"{_PARTS}::test_steps_count_for_those_that_blocks_were_assigned_to",
    ),
    Mutant(
        id="elastic/blocks-for-lost-replica",
        bug="blocks of the next round are assigned to a replica that is lost",
        file="method/ledger.py",
        old="speeds = steps if next_steps is None else next_steps",
        new="speeds = steps",
        test=f"{_PARTS}::test_lost_replicas_blocks_are_assigned_again",
    ),
    Mutant(
        id="elastic/copy-of-two-rounds",
        bug="a copy goes on with tensors of another round",
        file="engine/shared_state.py",
        old="return self._header is not None and self._header.round == round",
        new="return self._header is not None",
        test=f"{_PARTS}::test_copies_hold_one_round",
    ),
    Mutant(
        id="elastic/old-moments",
        bug="moments of an earlier round are copied",
        file="engine/shared_state.py",
        old="self._header, self._moments, self._is_copied = None, {}, False",
        new="self._is_copied = False",
        test=f"{_PARTS}::test_moments_are_copied_when_they_are_there",
    ),
    Mutant(
        id="elastic/groups-of-two-ranks-mixed",
        bug="the groups of different shards are formed under one number",
        file="engine/membership.py",
        old="return ((order.term << 24) + order.epoch << 16) + rank",
        new="return (order.term << 24) + order.epoch << 16",
        test=f"{_PARTS}::test_numbers_of_groups_are_unique",
    ),
    Mutant(
        id="elastic/leaves-twice",
        bug="a replica that left on a signal is reported as finished",
        file="engine/membership.py",
        old="agent, self.agent = self.agent, None",
        new="agent = self.agent",
        test=f"{_PARTS}::test_replica_leaves_once",
    ),
    Mutant(
        id="elastic/blocks-not-interleaved",
        bug="strategy edit consumes other samples with a hub than without one",
        file="host/assigned_data.py",
        old="share = _share_of(host.arguments, num_replicas if is_counted else 1)",
        new="share = _share_of(host.arguments, 1)",
        test=f"{_RUNS}::test_hub_changes_no_bit",
    ),
    Mutant(
        id="elastic/rate-of-nominal-replicas",
        bug="with fewer replicas the learning rate advances as with all",
        file="host/model/counters.py",
        old="self._num_sharing = num_replicas\n        self.loop",
        new="self.loop",
        test="pure/test_megatron_host.py::test_schedule_advances_by_the_replicas_that_are_there",
    ),
    Mutant(
        id="elastic/corrupt-average-of-one-rank",
        bug="only rank 0 of a replica checks its averages",
        file="engine/rounds/elastic.py",
        old="(name for name, ranks in zip(names, corrupt, strict=True) if ranks.any())",
        new="(name for name, ranks in zip(names, corrupt, strict=True) if ranks[0])",
        test=f"{_RUNS}::test_average_that_is_corrupt_on_all_replicas_is_not_applied",
    ),
    Mutant(
        id="elastic/rounding-is-corruption",
        bug="rounding of the sum is taken for a flipped bit",
        file="method/projection.py",
        old="encoded**2 * (1.0 + _FP32_ROUNDING) ** size - 1.0 + _FLOAT64_ROUNDING",
        new="encoded**2 - 1.0 + _FLOAT64_ROUNDING",
        test="pure/test_projection.py::test_rounding_is_no_difference",
    ),
    Mutant(
        id="elastic/needed-replica-waits",
        bug="a run below its minimum waits for a replica that waits for the next commit",
        file="elastic/hub_state.py",
        old="return self.admitted_from(member.name) > self.round and not self.is_short",
        new="return self.admitted_from(member.name) > self.round",
        test="pure/test_hub_machine.py::test_who_is_needed_does_not_wait",
    ),
    Mutant(
        id="elastic/fresh-moments",
        bug="a replica that joins does not take the moments that it has copied",
        file="engine/rounds/elastic.py",
        old='        set_moments(self.host, self._moments, about["counters"])\n',
        new="",
        test=f"{_RUNS}::test_joiner_copies_moments",
    ),
    Mutant(
        id="elastic/tracker-without-permission",
        bug="a leader that was frozen in a save and replaced moves the tracker back",
        file="checkpoint/folder.py",
        old="        self.permit()\n        before = self.read_tracker()",
        new="        before = self.read_tracker()",
        test="pure/test_checkpoint_folder.py::test_nothing_that_others_see_changes_without_permission",
    ),
)
