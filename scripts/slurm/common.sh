# shellcheck shell=bash
# What the scripts of this folder share. Sourced, never run; docs/slurm.md tells the story.
#
# A batch script calls `prepare KIND`, says which launches there are (`launch_all_nodes` or
# `launch_each_replica`), and ends with `finish`.

# shellcheck source=scripts/slurm/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
LAST_WORDS_SECONDS=60 # for the other launches to notice that one has failed
STOPS_IN_VAIN=10      # a time limit may be shorter than the signal's lead
QUESTIONS=12          # to a SLURM that does not answer, while its controller restarts, say
QUESTION_SECONDS=5    # between two of them

launches=()     # process ids of srun
launched=0      # how many there were
asked=''        # the signal that asked this job to stop
srun_options=() # words of EDIT_SRUN_OPTIONS

# ---- the job that SLURM has given us

# of_component NAME I: what SLURM's variable says about component I of a heterogeneous job.
of_component() {
    local name=$1
    [ -z "${SLURM_HET_SIZE:-}" ] || name=$1_HET_GROUP_$2
    echo "${!name:-}"
}

num_components() { echo "${SLURM_HET_SIZE:-1}"; }

# ranks_per_node I: tasks that component I was given on each of its nodes.
ranks_per_node() {
    echo $(($(of_component SLURM_NTASKS "$1") / $(of_component SLURM_JOB_NUM_NODES "$1")))
}

# port OFFSET: one of this job's. Jobs that share a node get different ones, almost always.
port() {
    local base=$EDIT_PORT
    ((base)) || base=$((10000 + SLURM_JOB_ID % 300 * PORTS_PER_JOB))
    echo $((base + $1))
}

# address NODE: where other nodes reach it.
address() { scontrol show node "$1" --oneliner | sed 's/.* NodeAddr=\([^ ]*\).*/\1/'; }

# words FILE: its words but for comments, one a line.
words() { grep -v '^#' "$1" | grep -o '[^[:space:]]*'; }

prepare() {
    [ -n "${SLURM_JOB_ID:-}" ] || refuse "SLURM_JOB_ID (not set)" "this is a job of SLURM" \
        "sbatch scripts/slurm/$1.sbatch"
    read_settings "$1"
    EDIT_DIR=$(realpath -m "$EDIT_DIR") # ranks in a container may start in another folder
    restarts=${SLURM_RESTART_COUNT:-0}
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
    say "job $SLURM_JOB_ID ($1), start $((restarts + 1))"
}

# gather_flags KIND: `flags` of every launch; what comes later on a command line wins.
gather_flags() {
    local file more
    mapfile -t flags < <(words "$EDIT_MODEL_FLAGS_FILE")
    case $1 in
        ddp) file='' ;;
        a_edit_*) file=$EDIT_A_EDIT_FLAGS_FILE ;;
        *) file=$EDIT_EDIT_FLAGS_FILE ;;
    esac
    if [ -n "$file" ]; then
        mapfile -t more < <(words "$file")
        flags+=("${more[@]}" --edit-num-replicas "$EDIT_REPLICAS" --edit-log-dir "$EDIT_DIR/log")
    fi
    flags+=(--save "$EDIT_DIR/checkpoints" --load "$EDIT_DIR/checkpoints"
        --save-interval "$EDIT_SAVE_INTERVAL" --exit-signal-handler)
    into_words more "$EDIT_EXTRA_FLAGS"
    flags+=("${more[@]}")
    : "${CUDA_DEVICE_MAX_CONNECTIONS:=$(hardware_queues "${flags[@]}")}"
    export CUDA_DEVICE_MAX_CONNECTIONS
}

# hardware_queues FLAG...: as many as Megatron allows with these flags.
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

# check_command RANKS FLAG...: what a launch of so many ranks would say, before any of them starts.
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
    [ "$code" -eq 0 ] || [ -n "$asked" ] || exit "$code"
}

# ---- launches

