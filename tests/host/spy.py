"""Hooks that run inside the ranks: they record what training did, or damage it on purpose.

All of them are called before the launcher attaches the plugin, so that the plugin wraps them.
They read their settings from environment variables `SPY_*`.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch


def out_dir() -> Path:
    """Return the folder to which the ranks of this test write their records."""
    return Path(os.environ["SPY_DIR"])


def built_chunks() -> list[Any]:
    """Return a list that is filled with the model's chunks once Megatron has built them."""
    import megatron.training.training as training

    chunks: list[Any] = []
    setup = training.setup_model_and_optimizer

    @wraps(setup)
    def spied_setup(*args: Any, **kwargs: Any) -> Any:
        built = setup(*args, **kwargs)
        chunks.extend(built[0])
        return built

    training.setup_model_and_optimizer = spied_setup
    return chunks


def record() -> None:
    """Record losses and gradient norms to the last bit, and a digest of the final parameters."""
    import megatron.training.training as training

    rank = os.environ["RANK"]
    log: dict[str, Any] = {"losses": {}, "grad_norms": {}, "batches": []}
    chunks, training_log, train = built_chunks(), training.training_log, training.train

    @wraps(training_log)
    def spied_log(
        loss_dict: Any, total: Any, lr: Any, iteration: int, *rest: Any, **kw: Any
    ) -> Any:
        if "lm loss" in loss_dict:
            log["losses"][iteration] = float(loss_dict["lm loss"]).hex()
        grad_norm = rest[3]
        log["grad_norms"][iteration] = None if grad_norm is None else float(grad_norm).hex()
        return training_log(loss_dict, total, lr, iteration, *rest, **kw)

    @wraps(train)
    def spied_train(*args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        finally:  # also where training ends with `sys.exit`
            log["digest"] = parameter_digest(chunks)
            (out_dir() / f"rank-{rank}.json").write_text(json.dumps(log))

    training.training_log = spied_log
    training.train = spied_train
    _record_batches(log["batches"])


def _record_batches(batches: list[list[int]]) -> None:
    import megatron.training.datasets.data_samplers as samplers

    sampler = samplers.MegatronPretrainingSampler
    iterate = sampler.__iter__

    def spied(self: Any) -> Any:
        for indices in iterate(self):
            batches.append(list(indices))
            yield indices

    sampler.__iter__ = spied


def parameter_digest(models: list[Any]) -> str:
    """Hash the bits of all parameters and of the buffers that a checkpoint keeps."""
    digest = hashlib.sha256()
    for model in models:
        for name, tensor in (*model.named_parameters(), *_kept_buffers(model)):
            digest.update(name.encode())
            digest.update(tensor.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _kept_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield persistent buffers, such as router biases, but not token counts, reset at each step."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def read_records(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Read what `record` wrote, by rank of the launch."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def _replica() -> int:
    """Return the replica of this process; call before the launcher renumbers the ranks."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return rank // (world // int(os.environ["SPY_REPLICAS"]))


def damage_before_sync() -> None:
    """Damage units of chosen replicas just before chosen syncs.

    `SPY_DAMAGE` is JSON: a list of [round, replicas, unit, what], where `what` is "nan", "inf" or
    the factor by which the pseudo-gradient grows.
    """
    from megatron_edit.engine.rounds.fixed import FixedRounds

    plan = json.loads(os.environ["SPY_DAMAGE"])
    replica = _replica()
    plan_round: Callable[..., Any] = FixedRounds._plan_round

    def damaged(self: FixedRounds, meeting: Any) -> Any:
        outer = self.syncs.outer
        for round_, replicas, unit, what in plan:
            if self.state.rounds.count + 1 != round_ or replica not in replicas:
                continue
            for shard in self.outcomes.host.plan.shards:
                if shard.name == unit and shard.numel:
                    _damage(shard, outer.units[unit].anchor, what)
                    if what == "nan":
                        _break_moments(self.outcomes.host, shard)
        return plan_round(self, meeting)

    FixedRounds._plan_round = damaged  # type: ignore[method-assign]


def _damage(shard: Any, anchor: torch.Tensor, what: str | float) -> None:
    theta = shard.gather(torch.empty(shard.numel))
    if what in ("nan", "inf"):
        theta[0] = float(what)
    else:
        theta = anchor - float(what) * (anchor - theta)
    shard.scatter(theta)


def _break_moments(host: Any, shard: Any) -> None:
    """Put NaN into the moments, as a NaN gradient does; the next step would spread it again."""
    for inner in host._inner:
        for param in shard.params:
            state = inner.optimizer.state.get(param.source, {})
            for name in {"exp_avg", "momentum_buffer"} & state.keys():
                state[name].view(-1)[0] = torch.nan


def overflow_one_replica() -> None:
    """Put inf into the gradients of replica 1 at step `SPY_STEP` (fp16 then skips the step)."""
    import megatron.training.training as training

    finalize = training.finalize_model_grads
    calls = {"n": 0}
    target = int(os.environ["SPY_STEP"])
    is_victim = _replica() == 1

    @wraps(finalize)
    def spied(model: Any, *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        calls["n"] += 1
        if is_victim and calls["n"] == target:
            for chunk in model:
                for group in chunk.bucket_groups:
                    for bucket in group.buckets:
                        bucket.grad_data.fill_(float("inf"))

    training.finalize_model_grads = spied


def drift_after_sync() -> None:
    """Change one element of layer.2 of replica 1 by one ulp when it lands in round 2."""
    from megatron_edit.engine.sync.unit_sync import UnitSync

    land = UnitSync.land
    landed = {"layer.2": 0}
    is_victim = _replica() == 1

    def spied(self: UnitSync, *args: Any, **kwargs: Any) -> Any:
        landing = land(self, *args, **kwargs)
        if is_victim and self.shard.name == "layer.2":
            landed["layer.2"] += 1
            for param in self.shard.params[:1]:  # a ZeRO rank may hold nothing of a unit
                if landed["layer.2"] == 2:
                    main = param.read()
                    main[0] = torch.nextafter(main[0], torch.tensor(torch.inf))
        return landing

    UnitSync.land = spied  # type: ignore[method-assign]


def anchor_drift() -> None:
    """Change one element of the anchor of layer.2 of replica 1 by one ulp in round 2."""
    from megatron_edit.engine.sync.unit_sync import UnitSync

    step, num_steps = UnitSync.step, 0
    is_victim = _replica() == 1

    def spied(self: UnitSync, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        is_due = self.result is None and self.shard.name == "layer.2"
        result = step(self, *args, **kwargs)
        num_steps += is_due
        if is_victim and is_due and num_steps == 2 and self.shard.numel:
            anchor = self.resident_state.anchor
            anchor[0] = torch.nextafter(anchor[0], torch.tensor(torch.inf))
        return result

    UnitSync.step = spied  # type: ignore[method-assign]


class _CountingGroup:
    """A process group that reports the bytes passed to every method call."""

    def __init__(self, inner: Any, note: Callable[[int], None]) -> None:
        self._inner, self._note = inner, note

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if not callable(attribute):
            return attribute

        def method(*args: Any, **kwargs: Any) -> Any:
            self._note(_bytes_of([*args, *kwargs.values()]))
            return attribute(*args, **kwargs)

        return method


def count_sync_traffic() -> None:
    """Record the step and the bytes of every call to the sync and meeting process groups."""
    from megatron_edit.comm.collectives import Duplex
    from megatron_edit.engine import EditEngine

    rank = os.environ["RANK"]
    log: list[tuple[int, int]] = []  # (number of finished steps, bytes)
    build, finish = EditEngine.__init__, EditEngine.finish

    def step_of(engine: EditEngine) -> int:
        return engine.status.step if hasattr(engine, "state") else 0  # still being built

    def spied_build(self: EditEngine, *args: Any, **kwargs: Any) -> None:
        groups: Any = kwargs.get("groups", args[2] if len(args) > 2 else None)

        def counting(inner: Any) -> _CountingGroup:
            return _CountingGroup(
                inner,
                lambda nbytes: log.append((step_of(self), nbytes)),
            )

        for group in (groups.sync, groups.meeting):
            group.process_group = counting(group.process_group)
            group.phases = tuple(
                Duplex(counting(ways.up), counting(ways.down)) for ways in group.phases
            )
        build(self, *args, **kwargs)

    def spied_finish(self: EditEngine) -> None:
        (out_dir() / f"traffic-{rank}.json").write_text(json.dumps(log))
        finish(self)

    EditEngine.__init__ = spied_build  # type: ignore[method-assign]
    EditEngine.finish = spied_finish  # type: ignore[method-assign]


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.nbytes)
    if isinstance(value, list | tuple):
        return sum(_bytes_of(item) for item in value)
    return 0


def plain_main(script: str, argv: list[str], before: str) -> None:
    """Run a script with Megatron alone, without launcher and plugin."""
    from tests.harness.jobs import resolve
    from tests.harness.ranks import _run_plain

    resolve(before)()
    _run_plain(script, argv)


def fake_version() -> None:
    """Make Megatron report a version that is not supported."""
    import megatron.core.package_info as info

    info.__version__ = "0.15.0"
    shorten_grace()


def remove_symbol() -> None:
    """Remove a symbol of Megatron that the plugin needs."""
    import megatron.training.training as training

    del training.training_log
    shorten_grace()


def shorten_grace() -> None:
    """Shorten the time that ranks without an error message wait before they exit."""
    from megatron_edit import launcher

    vars(launcher)["GRACE_SECONDS"] = 0.2


def keep_tensor_parallel_overlap() -> None:
    """Keep a flag that runs on CPU drop, as on GPUs."""
    from megatron_edit.host import attach
    from megatron_edit.host.cpu import cpu_argument_defaults

    def defaults(optimizer: str) -> dict[str, object]:
        found = cpu_argument_defaults(optimizer)
        del found["tp_comm_overlap"]
        return found

    shorten_grace()
    vars(attach)["cpu_argument_defaults"] = defaults


def simulate_second_host() -> None:
    """Make rank 1 look like a rank on another host, on which relative paths do not exist."""
    from megatron_edit.comm import interfaces

    shorten_grace()
    vars(interfaces)["why_unreachable"] = lambda: None  # gloo listens on the loopback in tests
    if os.environ["RANK"] == "1":
        os.environ["LOCAL_RANK"] = "0"
        socket.gethostname = lambda: "second-host"
        os.chdir("/")


def record_exit_barrier() -> None:
    """Write a file for each rank that has passed the exit barrier."""
    from megatron_edit.comm.worlds import ReplicaWorld

    exit_barrier = ReplicaWorld.exit_barrier

    @wraps(exit_barrier)
    def noted(self: ReplicaWorld, *args: Any, **kwargs: Any) -> None:
        exit_barrier(self, *args, **kwargs)
        (out_dir() / f"left-{self.placement.global_rank}").touch()

    ReplicaWorld.exit_barrier = noted  # type: ignore[method-assign]


def record_embeddings() -> None:
    """Write a digest of the word embedding after every step, on the stages that hold a copy."""
    import megatron.training.training as training

    rank = os.environ["RANK"]
    setup = training.setup_model_and_optimizer

    @wraps(setup)
    def spied(*args: Any, **kwargs: Any) -> Any:
        from megatron_edit.engine import EditEngine

        model, optimizer, scheduler = setup(*args, **kwargs)
        after_step = EditEngine.after_step

        def noted(self: EditEngine) -> None:
            after_step(self)
            self.host.gather_parameters()
            tied = [p for p in model[0].parameters() if getattr(p, "shared_embedding", False)]
            bits = tied[0].detach().float().contiguous().numpy().tobytes()
            with (out_dir() / f"embedding-{rank}").open("a") as file:
                file.write(hashlib.sha256(bits).hexdigest() + f" {self.groups.sync.size}\n")

        EditEngine.after_step = noted  # type: ignore[method-assign]
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = spied


def train_with_own_flags(argvs: list[list[str]]) -> None:
    """Run the launcher in every rank with a command line of its own."""
    from megatron_edit import launcher
    from tests.harness.launch import REPOSITORY

    shorten_grace()
    argv = argvs[int(os.environ["RANK"])]
    code = launcher.main([str(REPOSITORY / "scripts/pretrain_gpt.py"), *argv])
    raise SystemExit(code)


def start_from_seeded_weights() -> None:
    """Give the model weights that depend only on each parameter's name and position.

    Megatron's own initial weights depend on the layout: on the TP rank, on the pipeline stage.
    """
    import megatron.training.training as training

    setup = training.setup_model_and_optimizer

    @wraps(setup)
    def spied(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = setup(*args, **kwargs)
        with torch.no_grad():
            for chunk in model:
                _seed_chunk(getattr(chunk, "module", chunk))
        optimizer.reload_model_params()
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = spied


def _seed_chunk(module: Any) -> None:
    from megatron.core import parallel_state

    model = getattr(module, "module", module)
    dense = parallel_state.get_tensor_model_parallel_group()
    expert = parallel_state.get_expert_tensor_parallel_group()
    for name, parameter in model.named_parameters():
        group = expert if ".experts." in name else dense
        tp, size = group.rank(), group.size()
        shape = list(parameter.shape)
        is_split = getattr(parameter, "tensor_model_parallel", False)
        dim = getattr(parameter, "partition_dim", 0)
        if is_split:
            shape[dim] *= size
        values = _values_of(_global_name(name, parameter, model), shape)
        parameter.copy_(values.chunk(size, dim=dim)[tp] if is_split else values)


def _global_name(name: str, parameter: Any, model: Any) -> str:
    """Return the parameter's name with the layer and expert number counted over all ranks."""
    from megatron.core import parallel_state

    if getattr(parameter, "shared_embedding", False):
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number)
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        experts = len(model.decoder.layers[0].mlp.experts.local_experts)
        first = parallel_state.get_expert_model_parallel_rank() * experts
        parts[place] = str(int(parts[place]) + first)
    return ".".join(parts)


def _values_of(name: str, shape: list[int]) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    return values + 1.0 if "norm" in name and name.endswith("weight") else values
