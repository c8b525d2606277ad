/* Groups: what a thread collects between start and end, and how it is launched when the outermost one ends. */
#define _GNU_SOURCE
#include "comm.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_STREAMS = 32 };

static _Thread_local int depth;
static _Thread_local ncclResult_t first_error;
static _Thread_local bundle *bundles;
static _Thread_local job *jobs;

void group_enter(void) { depth++; }
int group_depth(void) { return depth; }

ncclResult_t group_error(ncclResult_t result) {
  if (depth && result && result != ncclInProgress && !first_error) first_error = result;
  return result;
}

/* ---- a thread for what a non-blocking communicator does */

typedef struct {
  ncclComm_t comm;
  ncclResult_t (*run)(void *);
  void *argument;
} errand;

static void *run_errand(void *argument) {
  errand *e = argument;
  ncclComm_t comm = e->comm;
  ncclResult_t result = e->run(e->argument);
  free(e);
  int expected = ncclInProgress; /* an error that came meanwhile stays */
  atomic_compare_exchange_strong(&comm->state, &expected, result);
  atomic_fetch_sub(&comm->outstanding, 1);
  return NULL;
}

/* Runs at once where the communicator blocks, else on a thread. It is outstanding meanwhile, so an abort from another
   thread waits for it before it frees the communicator. */
static ncclResult_t run_for(ncclComm_t comm, ncclResult_t (*run)(void *), void *argument) {
  pthread_t thread;
  sigset_t all, before;
  atomic_fetch_add(&comm->outstanding, 1);
  if (comm->blocking) {
    ncclResult_t result = run(argument);
    if (result) atomic_store(&comm->state, result);
    atomic_fetch_sub(&comm->outstanding, 1);
    return result;
  }
  errand *e = malloc(sizeof *e);
  *e = (errand){comm, run, argument};
  atomic_store(&comm->state, ncclInProgress);
  sigfillset(&all); /* signals are for the program's own threads */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  if (pthread_create(&thread, NULL, run_errand, e)) abort();
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_detach(thread);
  return ncclInProgress;
}

static ncclResult_t run_job(void *argument) {
  job *j = argument;
  ncclResult_t result = j->run(j);
  free(j);
  return result;
}

/* ---- launching */

static ncclResult_t connect_bundle(bundle *b) {
  ncclResult_t result = ncclSuccess;
  for (task *t = b->first; t; t = t->next)
    if (t->kind == SEND || t->kind == RECV) connect_announce(b->comm, t->root, t->kind == SEND);
  for (task *t = b->first; t && !result; t = t->next)
    result = t->kind != SEND && t->kind != RECV ? connect_all(b->comm)
                                                : connect_await(b->comm, t->root, t->kind == SEND);
  return result;
}

static void drop_bundle(bundle *b) {
  for (task *t = b->first, *next; t; t = next) {
    next = t->next;
    free(t);
  }
  free(b);
}

/* ---- operations in graphs */

static ncclResult_t enqueue_bundle(bundle *b);

/* A launch does the operations on its own stream. */
static int launch_captured(void *argument, void *stream) {
  bundle *held = argument, *b = calloc(1, sizeof *b);
  task **at = &b->first;
  b->comm = held->comm;
  for (task *t = held->first; t; t = t->next, at = &(*at)->next) {
    *at = malloc(sizeof **at);
    **at = *t;
    (*at)->stream = stream;
    (*at)->captured = 1;
  }
  return enqueue_bundle(b) ? 999 : 0;
}

static void drop_captured(void *argument) {
  bundle *b = argument;
  ncclComm_t comm = b->comm;
  drop_bundle(b);
  atomic_fetch_sub(&comm->captured, 1);
}

static int capture_bundle(bundle *b) {
  ncclComm_t comm = b->comm;
  int network = 0;
  for (int r = 0; r < comm->size; r++) network |= crosses_network(comm, r);
  atomic_fetch_add(&comm->captured, 1);
  if (cuda()->capture(comm->context, b->first->stream, launch_captured, drop_captured, b, network)) return 1;
  atomic_fetch_sub(&comm->captured, 1);
  return 0;
}

/* Operations of one communicator follow each other whatever their streams; several streams in one group are joined
   before the operation and forked behind it. */
