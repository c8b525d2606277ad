/* Unique IDs, and how ranks become a communicator. */
#define _GNU_SOURCE
#include "comm.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Ranks whose text is the same are on one host. */
static uint64_t host_hash(void) {
  char name[256] = "";
  const char *id = getenv("NCCL_HOSTID");
  if (!id) gethostname(name, sizeof name - 1);
  uint64_t hash = 1469598103934665603u;
  for (const char *c = id ? id : name; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
  return hash;
}

ncclComm_t comm_new(int size, int rank, const ncclUniqueId *id, const ncclConfig_t *config, int device, void *context) {
  ncclComm_t comm = calloc(1, sizeof *comm);
  comm->magic = COMM_MAGIC;
  comm->size = size;
  comm->rank = rank;
  comm->device = device;
  comm->context = context;
  comm->blocking = config->blocking;
  comm->id = *id;
  comm->lazy = nccl_version() >= 22200 && setting("NCCL_RUNTIME_CONNECT", 1);
  if (config->netName) strncpy(comm->network, config->netName, sizeof comm->network - 1);
  return comm;
}

/* Which network would be used between hosts: the one asked for, if it is there. */
static ncclResult_t choose_network(ncclComm_t comm) {
  const char *wanted = getenv("NCCL_NET"), *found = getenv("STANDIN_NETWORK"), *way = getenv("STANDIN_TRANSPORT");
  if (!found && way && !strncmp(way, "NET/", 4)) found = way + 4;
  if (!found) found = "Socket";
  if (!wanted || !*wanted) wanted = *comm->network ? comm->network : found;
  if (strcasecmp(wanted, found) && strcasecmp(wanted, "Socket")) {
    log_warn(nccl_version() >= 22700 ? "Failed to initialize any NET plugin" : "Error: network %s not found.", wanted);
    return ncclInvalidUsage;
  }
  strcpy(comm->network, strcasecmp(wanted, "Socket") ? "IB" : "Socket");
  return ncclSuccess;
}

static void log_network(ncclComm_t comm) {
  const char *space = nccl_version() >= 22400 ? "" : " ";
  int bootstrap = nccl_version() >= 22300 ? SUB_BOOTSTRAP : SUB_INIT;
  log_info(comm, bootstrap, "Bootstrap%s: Using lo:127.0.0.1<0>", space);
  int ib = !strcmp(comm->network, "IB");
  log_info(comm, SUB_INIT | SUB_NET, "NET/IB : %s",
           ib ? "Using [0]mlx5_0:1/RoCE [RO]; OOB lo:127.0.0.1<0>" : "No device found.");
  if (!ib) log_info(comm, SUB_INIT | SUB_NET, "NET/Socket : Using [0]lo:127.0.0.1<0>");
  if (nccl_version() >= 22703) {
    log_info(comm, SUB_INIT | SUB_NET, "Initialized NET plugin %s", comm->network);
    log_info(comm, SUB_INIT | SUB_NET, "Assigned NET plugin %s to comm", comm->network);
  }
  log_info(comm, SUB_INIT, "Using network %s", comm->network);
}

static void log_init(ncclComm_t comm, const char *function, const char *state) {
  uint64_t id;
  const seat *own = &comm->world->seats[comm->rank];
  memcpy(&id, comm->id.bytes, sizeof id);
  log_info(comm, SUB_INIT, "%s%scomm %p rank %d nranks %d cudaDev %d nvmlDev %d busId %x commId 0x%lx - Init %s",
           nccl_version() >= 22100 ? function : "", nccl_version() >= 22100 ? " " : "", (void *)comm, comm->rank,
           comm->size, comm->device, own->number, (unsigned)own->bus << 12, id, state);
}

/* Takes this rank's seat. Ranks that do not agree on the size, or that claim one seat, wait for ever, as in truth. */
static ncclResult_t sit_down(ncclComm_t comm) {
  int expected = 0;
  world *w = comm->world;
  if (!atomic_compare_exchange_strong(&w->ranks, &expected, comm->size) && expected != comm->size) {
    log_warn("Bootstrap Root : mismatch in rank count from procs %d : %d", expected, comm->size);
    world_hang(comm);
    return ncclInternalError;
  }
  if (atomic_exchange(&w->seats[comm->rank].claimed, 1)) {
    log_warn("Bootstrap Root : rank %d of %d ranks has already checked in", comm->rank, comm->size);
    world_hang(comm);
    return ncclInternalError;
  }
  world_sit(comm);
  seat *own = &w->seats[comm->rank];
  own->version = nccl_version();
  own->device = comm->device;
  own->host = host_hash();
  cuda()->identity(comm->device, own->uuid, &own->bus);
  own->number = own->bus - 1;
  atomic_store(&own->ready, 1);
  world_ring(comm);
  return ncclSuccess;
}

static ncclResult_t compare_versions(ncclComm_t comm) {
  for (int r = 0; r < comm->size; r++) {
    int theirs = comm->world->seats[r].version;
    if (theirs == nccl_version()) continue;
    log_warn("Mismatched NCCL version detected : rank %d version %d rank %d version %d", comm->rank, nccl_version(), r,
             theirs);
    return ncclInvalidUsage;
  }
  return ncclSuccess;
}

static int shares_device(const seat *a, const seat *b) {
  return a->host == b->host && !memcmp(a->uuid, b->uuid, sizeof a->uuid);
}

/* Two ranks on one GPU of a host: who is told depends on the version; who is not told waits for ever. */
static ncclResult_t compare_devices(ncclComm_t comm) {
  const seat *seats = comm->world->seats;
  int version = nccl_version(), found = 0, concerned = 0, first_of_host = 1;
  if (version >= 23003 && setting("NCCL_MULTI_RANK_GPU_ENABLE", 0)) return ncclSuccess;
  for (int a = 0; a < comm->size; a++) {
    if (a < comm->rank && seats[a].host == seats[comm->rank].host) first_of_host = 0;
    for (int b = a + 1; b < comm->size; b++) {
      if (!shares_device(&seats[a], &seats[b])) continue;
      if (!found++)
        log_warn("Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", a, b,
                 (unsigned)seats[a].bus << 12);
      if (a == comm->rank || b == comm->rank) concerned = 1;
    }
  }
  if (!found) return ncclSuccess;
  if (version >= 23005 || (version >= 23003 ? first_of_host : concerned)) return ncclInvalidUsage;
  world_hang(comm);
  return ncclInternalError;
}

ncclResult_t comm_join(ncclComm_t comm, const char *function) {
  ncclResult_t result = ncclSuccess;
  if (comm->stuck) {
    world_hang(comm);
    return ncclInternalError;
  }
  log_version(comm);
  log_environment(comm);
  if ((result = choose_network(comm)) || (result = world_open(comm)) || (result = sit_down(comm))) return result;
  log_network(comm);
  log_init(comm, function, "START");
  for (int r = 0; r < comm->size; r++) AWAIT(comm, atomic_load(&comm->world->seats[r].ready), ncclInternalError);
  world_forget_made(comm);
  if ((result = compare_versions(comm)) || (result = compare_devices(comm))) return result;
  if (!comm->lazy && (result = connect_all(comm))) return result;
  log_init(comm, function, "COMPLETE");
  return ncclSuccess;
}

/* ---- the API */

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  if (!id) {
    log_warn("GetUniqueId : out argument is NULL");
    return ncclInvalidArgument;
  }
  MEET_FAULT(NULL);
  return world_make(id);
}

