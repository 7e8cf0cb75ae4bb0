#!/usr/bin/env bash
# Runs one rank: srun starts this once per task, with the command of the rank as arguments.
#
# Translates SLURM's names into those that Megatron reads, and signals into Megatron's:
#   USR1   from the batch script. Sends TERM only to the rank: SLURM signals every process of a
#          step, and TERM would kill the rank's workers (data, asynchronous saves).
#   TERM   from SLURM, at a preemption. The rank has received it, too.
# Writes to EDIT_STATE: `stopped` if it was asked to stop, `failed` with the exit code of the rank
# that failed first (after a request to stop, only codes of permanent errors). srun might report
# the code of a rank that was killed because of that failure.
set -u

export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=$((SLURM_STEP_NUM_TASKS / SLURM_STEP_NUM_NODES))

stop_signal=''
# shellcheck disable=SC2317,SC2329 # called by the traps; newer versions use the second number
on_signal() {
    [ -z "$stop_signal" ] || return
    stop_signal=$1
    : >"$EDIT_STATE/stopped"
    if [ "$stop_signal" = USR1 ]; then kill -TERM "$rank"; fi
}

(trap '' USR1 && exec "$@") &
rank=$!
trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM
while kill -0 "$rank" 2>/dev/null; do wait "$rank"; done # traps interrupt `wait`
wait "$rank"
code=$?
if [ "$code" -eq 2 ] || [ "$code" -eq 3 ] || { [ "$code" -ne 0 ] && [ -z "$stop_signal" ]; }; then
    (set -o noclobber && echo "$code" >"$EDIT_STATE/failed") 2>/dev/null
fi
exit "$code"
