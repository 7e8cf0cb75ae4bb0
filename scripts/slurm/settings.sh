# shellcheck shell=bash
# Reads and checks settings.env. Sourced by common.sh and submit.sh, never run.

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
REPOSITORY=$(cd "$scripts/../.." && pwd)
PORTS_PER_JOB=64

say() { echo "slurm: $*" >&2; }

# refuse VALUE RULE REMEDY
refuse() {
    say "$1: $2; $3"
    exit 2
}

SETTINGS=(RUN_DIR RUN_SCRIPT RUN_FLAGS_FILE RUN_EDIT_FLAGS_FILE RUN_A_EDIT_FLAGS_FILE RUN_EXTRA_FLAGS
    RUN_SAVE_INTERVAL RUN_PYTHON RUN_CONTAINER RUN_CONTAINER_MOUNTS RUN_SRUN_OPTIONS RUN_REPLICAS
    RUN_PORT RUN_MAX_RESTARTS RUN_MAX_FAILURES RUN_NODES RUN_GPUS_PER_NODE RUN_RANKS_PER_NODE
    RUN_CPUS_PER_RANK RUN_PARTITION RUN_MIXED RUN_TIME_LIMIT RUN_SIGNAL_LEAD_SECONDS
    RUN_SBATCH_OPTIONS)

# read_settings KIND: from the file and the environment, checked.
read_settings() {
    RUN_KIND=$1
    settings=${MEGATRON_EDIT_SETTINGS:-$scripts/settings.env}
    [ -f "$settings" ] || refuse "MEGATRON_EDIT_SETTINGS=$settings" "no such file" \
        "copy scripts/slurm/settings.env and name the copy"
    bash -n "$settings" 2>/dev/null || refuse "$settings" "is not valid shell" \
        "see what \`bash -n\` says about it"
    # shellcheck source=scripts/slurm/settings.env
    source "$settings"
    local name
    for name in $(compgen -v RUN_); do
        [[ " RUN_KIND RUN_STATE ${SETTINGS[*]} " == *" $name "* ]] || refuse "$name=${!name}" \
            "no such setting" "look for its name in $scripts/settings.env"
    done
    for name in "${SETTINGS[@]}"; do
        [ -n "${!name+set}" ] || refuse "$name (not set)" "every setting must have a value" \
            "copy its line from $scripts/settings.env to $settings"
    done
    check_settings
}

check_settings() {
    local name
    for name in RUN_NODES RUN_REPLICAS RUN_RANKS_PER_NODE RUN_CPUS_PER_RANK RUN_SAVE_INTERVAL \
        RUN_SIGNAL_LEAD_SECONDS RUN_MAX_FAILURES; do
        [[ ${!name} =~ ^[1-9][0-9]{0,8}$ ]] || refuse "$name=${!name}" \
            "must be a whole number >= 1" "change it in $settings"
    done
    for name in RUN_GPUS_PER_NODE RUN_MAX_RESTARTS RUN_PORT; do
        [[ ${!name} =~ ^(0|[1-9][0-9]{0,8})$ ]] || refuse "$name=${!name}" \
            "must be a whole number >= 0" "change it in $settings"
    done
    ((RUN_PORT == 0 || (RUN_PORT >= 1024 && RUN_PORT <= 65535 - PORTS_PER_JOB))) || refuse \
        "RUN_PORT=$RUN_PORT" "must be 0, or the first of $PORTS_PER_JOB ports above 1023" \
        "change it in $settings"
    for name in RUN_SCRIPT RUN_FLAGS_FILE RUN_EDIT_FLAGS_FILE RUN_A_EDIT_FLAGS_FILE; do
        [ -f "${!name}" ] || refuse "$name=${!name}" "no such file" "change it in $settings"
    done
    [ -n "$RUN_DIR" ] || refuse "RUN_DIR (empty)" "must name a folder" "change it in $settings"
    if [ -z "$RUN_CONTAINER" ] && ! command -v "$RUN_PYTHON" >/dev/null; then
        refuse "RUN_PYTHON=$RUN_PYTHON" "no such program" \
            "make the environment with scripts/setup.sh, or name another interpreter in $settings"
    fi
}