static ncclResult_t enqueue_bundle(bundle *b) {
  ncclComm_t comm = b->comm;
  void *streams[MAX_STREAMS], *main_stream = b->first->stream;
  int count = 0;
  for (task *t = b->first; t; t = t->next) {
    int known = t->stream == main_stream;
    for (int i = 0; i < count; i++) known |= streams[i] == t->stream;
    if (!known && count < MAX_STREAMS) streams[count++] = t->stream;
  }
  if (!count && capture_bundle(b)) return ncclSuccess;
  if (comm->last_mark) cuda()->follow(comm->context, main_stream, comm->last_mark);
  for (int i = 0; i < count; i++) {
    standin_mark *mark = cuda()->mark_of(comm->context, streams[i]);
    if (mark) cuda()->follow(comm->context, main_stream, mark);
    if (mark) cuda()->mark_drop(mark);
  }
  atomic_fetch_add(&comm->outstanding, 1);
  int status = cuda()->enqueue(comm->context, main_stream, work_run, work_finish, b);
  if (status) {
    const char *text = "unknown";
    cuda()->error_text(status, &text);
    log_warn("Cuda failure %d '%s'", status, text);
    atomic_fetch_sub(&comm->outstanding, 1);
    drop_bundle(b);
    return ncclUnhandledCudaError;
  }
  if (comm->last_mark) cuda()->mark_drop(comm->last_mark);
  comm->last_mark = cuda()->mark_of(comm->context, main_stream);
  for (int i = 0; i < count && comm->last_mark; i++) cuda()->follow(comm->context, streams[i], comm->last_mark);
  return ncclSuccess;
}

static ncclResult_t launch_bundle(void *argument) {
  bundle *b = argument;
  ncclResult_t result = connect_bundle(b);
  if (!result) {
    ncclComm_t comm = b->comm; /* the bundle may be done with before the call is */
    atomic_fetch_add(&comm->inside, 1);
    result = enqueue_bundle(b);
    atomic_fetch_sub(&comm->inside, 1);
    return result;
  }
  drop_bundle(b);
  return result;
}

void work_finish(void *argument) {
  bundle *b = argument;
  ncclComm_t comm = b->comm;
  drop_bundle(b);
  atomic_fetch_sub(&comm->outstanding, 1);
}

/* Takes over what the group holds. Errors drop all of it. */
static ncclResult_t launch_group(ncclResult_t error) {
  bundle *b = bundles;
  job *j = jobs;
  ncclResult_t result = error;
  bundles = NULL;
  jobs = NULL;
  if (!result && b && j) {
    log_warn("Communicator functions and collectives cannot be mixed in one group");
    result = ncclInvalidUsage;
  }
  for (bundle *next; b; b = next) {
    next = b->next;
    if (result && result != ncclInProgress) {
      drop_bundle(b);
      continue;
    }
    ncclResult_t one = run_for(b->comm, launch_bundle, b);
    if (one) result = one;
  }
  for (job *next; j; j = next) {
    next = j->next;
    if (result && result != ncclInProgress) {
      free(j);
      continue;
    }
    ncclResult_t one = run_for(j->comm, run_job, j);
    if (one) result = one;
  }
  return result;
}

static bundle *bundle_of(ncclComm_t comm) {
  bundle **at = &bundles;
  while (*at && (*at)->comm != comm) at = &(*at)->next;
  if (!*at) {
    *at = calloc(1, sizeof **at);
    (*at)->comm = comm;
  }
  return *at;
}

ncclResult_t group_task(ncclComm_t comm, task wanted) {
  task **at = &bundle_of(comm)->first, *copy = malloc(sizeof *copy);
  while (*at) at = &(*at)->next;
  *copy = wanted;
  copy->next = NULL;
  *at = copy;
  return depth ? ncclSuccess : launch_group(ncclSuccess);
}

ncclResult_t group_job(job wanted) {
  job **at = &jobs, *copy = malloc(sizeof *copy);
  while (*at) at = &(*at)->next;
  *copy = wanted;
  copy->next = NULL;
  *at = copy;
  return depth ? ncclSuccess : launch_group(ncclSuccess);
}

/* ---- the API */

API ncclResult_t ncclGroupStart(void) {
  MEET_FAULT(NULL);
  depth++;
  return ncclSuccess;
}

static ncclResult_t leave(ncclResult_t *error) {
  *error = ncclSuccess;
  if (depth == 0) {
    log_warn("ncclGroupEnd: not in a group call.");
    return ncclInvalidUsage;
  }
  if (--depth == 0) {
    *error = first_error;
    first_error = ncclSuccess;
  }
  return ncclSuccess;
}

API ncclResult_t ncclGroupEnd(void) {
  ncclResult_t error, result = leave(&error);
  if (result || depth) return result;
  ncclResult_t injected = fault_meet(NULL, __func__);
  return launch_group(error ? error : injected);
}

API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info) {
  ncclResult_t error, result = leave(&error);
  if (result || depth) return result;
  if (info && info->magic != SIMULATION_MAGIC) {
    log_warn("ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER");
    error = ncclInvalidArgument;
  }
  if (!error && info) info->estimatedTime = 1.0f;
  result = launch_group(error ? error : ncclInvalidUsage); /* simulated: dropped, not run */
  return error ? error : result == ncclInvalidUsage ? ncclSuccess : result;
}
