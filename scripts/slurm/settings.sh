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

# into_words ARRAY TEXT: splits all lines of a text into words. `read` never finds its delimiter, so
# it reads everything and fails.
into_words() { read -r -d '' -a "$1" <<<"$2" || true; }

SETTINGS=(EDIT_DIR EDIT_SCRIPT EDIT_MODEL_FLAGS_FILE EDIT_EDIT_FLAGS_FILE EDIT_A_EDIT_FLAGS_FILE
    EDIT_ELASTIC_FLAGS_FILE EDIT_EXTRA_FLAGS EDIT_SAVE_INTERVAL EDIT_PYTHON EDIT_CONTAINER
    EDIT_CONTAINER_MOUNTS EDIT_SRUN_OPTIONS EDIT_REPLICAS EDIT_PORT EDIT_HUB EDIT_MIN_REPLICAS
    EDIT_MAX_RESTARTS EDIT_MAX_FAILURES EDIT_RANK_RESTARTS
    EDIT_NODES EDIT_GPUS_PER_NODE EDIT_RANKS_PER_NODE EDIT_CPUS_PER_RANK EDIT_PARTITION
    EDIT_MIXED EDIT_TIME_LIMIT EDIT_SIGNAL_LEAD_SECONDS EDIT_SBATCH_OPTIONS)

# read_settings KIND: reads and checks the settings of the file and the environment.
read_settings() {
    EDIT_KIND=$1
    settings=${MEGATRON_EDIT_SETTINGS:-$scripts/settings.env}
    [ -f "$settings" ] || refuse "MEGATRON_EDIT_SETTINGS=$settings" "no such file" \
        "copy scripts/slurm/settings.env and name the copy"
    bash -n "$settings" 2>/dev/null || refuse "$settings" "is not valid shell" \
        "see what \`bash -n\` says about it"
    # shellcheck source=scripts/slurm/settings.env
    source "$settings"
    local name
    for name in $(compgen -v EDIT_); do
        [[ " EDIT_KIND EDIT_STATE EDIT_HUB_TOKEN ${SETTINGS[*]} " == *" $name "* ]] || refuse "$name=${!name}" \
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
    for name in EDIT_NODES EDIT_REPLICAS EDIT_RANKS_PER_NODE EDIT_SAVE_INTERVAL \
        EDIT_SIGNAL_LEAD_SECONDS EDIT_MAX_FAILURES EDIT_MIN_REPLICAS \
        ${EDIT_CPUS_PER_RANK:+EDIT_CPUS_PER_RANK}; do
        [[ ${!name} =~ ^[1-9][0-9]{0,8}$ ]] || refuse "$name=${!name}" \
            "must be a whole number >= 1" "change it in $settings"
    done
    for name in EDIT_GPUS_PER_NODE EDIT_MAX_RESTARTS EDIT_RANK_RESTARTS EDIT_PORT; do
        [[ ${!name} =~ ^(0|[1-9][0-9]{0,8})$ ]] || refuse "$name=${!name}" \
            "must be a whole number >= 0" "change it in $settings"
    done
    ((EDIT_PORT == 0 || (EDIT_PORT >= 1024 && EDIT_PORT <= 65535 - PORTS_PER_JOB))) || refuse \
        "EDIT_PORT=$EDIT_PORT" "must be 0, or the first of $PORTS_PER_JOB ports above 1023" \
        "change it in $settings"
    for name in EDIT_SCRIPT EDIT_MODEL_FLAGS_FILE EDIT_EDIT_FLAGS_FILE EDIT_A_EDIT_FLAGS_FILE \
        EDIT_ELASTIC_FLAGS_FILE; do
        # A script may be in the image: `megatron-edit check`, which runs there, will look for it.
        [ "$name" != EDIT_SCRIPT ] || [ -z "$EDIT_CONTAINER" ] || continue
        [ -f "${!name}" ] || refuse "$name=${!name}" "no such file" "change it in $settings"
    done
    [ -n "$EDIT_DIR" ] || refuse "EDIT_DIR (empty)" "must name a folder" "change it in $settings"
    if [ -z "$EDIT_CONTAINER" ] && ! command -v "$EDIT_PYTHON" >/dev/null; then
        refuse "EDIT_PYTHON=$EDIT_PYTHON" "no such program" \
            "make the environment with scripts/setup.sh, or name another interpreter in $settings"
    fi
}
