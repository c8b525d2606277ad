/* What a group does when its turn on the stream comes: collectives one by one, then sends and receives together. */
#define _GNU_SOURCE
#include "comm.h"

#include <string.h>

/* How a collective goes: in how many segments, who puts data out, who takes it, and what is done with it. A segment of
   several belongs to the rank of its number. */
typedef enum { ALL, ROOT, OWNER } who;
typedef enum { COMBINE, FROM_ROOT, FROM_ALL } how;
static const struct { int segmented; who puts, takes; how result; } plans[] = {
    [ALL_REDUCE] = {0, ALL, ALL, COMBINE},    [REDUCE] = {0, ALL, ROOT, COMBINE},
    [REDUCE_SCATTER] = {1, ALL, OWNER, COMBINE}, [BROADCAST] = {0, ROOT, ALL, FROM_ROOT},
    [ALL_GATHER] = {0, ALL, ALL, FROM_ALL},   [GATHER] = {0, ALL, ROOT, FROM_ALL},
    [SCATTER] = {1, ROOT, OWNER, FROM_ROOT},  [ALL_TO_ALL] = {1, ALL, OWNER, FROM_ALL},
};

typedef struct {
  ncclComm_t comm;
  task *task;
  char *send, *recv;
  size_t bytes; /* of a segment */
} collective;

/* Returns 0 when the communicator was stopped. */
static int barrier(ncclComm_t comm) {
  atomic_store(&comm->world->seats[comm->rank].step, ++comm->step);
  world_ring(comm);
  for (int r = 0; r < comm->size; r++)
    AWAIT_PEERS(comm, atomic_load(&comm->world->seats[r].step) >= comm->step, 1u << r, 0);
  return 1;
}

static int is_it(const collective *c, who role, int segment) {
  return role == ALL || c->comm->rank == (role == ROOT ? c->task->root : segment);
}

/* Truth hangs or writes rubbish when ranks do not agree on an operation. Here it hangs, and never says so. */
static int agree(ncclComm_t comm, const task *t) {
  /* Nor where some launch a graph of it, and others call it. */
  signature own = {(int)t->kind | t->captured << 8, t->dtype, t->op >= BUILTIN_OPS ? BUILTIN_OPS : t->op, t->root, t->count};
  seat *seats = comm->world->seats;
  seats[comm->rank].next = own;
  if (!barrier(comm)) return 0;
  for (int r = 0; r < comm->size; r++)
    if (memcmp(&seats[r].next, &own, sizeof own)) {
      world_hang(comm);
      return 0;
    }
  return barrier(comm);
}

/* Averages of floats, and sums that multiply first, scale each rank's own contribution. */
static void scale(collective *c, void *stage, size_t count) {
  int op = c->task->op, dtype = c->task->dtype;
  double real = 1.0 / c->comm->size;
  int64_t integer = 1;
  if (op >= BUILTIN_OPS) {
    int immediate = c->task->by.residence == ncclScalarHostImmediate;
    void *scalar = immediate ? NULL : cuda()->shadow((uintptr_t)c->task->by.device, dtype_bytes(dtype));
    real = c->task->by.real;
    integer = c->task->by.integer;
    if (scalar) scalar_read(scalar, dtype, &real, &integer);
  } else if (op != ncclAvg || dtype_is_integer(dtype)) {
    return;
  }
  buffer_scale(stage, count, dtype, real, integer);
}

static void take(collective *c, size_t offset, size_t bytes) {
  ncclComm_t comm = c->comm;
  task *t = c->task;
  char(*stage)[STAGE] = comm->world->stage, total[STAGE];
  size_t count = bytes / dtype_bytes(t->dtype);
  switch (plans[t->kind].result) {
    case FROM_ROOT: buffer_copy(c->recv + offset, stage[t->root], bytes); break;
    case FROM_ALL:
      for (int r = 0; r < comm->size; r++) buffer_copy(c->recv + (size_t)r * c->bytes + offset, stage[r], bytes);
      break;
    case COMBINE:
      buffer_copy(total, stage[0], bytes);
      for (int r = 1; r < comm->size; r++) buffer_combine(total, stage[r], count, t->dtype, t->op);
      if (t->op == ncclAvg && dtype_is_integer(t->dtype)) buffer_divide(total, count, t->dtype, comm->size);
      buffer_copy(c->recv + offset, total, bytes);
  }
  if (t->wrong) c->recv[offset] ^= 1;
}

static int run_segment(collective *c, int segment) {
  ncclComm_t comm = c->comm;
  int puts = is_it(c, plans[c->task->kind].puts, segment), takes = is_it(c, plans[c->task->kind].takes, segment);
  const char *source = c->send + (plans[c->task->kind].segmented ? (size_t)segment * c->bytes : 0);
  for (size_t offset = 0; offset < c->bytes; offset += STAGE) {
    size_t bytes = c->bytes - offset < STAGE ? c->bytes - offset : STAGE;
    if (puts) {
      buffer_copy(comm->world->stage[comm->rank], source + offset, bytes);
      if (plans[c->task->kind].result == COMBINE)
        scale(c, comm->world->stage[comm->rank], bytes / dtype_bytes(c->task->dtype));
    }
    if (!barrier(comm)) return 0;
    if (takes) take(c, offset, bytes);
    if (!barrier(comm)) return 0;
  }
  return 1;
}

