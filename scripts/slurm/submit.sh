#!/usr/bin/env bash
# Submits a batch script of this folder with what settings.env says about nodes and limits.
#
#   scripts/slurm/submit.sh ddp|edit|edit_per_replica|a_edit_mixed [sbatch options]
set -euo pipefail

# shellcheck source=scripts/slurm/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"
kind=${1:-}
[[ -n $kind && -f $scripts/$kind.sbatch ]] || refuse "${kind:-KIND (not given)}" \
    "no such batch script" "give ddp, edit, edit_per_replica or a_edit_mixed"
shift
read_settings "$kind"
read -ra more <<<"$RUN_SBATCH_OPTIONS"

# component COUNT PARTITION EXTRA...: adds what one component asks for to `asks`.
asks=()
component() {
    local count=$1 partition=$2 ranks=$RUN_RANKS_PER_NODE
    shift 2
    ((RUN_GPUS_PER_NODE == 0)) || ranks=$RUN_GPUS_PER_NODE
    [ ${#asks[@]} -eq 0 ] || asks+=(:)
    asks+=(--nodes="$count" --ntasks-per-node="$ranks" --cpus-per-task="$RUN_CPUS_PER_RANK")
    ((RUN_GPUS_PER_NODE == 0)) || asks+=(--gpus-per-node="$RUN_GPUS_PER_NODE")
    [ -z "$partition" ] || asks+=(--partition="$partition")
    [ -z "$RUN_TIME_LIMIT" ] || asks+=(--time="$RUN_TIME_LIMIT")
    asks+=(--signal="B:USR1@$RUN_SIGNAL_LEAD_SECONDS" "${more[@]}" "$@")
}

case $kind in
    edit_per_replica)
        ((RUN_NODES % RUN_REPLICAS == 0)) || refuse "RUN_REPLICAS=$RUN_REPLICAS" \
            "must divide RUN_NODES=$RUN_NODES" "change one of them in $settings"
        for ((i = 0; i < RUN_REPLICAS; i++)); do
            component $((RUN_NODES / RUN_REPLICAS)) "$RUN_PARTITION" "$@"
        done
        ;;
    a_edit_mixed)
        read -ra parts <<<"$RUN_MIXED"
        ((${#parts[@]})) || refuse "RUN_MIXED (empty)" "must be partition:nodes ..." \
            "change it in $settings"
        for part in "${parts[@]}"; do
            [[ $part =~ ^[^:]+:[1-9][0-9]*$ ]] || refuse "RUN_MIXED=$RUN_MIXED" \
                "must be partition:nodes ..." "change it in $settings"
            component "${part##*:}" "${part%:*}" "$@"
        done
        ;;
    *) component "$RUN_NODES" "$RUN_PARTITION" "$@" ;;
esac
exec sbatch "${asks[@]}" "$scripts/$kind.sbatch"
