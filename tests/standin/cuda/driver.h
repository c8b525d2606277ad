/* What the files of the CUDA stand-in share: one lock, contexts, streams with their queues, marks and memory. */
#pragma once
#include "../shared/bridge.h"
#include "../shared/faults.h"
#include "../shared/order.h"
#include "abi.h"

#define API __attribute__((visibility("default")))
#define LENGTH(array) (sizeof(array) / sizeof *(array))

enum { MAX_DEVICES = 16, MAX_STACK = 32 };

/* ---- lock.c: everything below is guarded by one lock; one bell tells that something changed */
void driver_lock(void);
void driver_unlock(void);
void driver_wait(void); /* gives the lock back until the bell rings */
void driver_ring(void);
double driver_now(void); /* milliseconds */
void *cell_new(void);    /* zeroed memory of CELL bytes that ThreadSanitizer does not watch; needs the lock */
void cell_free(void *cell);
void *order_token(void); /* an address that is never used again; needs the lock */
enum { CELL = 256 };

/* ---- device.c and context.c */
struct context {
  int device, retained, in_use;
  unsigned flags;
  CUstream legacy;
};

enum needs { NEEDS_NOTHING, NEEDS_DRIVER, NEEDS_CONTEXT };

/* Begins every function: its injected faults, then initialization, then a current context and a device that works. */
CUresult driver_enter(const char *function, enum needs needs);
#define ENTER(needs)                                      \
  do {                                                    \
    CUresult entered = driver_enter(__func__, needs);     \
    if (entered != CUDA_SUCCESS) return entered;          \
  } while (0)

extern _Atomic int driver_broken; /* the status of a device that had a fault */
int driver_ready(void);
int device_count(void);
int device_known(CUdevice device);
CUcontext context_current(void);
CUcontext context_of_device(int device);

/* ---- memory.c */
void *memory_range(CUdeviceptr pointer, size_t bytes); /* device memory or pinned host memory; NULL if not all of it */
void *memory_any(CUdeviceptr pointer, size_t bytes);   /* also ordinary host memory */
CUresult memory_new(CUdeviceptr *pointer, size_t bytes, int device);
CUresult memory_release(CUdeviceptr pointer);

/* ---- stream.c: a queue with a thread. The end of each piece of work is a mark. */
struct mark {
  int refs, done;
  double time;
  void *order;
};

typedef struct work {
  struct work *next;
  standin_work run, finish;
  void *argument;
  struct mark *after, *end; /* waits for the one, completes the other */
  void *order;
} work;

struct stream {
  CUstream next;
  CUcontext context;
  unsigned flags;
  int priority, closing, pending;
  unsigned long long id;
  work *head, *tail;
  struct mark *last; /* the end of what was enqueued last */
  struct capture *capture;
};

struct mark *mark_keep(struct mark *mark);
void mark_drop(struct mark *mark);
void mark_await(struct mark *mark); /* with the lock held */
CUstream stream_find(CUcontext context, CUstream handle); /* NULL if the handle is none; needs the lock */
/* Enqueues; the lock must be held, and the stream must not be capturing. */
void stream_push(CUstream stream, standin_work run, standin_work finish, void *argument, struct mark *after);
/* The same for a handle that a caller gave, capture included. Takes the lock. */
CUresult stream_submit(CUstream handle, standin_work run, standin_work finish, void *argument);
void context_drain(CUcontext context); /* needs the lock */

void capture_end_everywhere(struct capture *capture); /* takes every stream out of a capture; needs the lock */

/* ---- capture.c: all need the lock */
struct capture {
  int refs, status, mode;
  unsigned long long id, owner;
  CUstream origin;
  struct node *nodes;
};
int capture_status(CUstream stream);
void capture_add(CUstream stream);
void capture_join(CUstream stream, struct capture *capture);
void capture_leave(struct capture *capture);
void capture_abandon(CUstream stream); /* the stream is destroyed; with an origin its capture ends */
CUresult capture_refuse(CUstream stream); /* for calls that a capturing stream forbids: invalidates, returns 900 */
CUresult capture_unsafe(void);            /* for calls that a global capture forbids everywhere */
CUresult capture_implicit(CUcontext context, CUstream stream); /* for use of the legacy stream beside a capture */

/* ---- graph.c: all need the lock */
struct node {
  struct node *next;
  int type;
  standin_launch launch; /* NULL: nothing to run, or nothing that can be run again */
  standin_work drop;     /* when nobody has it any more */
  void *argument;
};
void node_add(struct node **first, struct node what);
void nodes_drop(struct node *first);
CUgraph graph_new(struct node *first);
int standin_host_node(void *argument, void *stream);

/* ---- kernels.c: the only memory accesses that ThreadSanitizer watches */
void device_copy(void *target, const void *source, size_t bytes);
void device_fill(void *target, uint64_t value, size_t width, size_t count);