# launch COMPONENT PORT NODELIST FLAG...: ranks on these nodes (comma-separated), a world of their
# own, in the background.
launch() {
    local component=$1 nodelist=$3 nodes ranks cpus
    local MASTER_PORT=$2 MASTER_ADDR
    shift 3
    IFS=, read -ra nodes <<<"$nodelist"
    ranks=$(ranks_per_node "$component")
    cpus=$(of_component SLURM_CPUS_PER_TASK "$component")
    MASTER_ADDR=$(address "${nodes[0]}")
    export MASTER_ADDR MASTER_PORT
    srun ${SLURM_HET_SIZE:+--het-group="$component"} --nodes="${#nodes[@]}" --nodelist="$nodelist" \
        --ntasks=$((ranks * ${#nodes[@]})) --ntasks-per-node="$ranks" \
        ${cpus:+--cpus-per-task="$cpus"} --kill-on-bad-exit=1 "${container[@]}" "${srun_options[@]}" \
        bash "$scripts/rank.sh" "$EDIT_PYTHON" -m megatron_edit "$EDIT_SCRIPT" "${flags[@]}" "$@" &
    launches+=($!)
    launched=$((launched + 1))
}

# expanded COMPONENT: names of its nodes, one a line.
expanded() { scontrol show hostnames "$(of_component SLURM_JOB_NODELIST "$1")"; }

launch_all_nodes() {
    local nodes
    mapfile -t nodes < <(expanded 0)
    check_command $((${#nodes[@]} * $(ranks_per_node 0)))
    [ -n "$asked" ] || launch 0 "$(port 0)" "$(IFS=, && echo "${nodes[*]}")"
}

# All components must be made alike, because all replicas must have the same ranks.
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

# start_replicas NODES RANKS: as many launches as there are replicas, each of these sizes.
start_replicas() {
    local each=$1 replica=0 i k nodes rendezvous
    mapfile -t nodes < <(expanded 0)
    rendezvous=$(address "${nodes[0]}"):$(port 0)
    check_command "$2" --edit-replica-id 0 --edit-rendezvous "$rendezvous"
    [ -z "$asked" ] || return 0
    for ((i = 0; i < $(num_components); i++)); do
        mapfile -t nodes < <(expanded "$i")
        for ((k = 0; k < ${#nodes[@]}; k += each)); do
            launch "$i" "$(port $((1 + replica)))" "$(IFS=, && echo "${nodes[*]:k:each}")" \
                --edit-replica-id "$replica" --edit-rendezvous "$rendezvous"
            ((replica += 1))
        done
    done
}

# ---- the end

on_signal() {
    [ -n "$asked" ] || say "$1: asked to stop"
    asked=$1
}

# Tells the ranks, until one has noted it: a step that is just starting misses a signal.
pass_on() {
    if [ -n "$asked" ] && [ ! -f "$EDIT_STATE/stopped" ]; then
        scancel --signal=USR1 "$SLURM_JOB_ID" || true
    fi
}

# fail_with CODE: a launch has ended like this; the first one counts.
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
        if [ -n "$failed_at" ] && ((SECONDS > failed_at + LAST_WORDS_SECONDS)); then
            return 0 # SLURM ends what is left together with the job
        fi
        [ ${#launches[@]} -eq 0 ] || sleep 1 # a trap waits for it
    done
}

# Training is over (0), was stopped (queue again), or has failed (queue again if it may help).
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
    # Ranks that are ended because another one failed have been told to stop, too.
    if [ -f "$EDIT_STATE/stopped" ] && [[ -n $asked || ! -f $EDIT_STATE/failed ]]; then
        again_at_most "$STOPS_IN_VAIN" stops "${asked:-TERM to the ranks}: the run was stopped"
    fi
    [ "$code" -ne 0 ] || exit 0
    again_at_most "$EDIT_MAX_FAILURES" failures "exit code $code"
}

# again_at_most LIMIT NAME WHY: queues again, unless this is the start number LIMIT in a row that
# ends like this without a newer checkpoint. Ends this script either way.
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

# job_state: what SLURM calls the state of this job. Fails where it does not answer for a while.
job_state() {
    local state i
    for ((i = 0; i < QUESTIONS; i++)); do
        ((i == 0)) || sleep "$QUESTION_SECONDS"
        if state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T | sed -n 1p); then
            echo "${state:-gone}"
            return 0
        fi
    done
    return 1
}

# requeue WHY: SLURM then ends this script. A job that was cancelled stays cancelled: SLURM itself
# would queue it again, so without knowing the state nothing is asked of it.
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
    scontrol requeue "$SLURM_JOB_ID" || {
        say "SLURM refuses to queue it again; submit it once more by hand, it goes on"
        exit 1
    }
    sleep 60
    exit 0
}
