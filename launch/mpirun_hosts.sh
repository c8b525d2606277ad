#!/usr/bin/env bash
# Starts the selftest on several hosts with mpirun and ssh.
#
#   ./launch/mpirun_hosts.sh HOSTFILE RANKS [options of the selftest]
#
# HOSTFILE names one host a line ("node1", or with its number of GPUs: "node1:8" for MPICH, "node1 slots=8" for Open MPI).
# Needs: ssh without a password to each host, and on each host, under the same path, the environment that is active here
# (". .venv/mpich/bin/activate" after ./launch/selftest made it, or your own).
#
# Edit these lines for your network, or set the variables.
: "${NCCL_SOCKET_IFNAME:=}" # the interface that NCCL's bootstrap and sockets shall use, for example ens3
: "${NCCL_IB_HCA:=}"        # the RDMA devices that NCCL shall use, for example mlx5_0
: "${LIMIT:=900}"           # seconds for the whole job
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: $0 HOSTFILE RANKS [options of the selftest]" >&2; exit 2; }
hosts=$1 ranks=$2
shift 2
[ -r "$hosts" ] || { echo "$0: cannot read the host file '$hosts'" >&2; exit 2; }

# butter_mpi's start demands these two on every rank: with NCCL's defaults a lost RoCE peer is not reported in time.
export NCCL_IB_TIMEOUT=10 NCCL_IB_RETRY_CNT=1
forward=(NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT)
for name in NCCL_SOCKET_IFNAME NCCL_IB_HCA; do
  [ -z "${!name}" ] || forward+=("$name")
done

# mpirun and python of one environment: another pair would start every rank as "0 of 1".
options=()
version=$(timeout -k 5 20 mpirun --version)
echo "$(command -v mpirun): $(grep -m1 -iE 'version|open mpi' <<<"$version" | tr -s ' ')"
if grep -q 'Open MPI' <<<"$version"; then
  options+=(--hostfile "$hosts")
  for name in "${forward[@]}"; do options+=(-x "$name=${!name}"); done # Open MPI forwards nothing by itself
else
  options+=(-f "$hosts")
  for name in "${forward[@]}"; do options+=(-genv "$name" "${!name}"); done
fi
exec timeout --foreground -k 5 "$LIMIT" mpirun "${options[@]}" -np "$ranks" "$(command -v python)" -m butter_mpi.selftest "$@"
