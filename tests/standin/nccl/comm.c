/* A communicator's life after init: what it is, how it goes, and how it ends. */
#define _GNU_SOURCE
#include "comm.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static void nap(void) {
  struct timespec t = {0, 500000};
  nanosleep(&t, NULL);
}

ncclResult_t comm_valid(ncclComm_t comm, const char *function) {
  if (!comm) log_warn("%s : comm argument is NULL", function);
  else if (comm->magic != COMM_MAGIC) log_warn("Error: corrupted comm object detected");
  else return ncclSuccess;
  return ncclInvalidArgument;
}

/* Nothing may be asked of a communicator that is in progress; one that failed gives its error for ever. */
ncclResult_t comm_ready(ncclComm_t comm) {
  int state = atomic_load(&comm->state);
  if (state == ncclInProgress) {
    log_warn("Attempt to use communicator before the previous operation returned ncclSuccess");
    return ncclInvalidArgument;
  }
  if (state != ncclSuccess) log_warn("Attempt to use communicator after an error: %s", ncclGetErrorString(state));
  return state;
}

void comm_settle(ncclComm_t comm) {
  while (atomic_load(&comm->outstanding)) nap();
}

/* An end waits, without a limit, until every graph with an operation of the communicator is destroyed. */
static void await_graphs(ncclComm_t comm) {
  while (atomic_load(&comm->captured)) nap();
}

void comm_free(ncclComm_t comm) {
  if (comm->last_mark) cuda()->mark_drop(comm->last_mark);
  world_forget_made(comm);
  world_close(comm);
  comm->magic = 0;
  free(comm);
}

ncclResult_t fault_meet(ncclComm_t comm, const char *function) {
  fault met = standin_fault(function);
  if (met.kind == FAULT_CODE) {
    log_warn("an injected failure of %s", function);
    return met.code;
  }
  if (met.kind == FAULT_HANG && comm) {
    world_hang(comm);
    return ncclInternalError;
  }
  if (met.kind == FAULT_REMOTE && comm) atomic_store(&comm->state, ncclRemoteError);
  return ncclSuccess;
}

/* ---- questions */

API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  if (comm_valid(comm, "ncclGetAsyncError") || !error) return ncclInvalidArgument;
  MEET_FAULT(comm);
  *error = atomic_load(&comm->state);
  return ncclSuccess;
}

static ncclResult_t answer(ncclComm_t comm, const char *function, int *out, int value) {
  if (!out) {
    log_warn("%s : argument is NULL", function);
    return ncclInvalidArgument;
  }
  ncclResult_t result = comm_ready(comm);
  if (!result) *out = value;
  return result;
}

API ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  if (comm_valid(comm, "CommCount")) return ncclInvalidArgument;
  MEET_FAULT(comm);
  return answer(comm, "CommCount", count, comm->size);
}

API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
  if (comm_valid(comm, "CommCuDevice")) return ncclInvalidArgument;
  MEET_FAULT(comm);
  return answer(comm, "CommCuDevice", device, comm->device);
}

/* The fault "wrong" makes it answer with another rank. */
API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  if (comm_valid(comm, "CommUserRank")) return ncclInvalidArgument;
  fault met = standin_fault(__func__);
  if (met.kind == FAULT_CODE) return met.code;
  return answer(comm, "CommUserRank", rank, met.kind == FAULT_WRONG ? (comm->rank + 1) % comm->size : comm->rank);
}

/* ---- endings */

static void log_end(ncclComm_t comm, const char *state) {
  if (!comm->world) return;
  log_info(comm, nccl_version() >= 23000 ? SUB_DESTROY : SUB_INIT,
           "comm %p rank %d nranks %d cudaDev %d busId %x - %s COMPLETE", (void *)comm, comm->rank, comm->size,
           comm->device, (unsigned)comm->world->seats[comm->rank].bus << 12, state);
}

/* A job counts as outstanding itself, so it waits for all the others. */
static ncclResult_t run_finalize(job *j) {
  while (atomic_load(&j->comm->outstanding) > 1 && !atomic_load(&j->comm->stop)) nap();
  return atomic_load(&j->comm->stop) ? ncclInternalError : ncclSuccess;
}

API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  if (comm_valid(comm, "ncclCommFinalize")) return ncclInvalidArgument;
  MEET_FAULT(comm);
  ncclResult_t result = comm_ready(comm);
  if (result) return group_error(result);
  if (comm->finalized || comm->revoked) {
    log_warn("ncclCommFinalize: comm %p was already finalized or revoked", (void *)comm);
    return group_error(ncclInvalidArgument);
  }
  comm->finalized = 1;
  return group_job((job){.comm = comm, .run = run_finalize, .name = "ncclCommFinalize"});
}

/* From 2.31.2 on a destroy waits for that of every other rank of the host, without a limit, and an abort is none. */
static ncclResult_t await_neighbours(ncclComm_t comm) {
  seat *seats = comm->world->seats;
  atomic_store(&seats[comm->rank].destroying, 1);
  world_ring(comm);
  for (int r = 0; r < comm->size; r++)
    if (seats[r].host == seats[comm->rank].host) AWAIT(comm, atomic_load(&seats[r].destroying), ncclInternalError);
  return ncclSuccess;
}

/* An unhealthy communicator is not freed; some versions then leave a group open as well. */
API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  if (comm_valid(comm, "ncclCommDestroy")) return ncclInvalidArgument;
  MEET_FAULT(comm);
  ncclResult_t result = comm_ready(comm);
  if (result) {
    int version = nccl_version();
    if (version >= 22706 || (version >= 22400 && version <= 22606)) group_enter();
    return result;
  }
  comm_settle(comm);
  await_graphs(comm);
  if (nccl_version() >= 23102 && comm->world && (result = await_neighbours(comm))) return result;
  log_end(comm, "Destroy");
  comm_free(comm);
  return ncclSuccess;
}

/* Ends every wait of this rank; work that is queued on streams is passed over. Returns when nothing runs any more. */
API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  if (comm_valid(comm, "ncclCommAbort")) return ncclInvalidArgument;
  fault met = standin_fault(__func__);
  if (met.kind == FAULT_HANG)
    for (;;) nap();
  if (met.kind == FAULT_CODE) return met.code;
  atomic_store(&comm->stop, 1);
  if (comm->world) world_ring(comm);
  comm_settle(comm);
  await_graphs(comm);
  /* The original needs half a second, in which a call that its stream has let go comes back. */
  for (int i = 0; i < 500 && atomic_load(&comm->inside); i++) nap();
  log_end(comm, "Abort");
  comm_free(comm);
  return ncclSuccess;
}

API ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  if (!comm) return ncclSuccess;
  if (comm_valid(comm, "ncclCommRevoke")) return ncclInvalidArgument;
  MEET_FAULT(comm);
  if (flags || comm->finalized || comm->revoked) {
    log_warn("ncclCommRevoke: unsupported flags %d, or the communicator is already finalized or revoked", flags);
    return ncclInvalidArgument;
  }
  atomic_store(&comm->stop, 1);
  if (comm->world) world_ring(comm);
  comm_settle(comm);
  comm->revoked = comm->stopped = 1;
  atomic_store(&comm->stop, 0);
  atomic_store(&comm->state, ncclSuccess);
  return ncclSuccess;
}
