/* Communicators made from a communicator: split and shrink. Ranks tell each other their parts through posts at their
   seats, so this works also where the collectives of the parent came to a halt. */
#include "comm.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
  int ranks[MAX_RANKS], count, own; /* ranks of the parent in the order of the child; the place of this one */
} members;

static post *post_of(ncclComm_t comm, int rank, uint64_t turn) { return &comm->world->seats[rank].posts[turn % POSTS]; }

/* Says this rank's part and waits for those of all that take part. */
static ncclResult_t exchange(ncclComm_t comm, const char *takes_part, int color, int key) {
  uint64_t turn = ++comm->turn;
  post *own = post_of(comm, comm->rank, turn);
  own->color = color;
  own->key = key;
  atomic_store(&own->turn, turn);
  world_ring(comm);
  for (int r = 0; r < comm->size; r++)
    if (takes_part[r]) AWAIT(comm, atomic_load(&post_of(comm, r, turn)->turn) >= turn, ncclInternalError);
  return ncclSuccess;
}

static members find_members(ncclComm_t comm, const char *takes_part, int color) {
  members m = {.count = 0};
  for (int r = 0; r < comm->size; r++) {
    if (!takes_part[r] || post_of(comm, r, comm->turn)->color != color) continue;
    int key = post_of(comm, r, comm->turn)->key, at = m.count++;
    for (; at > 0 && post_of(comm, m.ranks[at - 1], comm->turn)->key > key; at--) m.ranks[at] = m.ranks[at - 1];
    m.ranks[at] = r;
  }
  for (int i = 0; i < m.count; i++)
    if (m.ranks[i] == comm->rank) m.own = i;
  return m;
}

/* The first member makes an ID; the others read it at its seat. */
static ncclResult_t share_id(ncclComm_t comm, const members *m, ncclUniqueId *id) {
  post *leader = post_of(comm, m->ranks[0], comm->turn);
  if (m->own == 0) {
    ncclResult_t result = world_make(&leader->id);
    if (result) return result;
    atomic_store(&leader->id_turn, comm->turn);
    world_ring(comm);
  }
  AWAIT(comm, atomic_load(&leader->id_turn) >= comm->turn, ncclInternalError);
  *id = leader->id;
  return ncclSuccess;
}

static ncclResult_t make_child(job *j, const char *takes_part, int color) {
  ncclComm_t parent = j->comm;
  members m = find_members(parent, takes_part, color);
  ncclUniqueId id;
  ncclResult_t result = share_id(parent, &m, &id);
  if (result) return result;
  if (!j->has_config) j->config.blocking = parent->blocking;
  ncclComm_t child = comm_new(m.count, m.own, &id, &j->config, parent->device, parent->context);
  if (!*child->network) strcpy(child->network, parent->network);
  child->parent = parent;
  result = comm_join(child, j->name);
  child->parent = NULL;
  if (result) comm_free(child);
  else *j->out = child;
  return result;
}

static ncclResult_t run_split(job *j) {
  char everybody[MAX_RANKS];
  memset(everybody, 1, sizeof everybody);
  ncclResult_t result = exchange(j->comm, everybody, j->color, j->key);
  return result || j->color == NO_COLOR ? result : make_child(j, everybody, j->color);
}

static ncclResult_t run_shrink(job *j) {
  char survives[MAX_RANKS];
  ncclComm_t comm = j->comm;
  memset(survives, 1, sizeof survives);
  for (int i = 0; i < j->excluded_count; i++) survives[j->excluded[i]] = 0;
  ncclResult_t result = exchange(comm, survives, 0, comm->rank);
  return result ? result : make_child(j, survives, 0);
}

API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
  job j = {.comm = comm, .run = run_split, .color = color, .key = key, .out = out, .name = "ncclCommSplit"};
  if (comm_valid(comm, "CommSplit")) return group_error(ncclInvalidArgument);
  MEET_FAULT(comm);
  ncclResult_t result = comm_ready(comm);
  if (result) return group_error(result);
  if (!out || color < NO_COLOR) {
    log_warn("CommSplit : invalid color %d, or the out argument is NULL", color);
    return group_error(ncclInvalidArgument);
  }
  *out = NULL;
  j.has_config = config != NULL;
  if ((result = config_read(config, &j.config))) return group_error(result);
  return group_job(j);
}

static int ascending(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* Ends what runs on the parent, whose collectives are of no use from then on. */
static void halt(ncclComm_t comm) {
  atomic_store(&comm->stop, 1);
  world_ring(comm);
  comm_settle(comm);
  comm->stopped = 1;
  atomic_store(&comm->stop, 0);
}

API ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int count, ncclComm_t *out, ncclConfig_t *config,
                                int flags) {
  job j = {.comm = comm, .run = run_shrink, .out = out, .flags = flags, .name = "ncclCommShrink"};
  if (comm_valid(comm, "CommShrink")) return group_error(ncclInvalidArgument);
  MEET_FAULT(comm);
  ncclResult_t result = comm_ready(comm);
  if (result) return group_error(result);
  if (!out || !excluded || count < 1 || count >= comm->size || (flags & ~SHRINK_ABORT)) {
    log_warn("CommShrink : invalid list of %d excluded ranks, or flags %d", count, flags);
    return group_error(ncclInvalidArgument);
  }
  qsort(excluded, (size_t)count, sizeof *excluded, ascending); /* the caller's own array, as in truth */
  for (int i = 0; i < count; i++) {
    if (excluded[i] < 0 || excluded[i] >= comm->size || excluded[i] == comm->rank) {
      log_warn("CommShrink : rank %d cannot be excluded by rank %d", excluded[i], comm->rank);
      return group_error(ncclInvalidArgument);
    }
    j.excluded[i] = excluded[i];
  }
  j.excluded_count = count;
  *out = NULL;
  j.has_config = config != NULL;
  if ((result = config_read(config, &j.config))) return group_error(result);
  if (flags & SHRINK_ABORT) halt(comm);
  return group_job(j);
}
