"""The format of checkpoints on disk: folders, manifest, checksums. No torch, no Megatron.

save/
  latest_checkpointed_iteration.txt   Megatron's tracker, replaced at once
  iter_0000128/                       an ordinary Megatron checkpoint, of replica 0
    edit/
      edit.json                       the manifest, written last
      outer/                          momentum, and the anchor where it is not the parameters
      replica_1/ ...                  Megatron checkpoints of the other replicas (form `all`)
      random/                         random streams of all ranks
      listed                          empty: the tracker has named this checkpoint
  .iter_0000128.<job>.partial/        a save that is under way, or was cut off
"""
