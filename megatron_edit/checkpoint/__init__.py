"""The format of checkpoints on disk: folders, manifest, checksums. No torch, no Megatron.

save/
  latest_checkpointed_iteration.txt   Megatron's tracker, replaced atomically
  iter_0000128/                       a regular Megatron checkpoint, of replica 0
    edit/
      edit.json                       the manifest, written last
      outer/                          momentum, and the anchor where it is not the parameters
      replica_1/ ...                  Megatron checkpoints of the other replicas (form `all`)
      random/                         random streams of all ranks
      listed                          empty; there once the tracker has named this checkpoint
  .iter_0000128.<job>.partial/        a save in progress, or an interrupted one
"""
