#!/usr/bin/env bash
# One run on several machines without a scheduler: the same line on every machine.
#
#   RUN_ID=big ENDPOINT=node0:29400 NODES=2 RANKS=8 bash scripts/launch/torchrun.sh '+tenants=[libero,maniskill]' placement=fsdp2
#
# RUN_ID names the run folder on all ranks; output_dir and data_dir must lie on a file system that all machines see.
# RANKS per machine: one per GPU. ENDPOINT: any one of the machines, a free port. A rank that dies ends all of them and
# torchrun starts them again, at most RESTARTS times; the run goes on from its last checkpoint.
# A run that ends with a tenant in quarantine ends with 0 here: torchrun would start it again for any other code.
# On SIGTERM torchrun gives its ranks 30 s (its own limit) to finish a job and save; slurm.sbatch gives them more.
set -euo pipefail
# The ranks' addresses must not outlive them, or ranks that were started again look for dead ones (pytorch#135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${TORCHRUN:-.venv/bin/torchrun}" \
    --nnodes="${NODES:-1}" \
    --nproc-per-node="${RANKS:?ranks on this machine: one per GPU}" \
    --rdzv-id="${RUN_ID:?a name for the run, the same on all machines}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${ENDPOINT:?host:port of one of the machines}" \
    --max-restarts="${RESTARTS:-3}" \
    train.py "$@"
