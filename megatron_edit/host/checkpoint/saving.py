"""Saving: which replica writes what, in which form, and under which name.

Megatron asks for saves as ever; its call is wrapped. Every replica comes to every save, and the
saves of a run are numbered alike on all, so that no replica waits for another while it writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from megatron_edit.checkpoint.folder import EDIT, OUTER, RANDOM, CheckpointFolder, replica_folder
from megatron_edit.checkpoint.manifest import ALL, LEADER, Manifest
from megatron_edit.config import EditConfig
from megatron_edit.engine.engine import EditEngine
from megatron_edit.engine.standing import detectors_to_lists, ledger_of
from megatron_edit.errors import SyncProtocolError
from megatron_edit.host.checkpoint.committing import Committer, Part
from megatron_edit.host.checkpoint.fingerprint import layout_of, model_of
from megatron_edit.host.checkpoint.outer import pieces_of, sharded_outer_state
from megatron_edit.host.checkpoint.paths import Redirection
from megatron_edit.host.checkpoint.random import save_streams
from megatron_edit.host.model import MegatronHost
from megatron_edit.host.patching import Patcher
from megatron_edit.replica.world import ReplicaWorld
from megatron_edit.report.console import say


@dataclass(frozen=True)
class SavePlan:
    """What a save consists of; the same on all ranks of all replicas.

    Attributes:
        iteration: in the name of the checkpoint.
        form: `all` or `leader`.
        has_outer: whether there is outer state.
        has_anchor: whether the anchor is not the parameters.
    """

    iteration: int
    form: str
    has_outer: bool
    has_anchor: bool


class SaveControl:
    """Wraps Megatron's `save_checkpoint`.

    Args:
        config: gives the policy for the inner state.
        world: this process's place, and the store.
        redirection: of the folders that Megatron writes to.
        patcher: for a hook on Megatron's queue of asynchronous saves.

    """

    def __init__(
        self,
        config: EditConfig,
        world: ReplicaWorld,
        redirection: Redirection,
        patcher: Patcher,
    ) -> None:
        import megatron.training.checkpointing as checkpointing

        self._is_ending = False  # what is saved now is all that will be left
        self._is_owed = False  # a save waits for the next sync
        self._asked_at: int | None = None  # iteration, while Megatron decides whether to exit
        self._config = config
        self._world = world
        self._redirection = redirection
        self._committer = Committer(world)
        self._engine: EditEngine | None = None
        self._count = 0
        self._saved_step: int | None = None
        self._requests: list[Any] | None = None  # while a save is being prepared
        patcher.wrap(checkpointing, "schedule_async_save", self._around_schedule)

    def use(self, engine: EditEngine, host: MegatronHost, model: Sequence[Any]) -> None:
        """The engine is built. `model`: unwrapped chunks."""
        self._engine, self._host, self._model = engine, host, model
        self._pieces = pieces_of(host, model) if host.arguments.save else []
        self._job = self._world.shared_text("save/job", _job_name)

    def around_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `save_checkpoint`."""
        signature = inspect.signature(save)

        @wraps(save)
        def saved(*args: Any, **kwargs: Any) -> None:
            engine = self._engine
            if engine is None:
                raise SyncProtocolError("a checkpoint is to be saved before training")
            if self._is_of_a_stop:
                return  # every replica saves when it stops
            is_leaving = self._is_ending and engine.rounds.has_left
            if engine.step == self._saved_step and not is_leaving:
                return  # at the end of training; nothing has changed, on no replica
            given = signature.bind(*args, **kwargs)
            engine.clock.pause()
            engine.settle()
            if self._waits():
                self._is_owed = True
            else:
                self._save(engine, lambda: save(*given.args, **given.kwargs), given)
            engine.clock.resume()

        return saved

    @contextmanager
    def deciding(self, iteration: int, *, is_planned: bool) -> Iterator[None]:
        """Inside, Megatron saves at its intervals, and decides whether to exit.

        Args:
            iteration: that is over.
            is_planned: whether it will exit, on all replicas.
        """
        args, is_payable = self._host.arguments, self._is_payable
        interval = args.save_interval
        if is_payable:
            args.save_interval = iteration  # for Megatron to save now
        self._asked_at, self._is_ending = iteration, is_planned
        try:
            yield
        finally:
            self._asked_at, self._is_ending = None, False
            args.save_interval = interval

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Inside, what is saved is all that will be left."""
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False

    @property
    def _is_payable(self) -> bool:
        """Whether a save is owed, and the replicas have just met."""
        return self._is_owed and self._engine is not None and not self._engine.is_mid_round

    @property
    def _is_of_a_stop(self) -> bool:
        """Whether Megatron saves because this replica was asked to stop: the others are not yet."""
        interval = self._host.arguments.save_interval
        is_due = interval and self._asked_at is not None and self._asked_at % interval == 0
        return self._asked_at is not None and not self._is_ending and not is_due

    def finish(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            EditError: it could not be completed.
        """
        self._committer.wait()

    # ---- one save

    def _waits(self) -> bool:
        """Whether a save between two syncs waits for the next: the policy keeps one inner state."""
        engine = self._engine
        assert engine is not None
        if self._config.inner_state == ALL or self._is_ending or not engine.is_mid_round:
            return False
        if not self._is_owed and self._is_first:
            say(
                f"the checkpoint of iteration {engine.step} waits for the next sync "
                f"(--edit-inner-state {self._config.inner_state})"
            )
        return True

    def _save(
        self, engine: EditEngine, save: Callable[[], Any], given: inspect.BoundArguments
    ) -> None:
        self._committer.wait()
        place, args = self._world.placement, self._host.arguments
        plan = self._plan(engine, given.arguments["iteration"])
        folder = CheckpointFolder(Path(args.save))
        partial = folder.partial(plan.iteration, self._job)
        entry = engine.entry()
        self._requests = []
        has_outer = plan.has_outer and place.replica == place.num_replicas - 1
        if has_outer:
            self._save_outer(partial / EDIT / OUTER, plan)
        streams = save_streams(partial / EDIT / RANDOM, place.replica)
        has_model = place.replica == 0 or plan.form == ALL
        if has_model:
            given.arguments["iteration"] = plan.iteration
            is_timed = engine.settings.timed is not None and not engine.is_warmup
            samples = self._samples(engine) if is_timed else None  # else Megatron counts right
            with (
                self._host.counting(samples),
                self._redirection.to(replica_folder(partial, place.replica)),
            ):
                save()
        requests, self._requests = self._requests, None
        part = Part(
            number=self._count,
            folder=folder,
            job=self._job,
            manifest=self._manifest(engine, plan),
            entry=entry,
            has_model=has_model,
            has_outer=has_outer,
            own_file=streams,
            retain_interval=getattr(args, "save_retain_interval", None),
        )
        self._count, self._saved_step, self._is_owed = self._count + 1, engine.step, False
        if requests:
            requests[-1].add_finalize_fn(lambda: self._committer.start(part))
        else:
            self._committer.start(part)

    def _plan(self, engine: EditEngine, iteration: int) -> SavePlan:
        is_mid_round = engine.is_mid_round
        if self._is_ending and not engine.is_warmup and engine.rounds.has_left:
            # Replicas leave wherever they are; what each has told the others decides for all.
            records = engine.rounds.last_records
            is_mid_round = any(record.inner_steps for record in records)
            iteration += records[0].step - engine.step
        if engine.settings.timed is not None and not engine.is_warmup:
            samples, batch = self._samples(engine), self._host.arguments.global_batch_size
            iteration = max(1, samples // batch)  # Megatron takes 0 for no iteration
        is_all = not engine.is_warmup and (self._is_ending or self._config.inner_state == ALL)
        return SavePlan(
            iteration=iteration,
            form=ALL if is_all else LEADER,
            has_outer=not engine.is_warmup,
            has_anchor=is_mid_round,
        )

    def _samples(self, engine: EditEngine) -> int:
        """Consumed by all replicas: equal steps, or as they told each other."""
        records = engine.rounds.last_records
        if engine.is_warmup or not records or engine.settings.timed is None:
            return engine.host.progress().samples * self._world.placement.num_replicas
        return sum(record.samples for record in records)

    def _save_outer(self, folder: Path, plan: SavePlan) -> None:
        from megatron.core import dist_checkpointing

        assert self._engine is not None and self._engine.rounds.state is not None
        state, args = self._engine.rounds.state, self._host.arguments
        state.wait()
        tensors = sharded_outer_state(self._pieces, state, has_anchor=plan.has_anchor)
        if args.async_save:  # written later, by another process perhaps
            for tensor in tensors.values():
                if not tensor.data.is_cuda:
                    tensor.data = tensor.data.clone()
        folder.mkdir(parents=True, exist_ok=True)
        request = dist_checkpointing.save(
            tensors,
            str(folder),
            async_sharded_save=args.async_save,
            async_strategy=args.async_strategy,
        )
        if request is not None:
            import megatron.training.checkpointing as checkpointing

            checkpointing.schedule_async_save(request)

    def _manifest(self, engine: EditEngine, plan: SavePlan) -> Manifest:
        from megatron_edit.host.describe import versions

        place, args, rounds = self._world.placement, self._host.arguments, engine.rounds
        order = self._host.order
        dealing = engine.pace.dealing if not engine.is_warmup else None
        return Manifest(
            iteration=plan.iteration,
            form=plan.form,
            strategy=self._config.strategy,
            num_replicas=place.num_replicas,
            ranks_per_replica=place.ranks_per_replica,
            parallel=layout_of(args),
            model=model_of(args),
            units=self._host.plan.names,
            is_warmup=engine.is_warmup,
            round=rounds.count,
            replicas=(),
            detectors=detectors_to_lists(rounds.detectors),
            batch=args.global_batch_size,
            ledger=None if dealing is None else ledger_of(dealing),
            order_start=order.start,
            displaced=order.displaced,
            has_anchor=plan.has_anchor and plan.has_outer,
            written_by=versions(),
        )

    @property
    def _is_first(self) -> bool:
        return self._world.placement.global_rank == 0

    def _around_schedule(self, schedule: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(schedule)
        def noted(request: Any) -> None:
            if self._requests is not None:
                self._requests.append(request)
            schedule(request)

        return noted


def _job_name() -> str:
    """Tells the partial checkpoints of this run from those of another."""
    import secrets

    return secrets.token_hex(4)
