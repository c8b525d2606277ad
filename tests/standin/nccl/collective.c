/* The operations: what each call checks, and how it becomes a task. */
#include "comm.h"

#include <stdlib.h>

static int dtype_known(int dtype) {
  int known = nccl_version() >= 22400 ? DTYPES : ncclFloat8e4m3;
  return dtype >= 0 && dtype < known;
}

static int op_known(ncclComm_t comm, int op) {
  if (op >= 0 && op < BUILTIN_OPS) return 1;
  return op >= BUILTIN_OPS && op < BUILTIN_OPS + MAX_OPS && comm->ops[op - BUILTIN_OPS].used;
}

/* An argument that is wrong spoils a non-blocking communicator, although the call had no effect. */
static ncclResult_t refuse(ncclComm_t comm, ncclResult_t result) {
  if (!comm->blocking) atomic_store(&comm->state, result);
  return group_error(result);
}

static ncclResult_t check(ncclComm_t comm, const char *function, const task *t) {
  if (comm->revoked || comm->stopped || comm->finalized) {
    log_warn("%s: communicator was revoked or finalized", function);
    return ncclInvalidUsage;
  }
  if (t->root < 0 || t->root >= comm->size) {
    log_warn("%s : invalid root %d (root should be in the 0..%d range)", function, t->root, comm->size);
    return ncclInvalidArgument;
  }
  if (!dtype_known(t->dtype)) {
    log_warn("%s : invalid type %d", function, t->dtype);
    return ncclInvalidArgument;
  }
  if (!op_known(comm, t->op)) {
    log_warn("%s : invalid reduction operation %d", function, t->op);
    return ncclInvalidArgument;
  }
  if (t->op >= BUILTIN_OPS && comm->ops[t->op - BUILTIN_OPS].dtype != t->dtype) {
    log_warn("%s : invalid type %d for user reduction operation", function, t->dtype);
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

static ncclResult_t submit(ncclComm_t comm, const char *name, task t) {
  const char *function = name + 4; /* without "nccl" */
  if (comm_valid(comm, function)) return group_error(ncclInvalidArgument);
  fault met = standin_fault(name);
  if (met.kind == FAULT_CODE) {
    log_warn("an injected failure of %s", name);
    return group_error(met.code);
  }
  if (met.kind == FAULT_HANG) {
    atomic_fetch_add(&comm->outstanding, 1);
    world_hang(comm);
    atomic_fetch_sub(&comm->outstanding, 1);
    return group_error(ncclInternalError);
  }
  if (met.kind == FAULT_REMOTE) atomic_store(&comm->state, ncclRemoteError);
  t.wrong = met.kind == FAULT_WRONG;
  ncclResult_t result = comm_ready(comm);
  if (result) return group_error(result);
  if ((result = check(comm, function, &t))) return refuse(comm, result);
  if (t.op >= BUILTIN_OPS) {
    int i = t.op - BUILTIN_OPS;
    t.by.residence = comm->ops[i].residence;
    t.by.real = comm->ops[i].real;
    t.by.integer = comm->ops[i].integer;
    t.by.device = comm->ops[i].device;
  }
  if (!t.count) return ncclSuccess; /* nothing is moved, and nobody is waited for */
  return group_task(comm, t);
}

static task with(kind kind, const void *send, void *recv, size_t count, int dtype, int op, int root, void *stream) {
  return (task){.kind = kind, .send = send, .recv = recv, .count = count, .dtype = dtype, .op = op, .root = root,
                .stream = stream};
}

API ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, __func__, with(ALL_REDUCE, send, recv, count, dtype, op, 0, stream));
}

API ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root,
                            ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, __func__, with(REDUCE, send, recv, count, dtype, op, root, stream));
}

API ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                                   ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, __func__, with(REDUCE_SCATTER, send, recv, count, dtype, op, 0, stream));
}

API ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root,
                               ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, __func__, with(BROADCAST, send, recv, count, dtype, 0, root, stream));
}

API ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return submit(comm, __func__, with(BROADCAST, buffer, buffer, count, dtype, 0, root, stream));
}

API ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                               cudaStream_t stream) {
  return submit(comm, __func__, with(ALL_GATHER, send, recv, count, dtype, 0, 0, stream));
}

API ncclResult_t ncclGather(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                            cudaStream_t stream) {
  return submit(comm, __func__, with(GATHER, send, recv, count, dtype, 0, root, stream));
}

API ncclResult_t ncclScatter(const void *send, void *recv, size_t count, ncclDataType_t dtype, int root,
                             ncclComm_t comm, cudaStream_t stream) {
  return submit(comm, __func__, with(SCATTER, send, recv, count, dtype, 0, root, stream));
}

API ncclResult_t ncclAlltoAll(const void *send, void *recv, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                              cudaStream_t stream) {
  return submit(comm, __func__, with(ALL_TO_ALL, send, recv, count, dtype, 0, 0, stream));
}

API ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                          cudaStream_t stream) {
  return submit(comm, __func__, with(SEND, send, NULL, count, dtype, 0, peer, stream));
}

API ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                          cudaStream_t stream) {
  return submit(comm, __func__, with(RECV, NULL, recv, count, dtype, 0, peer, stream));
}

/* ---- reductions that multiply by a rank's own scalar first */

API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t dtype, int residence,
                                          ncclComm_t comm) {
  if (comm_valid(comm, "ncclRedOpCreatePreMulSum")) return ncclInvalidArgument;
  MEET_FAULT(comm);
  ncclResult_t result = comm_ready(comm);
  if (result) return result;
  if (!op || !scalar || !dtype_known(dtype)) {
    log_warn("ncclRedOpCreatePreMulSum : invalid argument");
    return ncclInvalidArgument;
  }
  for (int i = 0; i < MAX_OPS; i++) {
    if (comm->ops[i].used) continue;
    comm->ops[i].used = 1;
    comm->ops[i].dtype = dtype;
    comm->ops[i].residence = residence;
    comm->ops[i].device = scalar;
    if (residence == ncclScalarHostImmediate) scalar_read(scalar, dtype, &comm->ops[i].real, &comm->ops[i].integer);
    *op = BUILTIN_OPS + i;
    return ncclSuccess;
  }
  return ncclInternalError;
}

API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  if (op >= 0 && op < BUILTIN_OPS) {
    log_warn("ncclRedOpDestroy : operator is a NCCL builtin.");
    return ncclInvalidArgument;
  }
  if (comm_valid(comm, "ncclRedOpDestroy")) return ncclInvalidArgument;
  MEET_FAULT(comm);
  if (!op_known(comm, op)) {
    log_warn("ncclRedOpDestroy : operator unknown to this communicator.");
    return ncclInvalidArgument;
  }
  comm->ops[op - BUILTIN_OPS].used = 0;
  return ncclSuccess;
}
