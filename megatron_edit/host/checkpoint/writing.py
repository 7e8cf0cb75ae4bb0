"""Writing one checkpoint: which replica writes what, and where.

A save has the same name on all replicas, so that no replica waits for another while it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msgspec import structs

from megatron_edit.checkpoint.folder import (
    EDIT,
    OUTER,
    RANDOM,
    STOP,
    CheckpointFolder,
    replica_folder,
    replica_local_folder,
)
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.constants import ALL, MIN_TIMEOUT_SECONDS
from megatron_edit.engine import EditEngine, EngineState, saved_rounds
from megatron_edit.host.checkpoint.async_saves import (
    ANOTHER_RANK_FAILED,
    SaveRecord,
    WriteErrors,
    error_text,
)
from megatron_edit.host.checkpoint.choosing import layout_of, model_of
from megatron_edit.host.checkpoint.committing import (
    Committer,
    NotPermittedError,
    RankSave,
    permission,
)
from megatron_edit.host.checkpoint.loading import training_settings
from megatron_edit.host.checkpoint.outer import (
    Kinds,
    LocalPiece,
    RankPieces,
    sharded_outer_state,
    shared_kinds,
)
from megatron_edit.host.checkpoint.paths import Redirection, without_retention
from megatron_edit.host.checkpoint.replica_local import (
    RankShards,
    gradient_kinds,
    is_replica_local,
    replica_local_kinds,
    save_streams,
    streams_name,
)
from megatron_edit.host.metrics import versions
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.seams.megatron import AsyncRequest
from megatron_edit.host.seams.patching import Call

LEAVE_SECONDS = 10.0  # for a replica of an elastic run that leaves to complete its last save


@dataclass(frozen=True)
class SavePlan:
    """What a save consists of; the same on all ranks of all replicas, except `own_iteration`.

    Attributes:
        iteration: in the name of the checkpoint.
        own_iteration: for Megatron's loop, when this replica resumes.
        name: unique among the saves of the run.
        is_stop_save: whether each replica stops at a step of its own; earlier saves that other
            replicas have not reached will then not be completed.
        form: `all` or `leader`.
        has_outer: whether there is outer state.
        has_anchor: whether the anchor differs from the parameters, and is stored.
        samples: consumed by all replicas, where Megatron's own count is not right; else None.
    """

    iteration: int
    own_iteration: int
    name: str
    is_stop_save: bool
    form: str
    has_outer: bool
    has_anchor: bool
    samples: int | None


class CheckpointWriter:
    """Writes this rank's part of every checkpoint.

    Args:
        world: this process's placement, and the store.
        redirection: of the folders that Megatron writes to.
        write_errors: records an error of one rank, so that the others do not wait for it.
        engine: whose state is written.
        pieces: this rank's pieces of the outer state.
    """

    def __init__(
        self,
        config: EditConfig,
        world: ReplicaWorld,
        redirection: Redirection,
        write_errors: WriteErrors,
        engine: EditEngine,
        host: MegatronHost,
        pieces: RankPieces,
    ) -> None:
        self._config = config
        self._world = world
        self._write_errors = write_errors
        self._engine, self._host, self._pieces = engine, host, pieces
        self._redirection = redirection
        self._committer = Committer(world, max(MIN_TIMEOUT_SECONDS, config.timeout_seconds or 0.0))
        elastic = engine.elastic
        self._permit = permission(None if elastic is None else elastic.membership.agent)
        if elastic is not None:  # one that has left may not complete a save any more
            elastic.membership.on_leave = partial(self._committer.settle, LEAVE_SECONDS)
        self._is_first_save = True
        # Requests of the outer state: scheduled together with that of Megatron's own save.
        self._outer: list[AsyncRequest] = []
        # Requests scheduled so far, while a save is being prepared; else None.
        self._requests: list[AsyncRequest] | None = None
        self._record: SaveRecord | None = None  # of the last save
        self._job = self._world.shared_text("save/job", _job_name)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            EditError: it could not be completed.
        """
        self._committer.wait(self._engine.status.timeout_seconds)

    def write(self, plan: SavePlan, call: Call[None]) -> None:
        """Write a checkpoint. All exchanges of the last sync must have landed.

        Collective: the ranks of the replica.

        Args:
            call: of Megatron's `save_checkpoint`; the iteration is replaced by the plan's own.
        """
        if plan.is_stop_save:
            self._committer.abandon()
        place, args = self._world.scope, self._host.arguments
        folder = CheckpointFolder(Path(args.save), self._permit)
        # The last save of the run may have the same iteration as one that is not completed.
        job = f"{self._job}{STOP}" if plan.is_stop_save else self._job
        if self._is_first_save and place.global_rank == 0:
            _remove_partial_saves(folder, job)
        self._is_first_save = False
        partial = folder.partial(plan.iteration, job)
        state = self._engine.state_dict()
        part = RankSave(
            name=plan.name,
            folder=folder,
            job=job,
            manifest=self._manifest(plan, state),
            entry=state.replica,
            shared_samples=self._shared_samples(plan),
            has_model=place.replica == 0 or plan.form == ALL,
            has_outer=plan.has_outer and place.replica == place.num_replicas - 1,
            has_replica_local=self._has_replica_local(plan, state),
            random_file=partial / EDIT / RANDOM / streams_name(place.replica),
            is_stop_save=plan.is_stop_save,
            retain_interval=getattr(args, "save_retain_interval", None),
            record=SaveRecord(),
        )
        self._record, self._requests, self._outer = part.record, [], []
        if self._make_folders(part):
            with self._write_errors.recording(part.record):
                self._write_parts(part, plan, state, call)
        requests, self._requests = self._requests, None
        if requests:
            requests[-1].add_finalize_fn(lambda: self._committer.start(part))
        else:
            self._committer.start(part)

    @property
    def should_end_training(self) -> bool:
        """Whether training should end because two checkpoints in a row could not be written.

        Known only to global rank 0.
        """
        return self._committer.should_end_training

    def _make_folders(self, part: RankSave) -> bool:
        """Make the folders that this rank writes to; return whether all ranks of the replica could.

        Collective: the ranks of the replica. A rank that failed here would miss the collectives
        of Megatron's save.
        """
        try:
            for folder in (part.random_file.parent, *part.folders(self._world.placement.replica)):
                folder.mkdir(parents=True, exist_ok=True)
            save_streams(part.random_file)
        except OSError as error:
            part.record.errors.append(error_text(error))
        has_failed = self._engine.is_true_on_any_rank(bool(part.record.errors))
        if has_failed and not part.record.errors:
            part.record.errors.append(ANOTHER_RANK_FAILED)
        return not has_failed

    def _write_parts(
        self, part: RankSave, plan: SavePlan, state: EngineState, call: Call[None]
    ) -> None:
        """Write the outer state and Megatron's own checkpoint, where this replica writes them.

        Collective: the ranks of the replica.
        """
        replica = self._world.placement.replica
        if part.has_outer:
            kinds = shared_kinds(state.outer, state.pending, has_anchor=plan.has_anchor)
            self._save_kinds(part.partial / EDIT / OUTER, kinds, self._pieces.outer)
        if part.has_replica_local:
            own, pieces = self._replica_local(state)
            self._save_kinds(replica_local_folder(part.partial, replica), own, pieces)
        if part.has_model:
            call.arguments["iteration"] = plan.own_iteration
            target = replica_folder(part.partial, replica)
            with (
                self._host.counters.with_consumed_samples(plan.samples),
                self._redirection.to(target, is_save=True),
                without_retention(),
            ):
                call.proceed()
        self._schedule_outer()

    def schedule(self, call: Call[None]) -> None:
        """Schedule Megatron's asynchronous save, merged with requests of the outer state."""
        from megatron_edit.host.checkpoint.async_saves import merge_async_requests

        before, self._outer = self._outer, []
        requests = [*before, call.arguments["async_request"]]
        if self._record is not None:
            for request in requests:
                self._write_errors.guard_completion(request, self._record)
        for each in merge_async_requests(requests):
            if self._requests is not None:
                self._requests.append(each)
            call.function(each)

    def _has_replica_local(self, plan: SavePlan, state: EngineState) -> bool:
        """Return whether there is state of exchanges that belongs to this replica alone."""
        settings = self._engine.settings
        if state.is_warmup:
            return settings.in_checkpoints(settings.gradient_wire).has_residual
        if not plan.has_outer or plan.form != ALL:
            return False
        return is_replica_local(state.replica.pending, settings.in_checkpoints(settings.wire))

    def _replica_local(self, state: EngineState) -> tuple[Kinds, Sequence[LocalPiece]]:
        """Return that state, and this rank's pieces of it."""
        place, settings, pieces = self._world.placement, self._engine.settings, self._pieces
        where = place.replica, place.num_replicas
        if state.is_warmup:
            mine = RankShards(*where, settings.gradient_wire, self._host.plan, pieces.gradients)
            return gradient_kinds(state.gradients, mine), mine.pieces
        wire = settings.in_checkpoints(settings.wire)
        mine = RankShards(*where, wire, self._host.plan, pieces.outer)
        return replica_local_kinds(state.outer, state.pending, mine), mine.pieces

    def _save_kinds(self, folder: Path, kinds: Kinds, pieces: Sequence[LocalPiece]) -> None:
        from megatron.core import dist_checkpointing

        args = self._host.arguments
        tensors = sharded_outer_state(pieces, kinds)
        if args.async_save:  # written later, by another process: Megatron copies GPU tensors only
            for tensor in tensors.values():
                if tensor.data.is_pinned():
                    tensor.data = tensor.data.clone()
        # megatron-core 0.16 has one asynchronous strategy only, and no argument for it.
        strategy = {name: value for name, value in vars(args).items() if name == "async_strategy"}
        request = dist_checkpointing.save(
            tensors, str(folder), async_sharded_save=args.async_save, **strategy
        )
        if request is not None:
            self._outer.append(request)

    def _schedule_outer(self) -> None:
        """Schedule the request of the outer state where this replica saves nothing else."""
        import megatron.training.checkpointing as checkpointing

        if self._outer:
            request = self._outer.pop()
            checkpointing.schedule_async_save(request)

    def _manifest(self, plan: SavePlan, state: EngineState) -> Manifest:
        place, args = self._world.placement, self._host.arguments
        order, settings = self._host.counters.order, self._engine.settings
        rounds = state.rounds
        if self._engine.elastic is not None:
            rounds = rounds.with_nominal_members(place.num_replicas)
        if state.is_warmup:  # no blocks are assigned
            rounds = replace(rounds, assignment=None)
        return Manifest(
            iteration=plan.iteration,
            form=plan.form,
            strategy=self._config.strategy,
            num_replicas=place.num_replicas,
            ranks_per_replica=place.ranks_per_replica,
            parallel=layout_of(args),
            model=model_of(args),
            units=self._host.plan.names,
            is_warmup=state.is_warmup,
            replicas=(),
            files={},
            batch=args.global_batch_size,
            chunk=self._host.counters.chunk,
            round_seconds=state.round_seconds,
            order_start=order.start,
            displaced=order.displaced,
            has_anchor=plan.has_anchor and plan.has_outer,
            wire=settings.in_checkpoints(settings.wire).name,
            gradient_wire=settings.in_checkpoints(settings.gradient_wire).name,
            written_by=versions(),
            settings=training_settings(self._config),
            is_final_phase=self._engine.status.is_final_phase,
            common_steps=self._host.common_steps,
            digest="" if self._engine.elastic is None else self._engine.elastic.digest,
            **structs.asdict(saved_rounds(rounds)),
        )

    def _shared_samples(self, plan: SavePlan) -> int | None:
        """Return the samples of all replicas in an elastic run, whose replicas are all equal."""
        if self._engine.elastic is None:
            return None
        if plan.samples is not None:
            return plan.samples
        return self._host.counters.samples * self._world.placement.num_replicas


def _remove_partial_saves(folder: CheckpointFolder, job: str) -> None:
    """Remove partial saves of other jobs, where this replica may.

    Raises:
        NotPermittedError: the replica is to end.
    """
    try:
        folder.remove_partial_saves(job)
    except NotPermittedError as error:
        if error.exit_code:
            raise


def _job_name() -> str:
    """Return a random name that distinguishes partial checkpoints of this run from others."""
    import secrets

    return secrets.token_hex(4)
