/* What the files of the NCCL stand-in share: the communicator, the memory where ranks meet, tasks, jobs and the log. */
#pragma once
#include "../shared/bridge.h"
#include "../shared/faults.h"
#include "abi.h"

#include <stdatomic.h>

#define API __attribute__((visibility("default")))
#define LENGTH(array) (sizeof(array) / sizeof *(array))

enum { MAX_RANKS = 16, STAGE = 1 << 18, PARCEL = 1 << 16, POSTS = 8, MAX_OPS = 64, MAX_LIST = 256 };

/* ---- world.c: memory that all ranks of a communicator map. It has no name: a rank opens it through /proc of the
   process that made the unique ID, so no ending leaves anything behind. */
typedef struct {
  int kind, dtype, op, root;
  uint64_t count;
} signature;

typedef struct { /* what a rank says in one split, shrink or window registration */
  _Atomic uint64_t turn, id_turn;
  int color, key;
  ncclUniqueId id;
} post;

typedef struct {
  _Atomic int claimed, ready, connected, destroying, linked[MAX_RANKS];
  int version, device, number, bus;
  unsigned char uuid[16];
  uint64_t host;
  _Atomic uint64_t step;
  signature next;
  post posts[POSTS];
} seat;

typedef struct { /* from one rank to another; `sent` and `taken` count parcels */
  _Atomic uint64_t sent, taken;
  uint64_t total, length;
  char data[PARCEL];
} mailbox;

typedef struct {
  unsigned char key[8];
  _Atomic int ranks, bell;
  seat seats[MAX_RANKS];
  mailbox boxes[MAX_RANKS][MAX_RANKS];
  char stage[MAX_RANKS][STAGE];
} world;

enum { COMM_MAGIC = 0x4e43434c };

struct comm {
  int magic, rank, size, device, blocking, lazy;
  world *world;
  int file;
  void *context;
  char network[16];
  ncclUniqueId id;
  _Atomic int state;       /* what ncclCommGetAsyncError says */
  _Atomic int stop;        /* ends every wait of this communicator */
  _Atomic int outstanding; /* work on streams, and jobs on threads */
  _Atomic int captured;    /* operations that graphs hold */
  _Atomic int inside; /* threads that put work on streams */
  int stuck, ring, finalized, revoked, stopped, links[MAX_RANKS];
  unsigned suspects;       /* peers that are gone, a bit each; for the thread that runs operations */
  uint64_t step, turn;
  ncclComm_t parent; /* while it is being made from that one */
  standin_mark *last_mark;
  struct { int used, dtype, residence; double real; int64_t integer; void *device; } ops[MAX_OPS];
  void *registered[MAX_LIST], *windows[MAX_LIST];
};

ncclResult_t world_make(ncclUniqueId *id);
ncclResult_t world_open(ncclComm_t comm); /* waits for a maker that is late, until `stop` */
void world_forget_made(ncclComm_t comm);  /* all ranks are in: the maker's own handle is not needed any more */
void world_close(ncclComm_t comm);
void world_sit(ncclComm_t comm); /* lets the others see whether this rank lives */
int world_heard(ncclComm_t comm);
/* Waits for the bell, on behalf of something that the given peers (a bit each) have to do; 0 when the communicator is
   stopped. */
int world_pause(ncclComm_t comm, int heard, unsigned peers);
void world_ring(ncclComm_t comm);
void world_hang(ncclComm_t comm); /* until stopped */

/* Waits for a condition over shared memory that a peer must meet; leaves with `result` when the communicator stops. A
   lost peer is seen only where operations run: NO_PEER elsewhere. */
#define NO_PEER 0u
#define AWAIT_PEERS(comm, condition, peers, result)                              \
  for (int heard_ = world_heard(comm); !(condition); heard_ = world_heard(comm)) \
    if (!world_pause(comm, heard_, peers)) return result
#define AWAIT(comm, condition, result) AWAIT_PEERS(comm, condition, NO_PEER, result)

/* ---- log.c */
enum { SUB_INIT = 1, SUB_ENV = 2, SUB_BOOTSTRAP = 4, SUB_NET = 8, SUB_P2P = 16, SUB_SHM = 32, SUB_DESTROY = 64 };
int nccl_version(void);
long setting(const char *name, long otherwise);
void log_info(ncclComm_t comm, int subsystems, const char *format, ...) __attribute__((format(printf, 3, 4)));
void log_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void log_version(ncclComm_t comm);
void log_environment(ncclComm_t comm);

