#!/usr/bin/env bash
# One rank of a Slurm job step (see slurm.sbatch): torchrun's variables from Slurm's. The job id is the run's id, so all
# ranks, and the job after a requeue, share one run folder.
set -euo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID
export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
export TORCHELASTIC_RUN_ID=$SLURM_JOB_ID
exec "${PYTHON:-.venv/bin/python}" train.py "$@"
