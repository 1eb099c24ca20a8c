#!/bin/bash
# Start the ranks of one of several machines without SLURM: run it on each of them.
#
#   MASTER_ADDR=10.0.0.1 NUM_NODES=2 RANK_OF_NODE=0 \
#     scripts/slurm/torchrun.sh --config my.yaml --run_dir /shared/runs/my/0 [--KEY VALUE ...]
#
# Set INTERFACE to the network interface between the machines, such as eth0, if there are several.
# torchrun exits with 1 whatever its ranks exit with. See docs/scale.md.
set -eu
num_nodes=${NUM_NODES:?the number of machines}
gpus=${GPUS_PER_NODE:-8}
if [ -n "${INTERFACE:-}" ]; then
  export NCCL_SOCKET_IFNAME=$INTERFACE GLOO_SOCKET_IFNAME=$INTERFACE
fi
exec torchrun --nnodes "$num_nodes" --node-rank "${RANK_OF_NODE:?0 on the first machine}" \
  --nproc-per-node "$gpus" \
  --master-addr "${MASTER_ADDR:?the address of the first machine}" \
  --master-port "${MASTER_PORT:-29500}" --no-python \
  lit-grpo fit --config strategies/ddp "$@" \
  --trainer.num_nodes "$num_nodes" --trainer.devices "$gpus" --ckpt_path auto
