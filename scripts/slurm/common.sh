# shellcheck shell=bash
# Functions shared by the batch scripts of this folder. Sourced, never run; see docs/slurm.md.
#
# A batch script calls `prepare KIND`, starts its launches (`launch_all_nodes`, `launch_each_replica`
# or, in elastic.sh, `launch_elastic_replica`), and ends with `finish`.

# shellcheck source=scripts/slurm/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
FAILURE_GRACE_SECONDS=60 # for the other launches to end after one has failed
MAX_STOPS=10             # stops without a newer checkpoint, as with a too short time limit
MAX_QUERIES=12           # attempts to reach SLURM, for example while its controller restarts
QUERY_SECONDS=5          # between two attempts

launches=()     # process ids of srun
launched=0      # number of launches
stop_signal=''  # the signal that requested this job to stop
srun_options=() # words of EDIT_SRUN_OPTIONS

# ---- the SLURM job

# of_component NAME I: value of SLURM's variable for component I of a heterogeneous job.
of_component() {
    local name=$1
    [ -z "${SLURM_HET_SIZE:-}" ] || name=$1_HET_GROUP_$2
    echo "${!name:-}"
}

num_components() { echo "${SLURM_HET_SIZE:-1}"; }

# ranks_per_node I: tasks of component I on each of its nodes.
ranks_per_node() {
    echo $(($(of_component SLURM_NTASKS "$1") / $(of_component SLURM_JOB_NUM_NODES "$1")))
}

# cpus_per_rank I: CPUs of each task of component I: as requested, or else what was granted on the
# node with the fewest (SLURM writes 64(x2),48), divided by its tasks. Empty if SLURM says neither.
cpus_per_rank() {
    local cpus granted
    cpus=$(of_component SLURM_CPUS_PER_TASK "$1")
    granted=$(of_component SLURM_JOB_CPUS_PER_NODE "$1" | tr , '\n' | sort -n | sed -n '1{s/(.*//;p}')
    [ -n "$cpus" ] || [ -z "$granted" ] || cpus=$((granted / $(ranks_per_node "$1")))
    echo "$cpus"
}

# port OFFSET: a port of this job. Jobs that share a node almost always have different ports.
port() {
    local base=$EDIT_PORT
    ((base)) || base=$((10000 + SLURM_JOB_ID % 300 * PORTS_PER_JOB))
    echo $((base + $1))
}

# address NODE: its network address.
address() { scontrol show node "$1" --oneliner | sed 's/.* NodeAddr=\([^ ]*\).*/\1/'; }

# words FILE: its words without comments, one per line.
words() { grep -v '^#' "$1" | grep -o '[^[:space:]]*'; }