/* ---- cuda.c: the CUDA stand-in, opened at the first need */
typedef struct {
  int (*enqueue)(void *, void *, standin_work, standin_work, void *);
  int (*capture)(void *, void *, standin_launch, standin_work, void *, int);
  standin_mark *(*mark_of)(void *, void *);
  void (*mark_drop)(standin_mark *);
  void (*follow)(void *, void *, standin_mark *);
  void *(*shadow)(uint64_t, size_t);
  void (*fail)(int);
  int (*identity)(int, unsigned char *, int *);
  int (*get_device)(int *), (*get_context)(void **);
  int (*allocate)(uint64_t *, size_t), (*release)(uint64_t);
  int (*error_text)(int, const char **);
} cuda_door;
const cuda_door *cuda(void); /* NULL where there is none */
ncclResult_t cuda_current(int *device, void **context);

/* ---- config.c */
ncclResult_t config_read(const ncclConfig_t *given, ncclConfig_t *config);

/* ---- init.c and connect.c */
ncclComm_t comm_new(int size, int rank, const ncclUniqueId *id, const ncclConfig_t *config, int device, void *context);
ncclResult_t comm_join(ncclComm_t comm, const char *function); /* meets the other ranks */
ncclResult_t connect_all(ncclComm_t comm);
void connect_announce(ncclComm_t comm, int peer, int sends);
ncclResult_t connect_await(ncclComm_t comm, int peer, int sends);
int crosses_network(ncclComm_t comm, int peer);

/* ---- comm.c */
ncclResult_t comm_valid(ncclComm_t comm, const char *function);
ncclResult_t comm_ready(ncclComm_t comm);
void comm_settle(ncclComm_t comm); /* waits until nothing is outstanding */
void comm_free(ncclComm_t comm);

/* ---- group.c */
typedef enum {
  ALL_REDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALL_GATHER, GATHER, SCATTER, ALL_TO_ALL, SEND, RECV,
} kind;

typedef struct task {
  struct task *next;
  kind kind;
  const void *send;
  void *recv, *stream;
  uint64_t count, offset;
  int dtype, op, root, wrong, done, captured;
  struct { int residence; double real; int64_t integer; void *device; } by; /* of an operator of one's own, read at the call */
} task;

typedef struct bundle { /* what a group holds for one communicator */
  struct bundle *next;
  ncclComm_t comm;
  task *first;
} bundle;

typedef struct job { /* work of a communicator on the host: run at once, or on a thread */
  struct job *next;
  ncclComm_t comm; /* whose state tells how it goes */
  ncclResult_t (*run)(struct job *);
  int color, key, flags, excluded_count, excluded[MAX_RANKS];
  ncclComm_t *out;
  void *buffer, **window;
  size_t bytes;
  const char *name;
  int has_config;
  ncclConfig_t config;
} job;

void group_enter(void);
int group_depth(void);
ncclResult_t group_error(ncclResult_t result); /* remembers an error inside a group; returns it */
ncclResult_t group_task(ncclComm_t comm, task wanted);
ncclResult_t group_job(job wanted);

/* Every function begins so: meets its injected faults. */
#define MEET_FAULT(comm)                                               \
  do {                                                                 \
    ncclResult_t met_ = fault_meet(comm, __func__);                    \
    if (met_) return group_error(met_);                                \
  } while (0)
const char *ncclGetErrorString(ncclResult_t result);
ncclResult_t fault_meet(ncclComm_t comm, const char *function);

/* ---- work.c */
void work_run(void *bundle);
void work_finish(void *bundle);

/* ---- arithmetic.c: the only code that touches device memory; ThreadSanitizer watches it */
size_t dtype_bytes(int dtype);
void buffer_copy(void *target, const void *source, size_t bytes);
void buffer_combine(void *total, const void *more, size_t count, int dtype, int op);
void buffer_scale(void *buffer, size_t count, int dtype, double real, int64_t integer);
void buffer_divide(void *buffer, size_t count, int dtype, int by);
int dtype_is_integer(int dtype);
void scalar_read(const void *scalar, int dtype, double *real, int64_t *integer);
