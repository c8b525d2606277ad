/* Memory from NCCL's allocator, registration of buffers, and windows. */
#include "comm.h"

#include <stdlib.h>

static _Atomic uint64_t allocated[MAX_LIST]; /* what ncclMemAlloc gave */

static int list_add(void **list, void *entry) {
  for (int i = 0; i < MAX_LIST; i++)
    if (!list[i]) {
      list[i] = entry;
      return 1;
    }
  return 0;
}

static int list_remove(void **list, void *entry) {
  for (int i = 0; i < MAX_LIST; i++)
    if (list[i] == entry) {
      list[i] = NULL;
      return 1;
    }
  return 0;
}

API ncclResult_t ncclMemAlloc(void **pointer, size_t bytes) {
  int device;
  void *context;
  uint64_t address;
  MEET_FAULT(NULL);
  ncclResult_t result = cuda_current(&device, &context);
  if (result) return result;
  if (!pointer || !bytes || cuda()->allocate(&address, bytes)) {
    log_warn("Cuda failure 'out of memory'");
    return ncclUnhandledCudaError;
  }
  for (int i = 0; i < MAX_LIST; i++) {
    uint64_t none = 0;
    if (atomic_compare_exchange_strong(&allocated[i], &none, address)) break;
  }
  *pointer = (void *)(uintptr_t)address;
  return ncclSuccess;
}

API ncclResult_t ncclMemFree(void *pointer) {
  int device;
  void *context;
  MEET_FAULT(NULL);
  ncclResult_t result = cuda_current(&device, &context);
  if (result || !pointer) return result;
  for (int i = 0; i < MAX_LIST; i++) {
    uint64_t own = (uintptr_t)pointer;
    if (atomic_compare_exchange_strong(&allocated[i], &own, 0))
      return cuda()->release((uintptr_t)pointer) ? ncclUnhandledCudaError : ncclSuccess;
  }
  log_warn("ncclMemFree : memory at %p is not from ncclMemAlloc", pointer);
  return ncclInvalidArgument;
}

/* The address that ncclMemAlloc gave for the memory that holds a range; 0 if there is none. */
static uint64_t allocation_of(const void *pointer, size_t bytes) {
  uint64_t base = 0, wanted = (uintptr_t)pointer;
  for (int i = 0; i < MAX_LIST; i++) {
    uint64_t start = atomic_load(&allocated[i]);
    if (start > base && start <= wanted) base = start;
  }
  return base && cuda()->shadow(base, wanted - base + bytes) ? base : 0;
}

API ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t bytes, void **handle) {
  if (comm_valid(comm, "ncclCommRegister") || !handle) return ncclInvalidArgument;
  MEET_FAULT(comm);
  ncclResult_t result = comm_ready(comm);
  if (result) return result;
  *handle = NULL;
  if (!buffer || !bytes || !cuda()->shadow((uintptr_t)buffer, bytes)) {
    log_warn("ncclCommRegister : no allocation holds %zu bytes at %p", bytes, buffer);
    return ncclInvalidArgument;
  }
  if (!setting("NCCL_LOCAL_REGISTER", 1)) return ncclSuccess;
  *handle = malloc(1);
  return list_add(comm->registered, *handle) ? ncclSuccess : ncclInternalError;
}

API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
  if (comm_valid(comm, "ncclCommDeregister")) return ncclInvalidArgument;
  MEET_FAULT(comm);
  if (!handle) return ncclSuccess;
  if (!list_remove(comm->registered, handle)) {
    log_warn("Deregister NCCL comm %p could not find handle %p", (void *)comm, handle);
    return ncclInvalidUsage;
  }
  free(handle);
  return ncclSuccess;
}

/* Collective: all ranks must come. Success with a NULL window where the memory is unsuitable or windows are off. */
static ncclResult_t run_window(job *j) {
  ncclComm_t comm = j->comm;
  uint64_t turn = ++comm->turn, base = allocation_of(j->buffer, j->bytes);
  atomic_store(&comm->world->seats[comm->rank].posts[turn % POSTS].turn, turn);
  world_ring(comm);
  for (int r = 0; r < comm->size; r++)
    AWAIT(comm, atomic_load(&comm->world->seats[r].posts[turn % POSTS].turn) >= turn, ncclInternalError);
  if (!base || ((uintptr_t)j->buffer - base) % WINDOW_ALIGNMENT || !setting("STANDIN_WINDOWS", 1)) return ncclSuccess;
  void *made = malloc(1);
  if (!list_add(comm->windows, made)) return ncclInternalError;
  *j->window = made;
  return ncclSuccess;
}

API ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t bytes, void **window, int flags) {
  (void)flags;
  if (comm_valid(comm, "ncclCommWindowRegister") || !window) return group_error(ncclInvalidArgument);
  MEET_FAULT(comm);
  ncclResult_t result = comm_ready(comm);
  if (result) return group_error(result);
  *window = NULL;
  return group_job((job){.comm = comm, .run = run_window, .buffer = buffer, .bytes = bytes, .window = window});
}

API ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, void *window) {
  if (comm_valid(comm, "ncclCommWindowDeregister")) return ncclInvalidArgument;
  MEET_FAULT(comm);
  if (!window) return ncclSuccess;
  if (!list_remove(comm->windows, window)) {
    log_warn("ncclCommWindowDeregister : window %p is not of this communicator", window);
    return ncclInvalidArgument;
  }
  free(window);
  return ncclSuccess;
}