prepare() {
    [ -n "${SLURM_JOB_ID:-}" ] || refuse "SLURM_JOB_ID (not set)" "this is a job of SLURM" \
        "sbatch scripts/slurm/$1.sbatch"
    read_settings "$1"
    EDIT_DIR=$(realpath -m "$EDIT_DIR") # ranks in a container may start in another folder
    restarts=${SLURM_RESTART_COUNT:-0}
    # A task of an array by its own name: one of them has the number of the whole array.
    job=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    export EDIT_STATE=$EDIT_DIR/slurm/$SLURM_JOB_ID.$restarts
    mkdir -p "$EDIT_STATE"
    rm -f "$EDIT_STATE"/*
    container=()
    [ -z "$EDIT_CONTAINER" ] || container=(
        --container-image="$EDIT_CONTAINER" --container-workdir="$PWD")
    [ -z "$EDIT_CONTAINER_MOUNTS" ] || container+=(--container-mounts="$EDIT_CONTAINER_MOUNTS")
    into_words srun_options "$EDIT_SRUN_OPTIONS"
    gather_flags "$1"
    trap 'on_signal USR1' USR1
    trap 'on_signal TERM' TERM
    say "job $job ($1), start $((restarts + 1))"
}

# gather_flags KIND: sets `flags` of every launch; later flags override earlier ones.
gather_flags() {
    local file replicas=(--edit-num-replicas "$EDIT_REPLICAS") more
    mapfile -t flags < <(words "$EDIT_MODEL_FLAGS_FILE")
    case $1 in
        ddp) file='' ;;
        a_edit_*) file=$EDIT_A_EDIT_FLAGS_FILE ;;
        elastic)
            file=$EDIT_ELASTIC_FLAGS_FILE
            replicas=(--edit-nominal-replicas "$EDIT_REPLICAS"
                --edit-min-replicas "$EDIT_MIN_REPLICAS")
            ;;
        *) file=$EDIT_EDIT_FLAGS_FILE ;;
    esac
    if [ -n "$file" ]; then
        mapfile -t more < <(words "$file")
        flags+=("${more[@]}" "${replicas[@]}" --edit-log-dir "$EDIT_DIR/log")
    fi
    flags+=(--save "$EDIT_DIR/checkpoints" --load "$EDIT_DIR/checkpoints"
        --save-interval "$EDIT_SAVE_INTERVAL" --exit-signal-handler)
    into_words more "$EDIT_EXTRA_FLAGS"
    flags+=("${more[@]}")
    : "${CUDA_DEVICE_MAX_CONNECTIONS:=$(hardware_queues "${flags[@]}")}"
    export CUDA_DEVICE_MAX_CONNECTIONS
}

# hardware_queues FLAG...: the largest number that Megatron allows with these flags.
hardware_queues() {
    local given word name='' tensor=1 context=1
    for given in "${@//=/ }"; do
        for word in $given; do
            case $name in
                --tensor-model-parallel-size) tensor=$word ;;
                --context-parallel-size) context=$word ;;
            esac
            name=$word
        done
    done
    if [ "$tensor" = 1 ] && [ "$context" = 1 ]; then echo 32; else echo 1; fi
}

# check_command RANKS FLAG...: runs `megatron-edit check` for a launch of so many ranks.
check_command() {
    local ranks=$1
    shift
    local command=("$EDIT_PYTHON" -m megatron_edit check "$EDIT_SCRIPT" "${flags[@]}" "$@"
        --world-size "$ranks")
    if [ -n "$EDIT_CONTAINER" ]; then
        command=(srun --nodes=1 --ntasks=1 "${container[@]}" "${srun_options[@]}" "${command[@]}")
    fi
    local code=0
    "${command[@]}" || code=$?
    [ "$code" -eq 0 ] || [ -n "$stop_signal" ] || exit "$code"
}

# ---- launches

# launch COMPONENT PORT NODELIST FLAG...: starts ranks on these nodes (comma-separated), in a world
# of their own, in the background.
launch() {
    local component=$1 nodelist=$3 nodes ranks cpus
    local MASTER_PORT=$2 MASTER_ADDR
    shift 3
    IFS=, read -ra nodes <<<"$nodelist"
    ranks=$(ranks_per_node "$component")
    cpus=$(cpus_per_rank "$component")
    MASTER_ADDR=$(address "${nodes[0]}")
    export MASTER_ADDR MASTER_PORT
    srun ${SLURM_HET_SIZE:+--het-group="$component"} --nodes="${#nodes[@]}" --nodelist="$nodelist" \
        --ntasks=$((ranks * ${#nodes[@]})) --ntasks-per-node="$ranks" \
        ${cpus:+--cpus-per-task="$cpus"} --kill-on-bad-exit=1 "${container[@]}" "${srun_options[@]}" \
        bash "$scripts/rank.sh" "$EDIT_PYTHON" -m megatron_edit "$EDIT_SCRIPT" "${flags[@]}" "$@" &
    launches+=($!)
    launched=$((launched + 1))
}

# node_names COMPONENT: names of its nodes, one per line.
node_names() { scontrol show hostnames "$(of_component SLURM_JOB_NODELIST "$1")"; }

launch_all_nodes() {
    local nodes
    mapfile -t nodes < <(node_names 0)
    check_command $((${#nodes[@]} * $(ranks_per_node 0)))
    [ -n "$stop_signal" ] || launch 0 "$(port 0)" "$(IFS=, && echo "${nodes[*]}")"
}

# All components must have the same ranks per node, as all replicas must have the same ranks.
launch_each_replica() {
    local i total=0 each ranks
    for ((i = 0; i < $(num_components); i++)); do
        ((total += $(of_component SLURM_JOB_NUM_NODES "$i"))) || true
    done
    each=$((total / EDIT_REPLICAS))
    ((each * EDIT_REPLICAS == total)) || refuse "EDIT_REPLICAS=$EDIT_REPLICAS" \
        "must divide the $total nodes of the job" "change it in $settings"
    ranks=$(ranks_per_node 0)
    for ((i = 0; i < $(num_components); i++)); do
        (($(of_component SLURM_JOB_NUM_NODES "$i") % each == 0)) || refuse \
            "EDIT_REPLICAS=$EDIT_REPLICAS" \
            "each component must have a multiple of $each nodes ($total in all)" \
            "give component $i other nodes, or change EDIT_REPLICAS in $settings"
        (($(ranks_per_node "$i") == ranks)) || refuse \
            "component $i: $(ranks_per_node "$i") ranks a node" \
            "must be $ranks as in component 0" "give all the same --ntasks-per-node"
    done
    ((EDIT_REPLICAS < PORTS_PER_JOB)) || refuse "EDIT_REPLICAS=$EDIT_REPLICAS" \
        "a job has $PORTS_PER_JOB ports" "use a single launch (edit.sbatch)"
    say "$EDIT_REPLICAS replicas of $each nodes, partitions$(
        for ((i = 0; i < $(num_components); i++)); do
            echo -n " $(of_component SLURM_JOB_PARTITION "$i")"
        done)"
    start_replicas "$each" $((each * ranks))
}

# start_replicas NODES RANKS: starts one launch per replica, each of this size.
start_replicas() {
    local each=$1 replica=0 i k nodes rendezvous
    mapfile -t nodes < <(node_names 0)
    rendezvous=$(address "${nodes[0]}"):$(port 0)
    check_command "$2" --edit-replica-id 0 --edit-rendezvous "$rendezvous"
    [ -z "$stop_signal" ] || return 0
    for ((i = 0; i < $(num_components); i++)); do
        mapfile -t nodes < <(node_names "$i")
        for ((k = 0; k < ${#nodes[@]}; k += each)); do
            launch "$i" "$(port $((1 + replica)))" "$(IFS=, && echo "${nodes[*]:k:each}")" \
                --edit-replica-id "$replica" --edit-rendezvous "$rendezvous"
            ((replica += 1))
        done
    done
}

# ---- the end

on_signal() {
    [ -n "$stop_signal" ] || say "$1: asked to stop"
    stop_signal=$1
}

# Signals the ranks until one has received it: a step that is just starting misses signals.
pass_on() {
    if [ -n "$stop_signal" ] && [ ! -f "$EDIT_STATE/stopped" ]; then
        scancel --signal=USR1 "$job" || true
    fi
}

# fail_with CODE: records the exit code of a failed launch; the first one counts.
fail_with() {
    ((code)) || code=$1
    failed_at=${failed_at:-$SECONDS}
}

# Waits for all launches; `code` is the first exit code that is not 0.
wait_for_launches() {
    local failed_at='' pid running
    code=0
    while [ ${#launches[@]} -gt 0 ]; do
        pass_on
        running=()
        for pid in "${launches[@]}"; do
            if kill -0 "$pid" 2>/dev/null; then
                running+=("$pid")
            else
                wait "$pid" || fail_with $?
            fi
        done
        launches=("${running[@]}")
        [ ! -f "$EDIT_STATE/failed" ] || failed_at=${failed_at:-$SECONDS}
        if [ -n "$failed_at" ] && ((SECONDS > failed_at + FAILURE_GRACE_SECONDS)); then
            return 0 # SLURM ends the other launches together with the job
        fi
        [ ${#launches[@]} -eq 0 ] || sleep 1 # traps run after it
    done
}

# Ends the job: done (0), stopped (queue again), or failed (queue again if that may help).
finish() {
    wait_for_launches
    [ "$launched" -gt 0 ] || : >"$EDIT_STATE/stopped" # before any rank started
    [ ! -f "$EDIT_STATE/failed" ] || code=$(<"$EDIT_STATE/failed")
    case $code in
        2 | 3)
            say "exit code $code: not queued again, it would fail the same way"
            exit "$code"
            ;;
    esac
    # After a failure the other ranks have received a signal to stop, too.
    if [ -f "$EDIT_STATE/stopped" ] && [[ -n $stop_signal || ! -f $EDIT_STATE/failed ]]; then
        again_at_most "$MAX_STOPS" stops "${stop_signal:-TERM to the ranks}: the run was stopped"
    fi
    [ "$code" -ne 0 ] || exit 0
    again_at_most "$EDIT_MAX_FAILURES" failures "exit code $code"
}

# again_at_most LIMIT NAME WHY: queues again, unless LIMIT starts in a row have ended for this reason
# without a newer checkpoint. Ends this script in both cases.
again_at_most() {
    local note=$EDIT_DIR/slurm/$SLURM_JOB_ID.$2 newest before='' count=0
    newest=$(cat "$EDIT_DIR/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo none)
    [ ! -f "$note" ] || read -r before count <"$note"
    [ "$before" = "$newest" ] || count=0
    count=$((count + 1))
    echo "$newest $count" >"$note"
    ((count < $1)) || {
        say "$3, $count times without a checkpoint newer than $newest; given up"
        exit $((code ? code : 1))
    }
    requeue "$3"
}

# job_state: SLURM's state of this job. Fails where SLURM does not answer for a while.
job_state() {
    local state i
    for ((i = 0; i < MAX_QUERIES; i++)); do
        ((i == 0)) || sleep "$QUERY_SECONDS"
        if state=$(squeue --noheader --jobs="$job" --format=%T | sed -n 1p); then
            echo "${state:-gone}"
            return 0
        fi
    done
    return 1
}

# requeue WHY: queues the job again; SLURM then ends this script. SLURM would also requeue a
# cancelled job, so the job is requeued only where its state is known to be running.
requeue() {
    local state
    state=$(job_state) || {
        say "$1; not queued again, SLURM does not answer; submit it once more by hand, it goes on"
        exit 1
    }
    [ "$state" = RUNNING ] || {
        say "$1; not queued again, the job is $state"
        exit 1
    }
    ((restarts < EDIT_MAX_RESTARTS)) || {
        say "$1; not queued again after $restarts restarts (EDIT_MAX_RESTARTS)"
        exit 1
    }
    say "$1; queued again"
    trap '' USR1 TERM
    scontrol requeue "$job" || {
        say "SLURM refuses to queue it again; submit it once more by hand, it goes on"
        exit 1
    }
    sleep 60
    exit 0
}
