#!/usr/bin/env bash
# One rank: srun starts this once per task, with the command of the rank as arguments.
#
# Translates SLURM's names into those that Megatron reads, and signals into Megatron's:
#   USR1   from the batch script. The rank alone gets TERM; its workers (data, asynchronous saves)
#          would die of it, but SLURM gives a signal to every process of a step.
#   TERM   from SLURM itself, at a preemption. The rank has got it, too.
# Notes in EDIT_STATE: `stopped` if it was asked to stop, `failed` with the exit code of the rank
# that failed first (after a request to stop, only codes that would come again). srun would report
# the code of those that were ended because of it.
set -u

export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=$((SLURM_STEP_NUM_TASKS / SLURM_STEP_NUM_NODES))

asked=''
# shellcheck disable=SC2317,SC2329 # called by the traps; newer versions use the second number
on_signal() {
    [ -z "$asked" ] || return
    asked=$1
    : >"$EDIT_STATE/stopped"
    if [ "$asked" = USR1 ]; then kill -TERM "$rank"; fi
}

(trap '' USR1 && exec "$@") &
rank=$!
trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM
while kill -0 "$rank" 2>/dev/null; do wait "$rank"; done # a trap interrupts `wait`
wait "$rank"
code=$?
if [ "$code" -eq 2 ] || [ "$code" -eq 3 ] || { [ "$code" -ne 0 ] && [ -z "$asked" ]; }; then
    (set -o noclobber && echo "$code" >"$EDIT_STATE/failed") 2>/dev/null
fi
exit "$code"
