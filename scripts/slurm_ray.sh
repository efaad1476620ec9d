#!/usr/bin/env bash
# Starts a Ray cluster on the nodes of a Slurm job and trains on it. Written, not run: adapt it to your cluster.
#
#   sbatch --nodes=2 --gpus-per-node=8 scripts/slurm_ray.sh env=maniskill model=openvla \
#       actor=fsdp actor.micro_batch_size=20 env.num_processes=8 \
#       'cluster.component_placement={actor:0-7,rollout:8-15,env:8-15}'
#
# The arguments are those of `embodrl train`. docs/cluster.md explains the steps. The checkout, with its .venv, and the
# run directory must be on a file system that all nodes see.
#SBATCH --job-name=embodrl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=slurm-%j.log
#SBATCH --signal=B:TERM@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"
source .venv/bin/activate

PORT=${RAY_PORT:-6379}
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
# The job script runs on the first node, so the driver does, too: machine 0 of cluster.component_placement.
head_address=$(hostname --ip-address | tr ' ' '\n' | grep -m 1 -F .)

# What NCCL and gloo should use; Ray's processes inherit it from `ray start`.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# export NCCL_DEBUG=INFO

# Ray may ask for a token (RAY_AUTH_MODE=token): one for this job, in a file that only you can read.
if [[ ${RAY_AUTH_MODE:-token} == token ]]; then
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$PWD/.ray-token-$SLURM_JOB_ID
    (umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH")
fi

# On every exit, time limit included: stop Ray on all nodes.
stop() {
    srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --overlap ray stop >/dev/null 2>&1 || true
    rm -f "${RAY_AUTH_TOKEN_PATH:-}"
}
trap stop EXIT

srun --nodes=1 --ntasks=1 --overlap --nodelist="${nodes[0]}" \
    ray start --head --node-ip-address="$head_address" --port="$PORT" --include-dashboard=false --block &
for _ in $(seq 60); do
    ray status --address="$head_address:$PORT" >/dev/null 2>&1 && break
    sleep 2
done
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" \
        ray start --address="$head_address:$PORT" --block &
done

# All nodes must be there before the run starts.
for _ in $(seq 60); do
    alive=$(python -c "
import ray
ray.init(address='$head_address:$PORT', logging_level='ERROR')
print(sum(node['Alive'] for node in ray.nodes()))" 2>/dev/null || echo 0)
    [[ $alive -eq ${#nodes[@]} ]] && break
    sleep 5
done
[[ $alive -eq ${#nodes[@]} ]] || { echo "only $alive of ${#nodes[@]} nodes joined Ray" >&2; exit 1; }

# Two minutes before the time limit Slurm sends SIGTERM (--signal); embodrl then saves, and `embodrl resume` continues.
embodrl train cluster=ray_local cluster.num_nodes="${#nodes[@]}" cluster.ray_address="$head_address:$PORT" "$@" &
driver=$!
trap 'kill -TERM $driver 2>/dev/null' TERM
status=0
wait $driver || status=$?
# A trapped signal ends `wait` early; the run is saving meanwhile.
while kill -0 $driver 2>/dev/null; do wait $driver || status=$?; done
exit $status
