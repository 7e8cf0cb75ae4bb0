# shellcheck shell=bash
# Functions of elastic.sbatch and hub.sbatch. Sourced by them, never run; see docs/slurm.md.
#
# The folder `hub` of the run holds: `address` of the hub, `token`, a folder 1, 2, ... for each journal,
# and `ended`, the exit code of the run, once it is over.

# shellcheck source=scripts/slurm/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
HUB_WAIT_SECONDS=600 # of a replica, for a hub that answers
HUB_POLL_SECONDS=5
HUB_LAST_SECONDS=10 # in which a hub still answers after the end of its run

# use_hub_folder: sets `hub_folder` and `token_options` of megatron-edit hub.
use_hub_folder() {
    hub_folder=$EDIT_DIR/hub
    token_options=()
    if [ -z "${EDIT_HUB_TOKEN:-}" ] && [ -f "$hub_folder/token" ]; then
        token_options=(--token-file "$hub_folder/token")
    fi
}

# hub_command ARG...: sets `command`, a call of megatron-edit hub, in the container if there is one.
hub_command() {
    command=("$EDIT_PYTHON" -m megatron_edit hub "$@" "${token_options[@]}")
    [ -z "$EDIT_CONTAINER" ] || command=(
        srun --nodes=1 --ntasks=1 "${container[@]}" "${srun_options[@]}" "${command[@]}")
}

# ---- the job of the hub

# Runs a hub until the run has ended. The job is queued again if the hub fails before.
run_hub() {
    local number=1 end
    code=1
    mkdir -p "$EDIT_DIR/hub"
    [ -n "${EDIT_HUB_TOKEN:-}" ] || [ -f "$EDIT_DIR/hub/token" ] || make_token "$EDIT_DIR/hub/token"
    use_hub_folder
    rm -f "$hub_folder/ended"
    while [ -d "$hub_folder/$((number + 1))" ]; do ((number += 1)); done
    [ -z "$(end_of "$hub_folder/$number")" ] || ((number += 1))
    serve "$hub_folder/$number"
    [ "$stop_signal" != USR1 ] || requeue "USR1: the time limit is near"
    [ -z "$stop_signal" ] || exit 1 # preempted or cancelled: SLURM requeues it, or does not
    end=$(end_of "$hub_folder/$number")
    [ -n "$end" ] || again_at_most "$EDIT_MAX_FAILURES" failures "the hub has failed"
    echo "$end" >"$hub_folder/ended"
    exit "$end"
}

# make_token FILE: writes a secret that only the user can read.
make_token() {
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$1.new")
    mv "$1.new" "$1"
}

# end_of FOLDER: the exit code with which the run of a journal has ended; empty if it has not.
end_of() {
    [ ! -f "$1/journal.jsonl" ] || tail -n 1 "$1/journal.jsonl" |
        sed -n '/"event": *"end"/s/.*"exit_code": *\([0-9]*\).*/\1/p'
}

# serve FOLDER: runs a hub on a journal until its run has ended, or the job is to stop.
serve() {
    local place command hub
    place=$(address "$(node_names 0 | sed -n 1p)"):$(port 0)
    mkdir -p "$1"
    hub_command --state-dir "$1" --listen "$place" --min-replicas "$EDIT_MIN_REPLICAS"
    "${command[@]}" &
    hub=$!
    echo "$place" >"$hub_folder/address"
    while kill -0 "$hub" 2>/dev/null && [ -z "$stop_signal$(end_of "$1")" ]; do sleep 1; done
    [ -n "$stop_signal" ] || [ -z "$(end_of "$1")" ] || sleep "$HUB_LAST_SECONDS"
    kill "$hub" 2>/dev/null || true
    wait "$hub" || true
}

# ---- the job of a replica

# Starts torchrun, once on each node of the job, as a replica of the run. It starts the ranks again
# when they fail; this job is queued again when torchrun gives up.
launch_elastic_replica() {
    local nodes ranks cpus place=(--standalone)
    [ -n "${SLURM_ARRAY_TASK_ID:-}" ] || refuse "SLURM_ARRAY_TASK_ID (not set)" \
        "each task of a job array is a replica" "sbatch --array=0-1 $scripts/elastic.sbatch"
    wait_for_hub
    mapfile -t nodes < <(node_names 0)
    ranks=$(ranks_per_node 0)
    cpus=$(cpus_per_rank 0)
    [ -n "$stop_signal" ] || check_command $((${#nodes[@]} * ranks))
    [ -z "$stop_signal" ] || return 0
    ((${#nodes[@]} == 1)) || place=(--nnodes "${#nodes[@]}" --rdzv-backend c10d
        --rdzv-endpoint "$(address "${nodes[0]}"):$(port 1)" --rdzv-id "$SLURM_JOB_ID")
    srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 \
        --cpus-per-task=$((ranks * ${cpus:-1})) --kill-on-bad-exit=1 \
        "${container[@]}" "${srun_options[@]}" bash "$scripts/rank.sh" \
        env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE \
        "$EDIT_PYTHON" -m torch.distributed.run "${place[@]}" --nproc-per-node "$ranks" \
        --max-restarts "$EDIT_RANK_RESTARTS" --shutdown-timeout "$EDIT_SIGNAL_LEAD_SECONDS" \
        -m megatron_edit "$EDIT_SCRIPT" "${flags[@]}" &
    launches+=($!)
    launched=1
}

# Waits until a hub answers, and adds it to `flags`. The job ends if the run is over, and is queued
# again if there is no hub.
wait_for_hub() {
    local hub='' command
    for ((SECONDS = 0; SECONDS < HUB_WAIT_SECONDS; )); do
        [ -z "$stop_signal" ] || return 0
        use_hub_folder
        if [ -f "$hub_folder/ended" ]; then
            say "the run has ended"
            exit "$(<"$hub_folder/ended")"
        fi
        hub=${EDIT_HUB:-$(cat "$hub_folder/address" 2>/dev/null || true)}
        hub_command status "$hub"
        if [ -n "$hub" ] && "${command[@]}" >/dev/null 2>&1; then
            flags+=(--edit-hub "$hub" --edit-replica-name "$SLURM_ARRAY_TASK_ID")
            [ ${#token_options[@]} -eq 0 ] || flags+=(--edit-hub-token-file "$hub_folder/token")
            return 0
        fi
        sleep "$HUB_POLL_SECONDS"
    done
    code=1
    again_at_most "$EDIT_MAX_FAILURES" failures \
        "no hub answers at ${hub:-(no file $EDIT_DIR/hub/address)}"
}