/* Where a buffer lies; one that no allocation holds breaks the device, as an illegal access does. */
static char *place(const void *pointer, size_t bytes) {
  char *found = cuda()->shadow((uintptr_t)pointer, bytes);
  if (!found) cuda()->fail(700);
  return found;
}

static int run_collective(ncclComm_t comm, task *t) {
  collective c = {comm, t, NULL, NULL, t->count * dtype_bytes(t->dtype)};
  int many = plans[t->kind].segmented, all = plans[t->kind].result == FROM_ALL;
  int puts = plans[t->kind].puts != ROOT || comm->rank == t->root;
  int takes = plans[t->kind].takes != ROOT || comm->rank == t->root;
  if (puts && !(c.send = place(t->send, many ? c.bytes * (size_t)comm->size : c.bytes))) return 0;
  if (takes && !(c.recv = place(t->recv, all ? c.bytes * (size_t)comm->size : c.bytes))) return 0;
  if (!agree(comm, t)) return 0;
  for (int segment = 0; segment < (many ? comm->size : 1); segment++)
    if (!run_segment(&c, segment)) return 0;
  return 1;
}

/* ---- point to point: parcels through mailboxes, all of a group in turn until none is left */

static int same_way_before(const task *first, const task *t) {
  for (const task *e = first; e != t; e = e->next)
    if (e->kind == t->kind && e->root == t->root && !e->done) return 1;
  return 0;
}

static int push_parcel(ncclComm_t comm, task *t, size_t bytes) {
  mailbox *box = &comm->world->boxes[comm->rank][t->root];
  if (atomic_load(&box->sent) != atomic_load(&box->taken)) return 0;
  if (t->offset == bytes) return t->done = 1; /* the last parcel was taken */
  box->total = bytes;
  box->length = bytes - t->offset < PARCEL ? bytes - t->offset : PARCEL;
  buffer_copy(box->data, (const char *)t->send + t->offset, box->length);
  t->offset += box->length;
  atomic_fetch_add(&box->sent, 1);
  return 1;
}

static int pull_parcel(ncclComm_t comm, task *t, size_t bytes) {
  mailbox *box = &comm->world->boxes[t->root][comm->rank];
  if (atomic_load(&box->sent) == atomic_load(&box->taken)) return 0;
  if (box->total != bytes) return 0; /* the two do not agree: hangs, as truth may */
  buffer_copy((char *)t->recv + t->offset, box->data, box->length);
  if (t->wrong) ((char *)t->recv)[t->offset] ^= 1;
  t->offset += box->length;
  t->done = t->offset == bytes;
  atomic_fetch_add(&box->taken, 1);
  return 1;
}

/* `left` gets a bit for each peer with whom something is not done. */
static int step(ncclComm_t comm, task *first, unsigned *left) {
  int moved = 0;
  *left = 0;
  for (task *t = first; t; t = t->next) {
    size_t bytes = t->count * dtype_bytes(t->dtype);
    if (t->done) continue;
    if (!same_way_before(first, t))
      moved |= t->kind == SEND ? push_parcel(comm, t, bytes) : pull_parcel(comm, t, bytes);
    if (!t->done) *left |= 1u << t->root;
  }
  if (moved) world_ring(comm);
  return moved;
}

static int place_parcels(task *first) {
  for (task *t = first; t; t = t->next) {
    size_t bytes = t->count * dtype_bytes(t->dtype);
    if (t->kind == SEND && !(t->send = place(t->send, bytes))) return 0;
    if (t->kind == RECV && !(t->recv = place(t->recv, bytes))) return 0;
    t->done = t->kind != SEND && t->kind != RECV;
  }
  return 1;
}

static void run_parcels(ncclComm_t comm, task *first) {
  unsigned left = 1;
  if (!place_parcels(first)) return;
  while (left) {
    int heard = world_heard(comm);
    if (!step(comm, first, &left) && left && !world_pause(comm, heard, left)) return;
  }
}

void work_run(void *argument) {
  bundle *b = argument;
  ncclComm_t comm = b->comm;
  if (atomic_load(&comm->stop) || comm->stopped) return;
  fault met = standin_fault("collective");
  if (met.kind == FAULT_REMOTE) atomic_store(&comm->state, ncclRemoteError);
  if (met.kind == FAULT_CODE) atomic_store(&comm->state, met.code);
  if (met.kind == FAULT_HANG || met.kind == FAULT_REMOTE || met.kind == FAULT_CODE) {
    world_hang(comm);
    return;
  }
  for (task *t = b->first; t; t = t->next) {
    t->wrong |= met.kind == FAULT_WRONG;
    if (t->kind != SEND && t->kind != RECV && !run_collective(comm, t)) return;
  }
  run_parcels(comm, b->first);
}