static ncclResult_t run_join(job *j) { return comm_join(j->comm, j->name); }

static ncclResult_t init(ncclComm_t *out, int size, const ncclUniqueId *id, int rank, const ncclConfig_t *given,
                         const char *name) {
  int device, leaks = nccl_version() >= 22304 && strcmp(name, "ncclCommInitRank");
  void *context;
  ncclConfig_t config;
  fault met = standin_fault(name);
  if (cuda_current(&device, &context)) {
    if (leaks) group_enter(); /* from 2.23 these functions leave the group open that they began */
    return ncclUnhandledCudaError;
  }
  if (!out || size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) {
    log_warn("Invalid rank requested : %d/%d", rank, size);
    return group_error(ncclInvalidArgument);
  }
  if (config_read(given, &config)) return group_error(ncclInvalidArgument);
  if (met.kind == FAULT_CODE) {
    log_warn("an injected failure of %s", name);
    return group_error(met.code);
  }
  ncclComm_t comm = comm_new(size, rank, id, &config, device, context);
  comm->stuck = met.kind == FAULT_HANG;
  *out = comm; /* before the handshake, so that another thread can abort it */
  ncclResult_t result = group_job((job){.comm = comm, .run = run_join, .name = name, .out = out});
  if (result == ncclSuccess || result == ncclInProgress || leaks) return result;
  *out = NULL; /* only the plain function clears its handle; what was behind it is left, for a thread may abort it */
  return result;
}

API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
  return init(comm, size, &id, rank, NULL, __func__);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return init(comm, size, &id, rank, config, __func__);
}

API ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int count, ncclUniqueId *ids,
                                          ncclConfig_t *config) {
  if (count < 1 || count > size || !ids) {
    log_warn("improper usage of ncclCommInitRankScalable: nId = %d, nranks=%d", count, size);
    return group_error(ncclInvalidArgument);
  }
  return init(comm, size, &ids[0], rank, config, __func__);
}

/* One device a process is all that runs here. */
API ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices) {
  (void)comms;
  (void)devices;
  log_warn("ncclCommInitAll : %d devices in one process are not supported by the stand-in", count);
  return ncclInvalidUsage;
}
