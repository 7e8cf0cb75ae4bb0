#!/usr/bin/env bash
# Submits a batch script of this folder with the nodes and limits of settings.env.
#
#   scripts/slurm/submit.sh ddp|edit|edit_per_replica|a_edit_mixed|elastic|hub [sbatch options]
#
# Settings: settings.env, or the file that MEGATRON_EDIT_SETTINGS names; manual: docs/slurm.md.
set -euo pipefail

case ${1:-} in -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;; esac
# shellcheck source=scripts/slurm/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
kind=${1:-}
[[ -n $kind && -f $scripts/$kind.sbatch ]] || refuse "${kind:-KIND (not given)}" \
    "no such batch script" "give ddp, edit, edit_per_replica, a_edit_mixed, elastic or hub"
shift
read_settings "$kind"
more=()
into_words more "$EDIT_SBATCH_OPTIONS"

# set_cpus PARTITION: sets `cpus` of a rank: as set, or those of a node divided by its GPUs, of the
# node with the fewest among those with enough GPUs. Other jobs may use the rest of a node.
set_cpus() {
    cpus=${EDIT_CPUS_PER_RANK:-1}
    if [ -n "$EDIT_CPUS_PER_RANK" ] || ((EDIT_GPUS_PER_NODE == 0)); then return; fi
    cpus=$(sinfo --noheader --Node --format="%c %G" ${1:+--partition="$1"} |
        awk -v needed="$EDIT_GPUS_PER_NODE" '{
            gpus = 0 # from gpu:8, or gpu:a100:8(S:0-1),nvme:1
            n = split($2, resources, ",")
            for (i = 1; i <= n; i++) if (resources[i] ~ /^gpu/) {
                sub(/[(].*/, "", resources[i])
                gpus += substr(resources[i], match(resources[i], /[0-9]+$/))
            }
            each = gpus ? int($1 / gpus) : 0
            if (gpus >= needed && each && (!least || each < least)) least = each
        } END { print least + 0 }') || cpus=0
    ((cpus)) || refuse "EDIT_CPUS_PER_RANK (empty)" \
        "sinfo names no node with $EDIT_GPUS_PER_NODE GPUs and their CPUs" "give a number in $settings"
    say "$cpus CPUs per rank: those of a node divided by its GPUs (EDIT_CPUS_PER_RANK)"
}

# component COUNT PARTITION EXTRA...: adds the options of one component to `options`.
options=()
component() {
    local count=$1 partition=$2 ranks=$EDIT_RANKS_PER_NODE cpus
    shift 2
    ((EDIT_GPUS_PER_NODE == 0)) || ranks=$EDIT_GPUS_PER_NODE
    set_cpus "$partition"
    [ ${#options[@]} -eq 0 ] || options+=(:)
    options+=(--nodes="$count" --ntasks-per-node="$ranks" --cpus-per-task="$cpus")
    ((EDIT_GPUS_PER_NODE == 0)) || options+=(--gpus-per-node="$EDIT_GPUS_PER_NODE")
    [ -z "$partition" ] || options+=(--partition="$partition")
    [ -z "$EDIT_TIME_LIMIT" ] || options+=(--time="$EDIT_TIME_LIMIT")
    options+=(--signal="B:USR1@$EDIT_SIGNAL_LEAD_SECONDS" "${more[@]}" "$@")
}

case $kind in
    edit_per_replica | elastic)
        ((EDIT_NODES % EDIT_REPLICAS == 0)) || refuse "EDIT_REPLICAS=$EDIT_REPLICAS" \
            "must divide EDIT_NODES=$EDIT_NODES" "change one of them in $settings"
        ;;&
    elastic)
        component $((EDIT_NODES / EDIT_REPLICAS)) "$EDIT_PARTITION" \
            --array="0-$((EDIT_REPLICAS - 1))" "$@"
        ;;
    hub)
        [ -z "$EDIT_TIME_LIMIT" ] || options=(--time="$EDIT_TIME_LIMIT")
        options+=(--nodes=1 --ntasks=1 "${more[@]}" "$@")
        ;;
    edit_per_replica)
        for ((i = 0; i < EDIT_REPLICAS; i++)); do
            component $((EDIT_NODES / EDIT_REPLICAS)) "$EDIT_PARTITION" "$@"
        done
        ;;
    a_edit_mixed)
        parts=()
        into_words parts "$EDIT_MIXED"
        ((${#parts[@]})) || refuse "EDIT_MIXED (empty)" "must be partition:nodes ..." \
            "change it in $settings"
        for part in "${parts[@]}"; do
            [[ $part =~ ^[^:]+:[1-9][0-9]*$ ]] || refuse "EDIT_MIXED=${parts[*]}" \
                "must be partition:nodes ..." "change it in $settings"
            component "${part##*:}" "${part%:*}" "$@"
        done
        ;;
    *) component "$EDIT_NODES" "$EDIT_PARTITION" "$@" ;;
esac
exec sbatch "${options[@]}" "$scripts/$kind.sbatch"
