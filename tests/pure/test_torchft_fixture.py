"""torchft's public failure-recovery fixture of DiLoCo, as far as its rules are ours.

Source of the numbers: github.com/meta-pytorch/torchft at commit
7eb7087885f7ffaf51148a9df3289d73b8709fbd, BSD 3-Clause licence, file
test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.test_diloco_mocked_failure_recovery_0.json
The scenario is described here in our own words; no code was taken.

The scenario: two replicas, two layers of one parameter each, both 1.0 at the start. A step
subtracts 2 from each parameter. Each layer is synced every 6 steps, layer 0 first after step 3,
layer 1 after step 6. The outer optimizer is SGD of rate 2 without momentum. Replica 1 ends after
step 6, with the second sync done, and is started again while replica 0 waits for it at step 9.

Rules that are the same, and reproduced to the last digit:

* the outer step, and parameters that begin each round at the new anchor;
* a run that needs two replicas makes no sync with one: the other waits, with its steps kept;
* a replica that returns has the state of the others, and all members of a sync end equal.

Rules of torchft that are not ours, each with a test of what happens here instead:

* a returning replica takes the parameters of its donor in the middle of the round, and counts as a
  replica of its own in the average, although it has made no step: the donor counts twice. With
  replicas that move alike, as in the fixture, the average is the same. Here it copies the anchor,
  and has weight 0 until it has trained.
* it trains before it has the state, from the initial parameters, and these steps are discarded.
  Here it makes no step before.
* the samples of a lost replica's unfinished round are lost. Here its blocks are dealt again.
* a failed sync returns parameters to the anchor: the steps of the round are discarded. Here the
  exchange is repeated with the same parameters.

Elastic runs have no fragments yet. A layer with a round of its own is a run of one unit, so each
layer is played by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_edit.comm.control import ControlRecord
from megatron_edit.elastic.hub_state import HubState, Phase
from megatron_edit.elastic.inputs import Disconnected, Lost
from megatron_edit.elastic.messages import (
    Commit,
    Failed,
    Formed,
    FormEpoch,
    Go,
    Heal,
    Healed,
    Ready,
    Welcome,
)
from megatron_edit.engine.plan import Penalty, RoundRules, RoundState, plan_round
from megatron_edit.method.detector import DetectorConfig
from megatron_edit.method.landing import DIRECT_COPY
from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.method.loss_check import LossCheckConfig
from megatron_edit.method.outer import Nesterov, weighted_contribution
from megatron_edit.method.schedule import StepSchedule
from tests.harness.hub import HubDecisions
from tests.reference.elastic_rounds import ElasticRounds, ElasticSettings
from tests.reference.oracle import OracleSettings
from tests.reference.outer_rules import NO_PENALTY, settings_for

START, MOVE, OUTER_LR, INTERVAL, TARGET = 1.0, -2.0, 2.0, 6, 60
LOST_AFTER, BACK_AFTER, LAST = 6, 9, 21  # steps of replica 0
SYNCS = ((3, 9, 15, 21), (6, 12, 18))  # of each layer
# Parameters of replica 0 after 0, 1, ... 21 steps, by layer.
FIRST = (
    [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59, -61, -63, -65, -67,
     -69, -83],
    [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53, -55, -57, -71, -73,
     -75, -77],
)  # fmt: skip
# Parameters of replica 1 after 0, 1, ... 15 steps of its second start.
SECOND = (
    [1, -1, -3, -35, -37, -39, -41, -43, -45, -59, -61, -63, -65, -67, -69, -83],
    [1, -1, -3, -29, -31, -33, -47, -49, -51, -53, -55, -57, -71, -73, -75, -77],
)
# Anchor of each layer after steps of replica 0.
ANCHORS = ({3: -11, 9: -35, 15: -59}, {6: -23, 12: -47, 18: -71})
DISCARDED = 3  # steps of its second start that replica 1 has made when it gets the state
PENALTIES = {
    "none": (Penalty(DetectorConfig(3.0, 0.02, 20, 3), False, None, True, 0.0, None), NO_PENALTY),
    "edit": (
        Penalty(DetectorConfig(3.0, 0.02, 20, 3), True, None, False, 0.0, LossCheckConfig(6.0, 3)),
        OracleSettings(max_norm=None),
    ),
}  # fmt: skip


class Run:
    """Replicas of one unit of one parameter. Hub, plan, ledger and outer step are the package's.

    Args:
        names: of the replicas that begin.
        minimum: `--edit-min-replicas`.
        penalty: a key of `PENALTIES`.

    Attributes:
        theta: parameter of each replica that takes part.
        steps: of each in the current round.
        waiting: replicas that have copied the state: they train from the next commit on.
        weights: in the last commit, by name.
        blocks: all that were committed.
    """

    def __init__(self, names: str, minimum: int, penalty: str = "none") -> None:
        ours, expected = PENALTIES[penalty]
        self.rules = RoundRules(
            ours, DIRECT_COPY, StepSchedule(0, INTERVAL, 1), has_final_round=False
        )
        strategy = settings_for(
            "edit", tau=INTERVAL, outer_lr=OUTER_LR, outer_momentum=0.0, penalty=expected
        )
        self.oracle = ElasticRounds(
            ElasticSettings(strategy, TARGET), {"unit": np.array([START])}, names
        )
        self.nominal, self.minimum = len(names), minimum
        self.hub = HubDecisions()
        self.hub.state = HubState(minimum=minimum)
        self.anchor, self.momentum = torch.tensor([START]), torch.zeros(1)
        assignment = BlockAssignment(len(names), TARGET)
        self.rounds = RoundState.fresh(len(names), 1, assignment, tuple(names))
        self.theta = {name: self.anchor.clone() for name in names}
        self.steps, self.waiting = dict.fromkeys(names, 0), set[str]()
        self.weights, self.blocks = dict[str, float](), list[int]()
        for name in names:
            self._greet(name, "1")
        for name in names:
            self.hub.take(name, Formed(1))

    def _greet(self, name: str, incarnation: str) -> None:
        hello = HubDecisions.hello(name, self.nominal, incarnation)
        self.hub.take(name, replace(hello, minimum=self.minimum))

    def step(self, moves: dict[str, float]) -> None:
        """Make a step of each replica that trains."""
        for name in self.theta.keys() - self.waiting:
            self.theta[name] = self.theta[name] + moves[name]
            self.steps[name] += 1

    def lose(self, name: str) -> None:
        """A replica ends, and the hub notices."""
        for what in (Disconnected(), Lost()):
            self.hub.take(name, what)
        del self.theta[name], self.steps[name]

    def bring_back(self, name: str) -> None:
        """The replica is started again, and copies what the hub says."""
        self._greet(name, "2")
        welcome, heal = self.hub.sent[name]
        assert isinstance(welcome, Welcome) and welcome.is_joiner and isinstance(heal, Heal)
        assert (heal.round, heal.digest) == (self.rounds.count, self._digest(self.anchor))
        self.hub.take(name, Healed(heal.round, heal.digest))
        self.theta[name], self.steps[name] = self.anchor.clone(), 0
        self.waiting.add(name)

    def meet(self, num_failures: int = 0) -> bool:
        """Let all replicas arrive at the meeting; whether the round is committed.

        Args:
            num_failures: exchanges that fail first.
        """
        for name in sorted(self.theta):
            self.hub.arrive(name)
        if self.hub.state.phase is Phase.GATHER:
            return False
        if any(isinstance(each, FormEpoch) for sent in self.hub.sent.values() for each in sent):
            for name in self.hub.state.members:
                self.hub.take(name, Formed(self.hub.state.epoch))
        members = self.hub.state.members
        assert all(isinstance(self.hub.sent[name][-1], Go) for name in members)
        if num_failures:
            self.hub.take(members[0], Failed(self.hub.state.epoch))
            return self.meet(num_failures - 1)
        self._exchange(members)
        return True

    def _exchange(self, members: tuple[str, ...]) -> None:
        """Plan the round, let the hub commit it, and apply it."""
        assert members == tuple(sorted(self.theta))
        before = self.rounds.for_members(members)
        deltas = {name: self.anchor - self.theta[name] for name in members}
        counts = {name: self.steps[name] for name in members}
        records = [
            ControlRecord(
                before.count, count, count, count, 0, (), norms=(abs(float(deltas[name])),),
                round_loss=1.0 if count else float("nan"),
            )
            for name, count in counts.items()
        ]  # fmt: skip
        plan = plan_round(before, records, [0], self.rules, is_last=False)
        assert plan.decision is not None and before.assignment is not None
        assert plan.after.assignment is not None
        weights = plan.decision.weights[:, 0].tolist()
        parts = [weighted_contribution(deltas[n], w) for n, w in zip(members, weights, strict=True)]
        anchor, momentum = self.anchor.clone(), self.momentum.clone()
        Nesterov(OUTER_LR, 0.0).step_(
            anchor, momentum, torch.stack(parts).sum(dim=0), clip=1.0, inner_lr=1.0
        )
        used = before.steps_by_assignment(list(counts.values()))
        blocks = tuple(
            (name, before.assignment.consumed_in_round(number, count))
            for number, (name, count) in enumerate(zip(before.assigned_to, used, strict=True))
            if count
        )
        digest, epoch = self._digest(anchor), self.hub.state.epoch
        ready = Ready(
            epoch, before.count, "plan", (digest,), plan.after.assignment.num_consumed, blocks
        )
        for name in members:
            self.hub.take(name, ready)
        assert all(self.hub.sent[n] == [Commit(epoch, before.count, digest)] for n in members)
        self.weights = dict(zip(members, weights, strict=True))
        self._compare_with_oracle(deltas, counts, anchor)
        self.anchor, self.momentum, self.rounds = anchor, momentum, plan.after
        self.waiting.clear()
        for name in members:
            self.theta[name], self.steps[name] = anchor.clone(), 0

    def _compare_with_oracle(
        self, deltas: dict[str, Tensor], counts: dict[str, int], anchor: Tensor
    ) -> None:
        """Compare anchor, weights, blocks and samples with the rounds written from the design."""
        gradients = {name: {"unit": delta.numpy()} for name, delta in deltas.items()}
        expected = self.oracle.commit(counts, counts, gradients, {n: 1.0 for n in counts})
        assert expected.anchor["unit"].tolist() == pytest.approx(anchor.tolist(), rel=1e-6)
        assert expected.weights["unit"] == pytest.approx(self.weights)
        commit = self.hub.journal[-1]
        assert commit.event == "commit" and commit.fields["samples"] == expected.samples
        found = {
            name: [block for first, count in runs for block in range(first, first + count)]
            for name, runs in commit.fields["blocks"].items()
        }
        assert found == {name: list(run) for name, run in expected.blocks.items() if run}
        self.blocks += [block for run in found.values() for block in run]

    @staticmethod
    def _digest(anchor: Tensor) -> str:
        return anchor.numpy().tobytes().hex() if float(anchor) != START else ""


def moves_of(names: Iterable[str]) -> dict[str, float]:
    return dict.fromkeys(names, MOVE)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("layer", [0, 1])
def test_published_numbers_are_reproduced(layer: int, penalty: str) -> None:
    """Each parameter of replica 0 after each step, each anchor, and each parameter of replica 1
    from the first sync after its return on."""
    run, syncs = Run("ab", 2, penalty), SYNCS[layer]
    for step in range(1, LAST + 1):
        run.step(moves_of("ab"))
        if step == BACK_AFTER:
            if step in syncs:
                assert not run.meet()  # the run needs two replicas
                assert float(run.theta["a"]) == FIRST[layer][step - 1] + MOVE  # and loses no step
            run.bring_back("b")
        if step in syncs:
            assert run.meet()
            assert float(run.anchor) == ANCHORS[layer].get(step, FIRST[layer][step])
        if step == LOST_AFTER:
            run.lose("b")
        assert float(run.theta["a"]) == FIRST[layer][step]
        if step >= BACK_AFTER:
            published = SECOND[layer][step - BACK_AFTER + DISCARDED]
            if not run.waiting:
                assert float(run.theta["b"]) == published
            else:  # not ours: theirs goes on from its donor's parameters, in the donor's round
                assert published == FIRST[layer][step]
                assert run.theta["b"] == run.anchor == ANCHORS[layer][LOST_AFTER]
    events = [each.event for each in run.hub.journal]
    assert events.count("commit") == len(syncs)
    assert [each for each in events if each != "commit"] == [
        "join", "join", "epoch", "leave", "join", "epoch"
    ]  # fmt: skip


def test_returning_replica_has_no_weight_before_it_has_trained() -> None:
    """Three replicas that do not move alike, of which one returns without a step.

    torchft would copy a donor's parameters and average all three: (12 + 12 + 24) / 3 or
    (12 + 24 + 24) / 3, depending on the donor, instead of the mean of those that have trained.
    """
    run = Run("abc", 2)
    moves = {"a": -2.0, "b": -2.0, "c": -4.0}
    for _ in range(INTERVAL):
        run.step(moves)
    assert run.meet()
    anchor = float(run.anchor)
    assert anchor == pytest.approx(START - OUTER_LR * (12.0 + 12.0 + 24.0) / 3)
    run.lose("b")
    for _ in range(INTERVAL):
        run.step(moves)
    run.bring_back("b")
    assert float(run.theta["b"]) == anchor  # not the parameters of a replica in its round
    assert run.meet() and run.weights == {"a": 0.5, "b": 0.0, "c": 0.5}
    assert float(run.anchor) == pytest.approx(anchor - OUTER_LR * (12.0 + 24.0) / 2)
    for _ in range(INTERVAL):
        run.step(moves)
    assert run.meet() and run.weights == pytest.approx(dict.fromkeys("abc", 1 / 3))


def test_blocks_of_a_lost_replica_are_dealt_again() -> None:
    """As in layer 0 of the fixture: replica 1 is lost in the middle of a round.

    torchft loses the samples of its unfinished round; here each block is committed exactly once.
    """
    run = Run("ab", 2)
    for step in range(1, LAST + 1):
        run.step(moves_of("ab"))
        if step == LOST_AFTER:
            run.lose("b")
        elif step == BACK_AFTER:
            run.bring_back("b")
        if step in SYNCS[0]:
            assert run.meet()
            if step == BACK_AFTER:  # what was dealt to b, and comes first in the next round
                assert run.oracle.holes == (7, 9, 11, 13, 15)
                assert run.oracle.assignment["a"][:3] == (7, 11, 15)
    assert sorted(run.blocks) == list(range(6 + 6 + 12 + 12))  # without a hole
    assert len(set(run.blocks)) == len(run.blocks) == run.hub.state.samples


@pytest.mark.parametrize("num_failures", [1, 2])
def test_steps_of_a_failed_exchange_are_kept(num_failures: int) -> None:
    """As in layer 1, without a loss. torchft's parameters return to the anchor where a sync fails,
    and its anchor stays until the next sync: the fixture has no such sync. Here the anchors are as
    published, too, because the exchange is repeated."""
    run = Run("ab", 2)
    for step in range(1, 19):
        run.step(moves_of("ab"))
        if step in SYNCS[1]:
            before = float(run.anchor)
            assert run.meet(num_failures=num_failures if step == 12 else 0)
            assert float(run.anchor) == ANCHORS[1][step] == before - OUTER_LR * INTERVAL * 2.0
    commits = [each for each in run.hub.journal if each.event == "commit"]
    assert [each.fields["round"] for each in commits] == [0, 1, 2]
