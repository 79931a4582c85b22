#!/usr/bin/env bash
# A Ray cluster for placement=ray: one line per machine, then training on the first (or any other) of them.
#
#   node0$ bash scripts/launch/ray.sh head                     # stays in the foreground; Ctrl-C ends it
#   node1$ bash scripts/launch/ray.sh join node0:6379          # likewise, on every further machine
#   node0$ python train.py '+tenants=[libero,maniskill]' placement=ray placement.ray.address=node0:6379
#
# Every machine needs this checkout, its environment and the data of simulators and backbone under the same paths;
# relative ones start at the checkout. Simulators see the environment (MUJOCO_GL ...) of the shell that starts Ray.
# CPUS, GPUS: what the machine offers, by default all it has; on the machine that trains keep some for the training.
# Further arguments go to `ray start`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
offer=()
[ -z "${CPUS:-}" ] || offer+=("--num-cpus=$CPUS")
[ -z "${GPUS:-}" ] || offer+=("--num-gpus=$GPUS")
case "${1:-}" in
    head) place=(--head "--port=${PORT:-6379}" --include-dashboard=false) && shift ;;
    join) place=("--address=${2:?host:port of the head}") && shift 2 ;;
    *) sed -n '2,12p' "${BASH_SOURCE[0]}" && exit 2 ;;
esac
exec "${RAY:-.venv/bin/ray}" start "${place[@]}" "${offer[@]}" --disable-usage-stats --block "$@"
