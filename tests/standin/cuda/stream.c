/* Streams: each is a queue that a thread of its own serves, so that work is asynchronous and ordered as on a device. */
#define _GNU_SOURCE
#include "driver.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>

#define MOST_PENDING 1024 /* what a stream takes before it holds whoever puts more on it */

static CUstream streams;
static unsigned long long next_id = 1;
static _Thread_local CUstream per_thread;

/* ---- marks */

struct mark *mark_keep(struct mark *mark) {
  if (mark) mark->refs++;
  return mark;
}

void mark_drop(struct mark *mark) {
  if (mark && --mark->refs == 0) cell_free(mark);
}

void mark_await(struct mark *mark) {
  if (!mark) return;
  mark_keep(mark);
  while (!mark->done && !atomic_load(&driver_broken)) driver_wait(); /* a broken device finishes nothing */
  ORDER_ACQUIRE(mark->order);
  mark_drop(mark);
}

/* ---- the thread of a stream */

static void carry_out(work *w) {
  fault found = standin_fault("work");
  if (found.kind == FAULT_CODE) standin_break(found.code);
  if (w->run && !atomic_load(&driver_broken)) w->run(w->argument);
  if (w->finish) w->finish(w->argument);
}

static void complete(CUstream stream, work *w) {
  stream->head = w->next;
  stream->pending--;
  if (!stream->head) stream->tail = NULL;
  w->end->done = 1;
  w->end->time = driver_now();
  ORDER_RELEASE(w->end->order);
  mark_drop(w->after);
  mark_drop(w->end);
  cell_free(w);
  driver_ring();
}

static void *serve(void *argument) {
  CUstream stream = argument;
  char name[16];
  sigset_t all;
  sigfillset(&all); /* signals are for the program's own threads */
  pthread_sigmask(SIG_SETMASK, &all, NULL);
  driver_lock();
  snprintf(name, sizeof name, "stream %llu", stream->id);
  pthread_setname_np(pthread_self(), name);
  for (;;) {
    while (!stream->head && !stream->closing) driver_wait();
    work *w = stream->head;
    if (!w) break;
    mark_await(w->after);
    driver_unlock();
    ORDER_ACQUIRE(w->order);
    carry_out(w);
    driver_lock();
    complete(stream, w);
  }
  for (CUstream *at = &streams; *at; at = &(*at)->next)
    if (*at == stream) {
      *at = stream->next;
      break;
    }
  mark_drop(stream->last);
  cell_free(stream);
  driver_unlock();
  return NULL;
}

static CUstream stream_new(CUcontext context, unsigned flags, int priority) {
  pthread_t thread;
  CUstream stream = cell_new();
  stream->context = context;
  stream->flags = flags;
  stream->priority = priority;
  stream->id = next_id++;
  stream->next = streams;
  streams = stream;
  if (pthread_create(&thread, NULL, serve, stream)) __builtin_trap();
  pthread_detach(thread);
  return stream;
}

CUstream stream_find(CUcontext context, CUstream handle) {
  uintptr_t number = (uintptr_t)handle;
  if (number == STREAM_PER_THREAD) {
    if (!per_thread || per_thread->context != context) per_thread = stream_new(context, 0, 0);
    return per_thread;
  }
  if (number <= STREAM_LEGACY) {
    if (!context->legacy) context->legacy = stream_new(context, 0, 0);
    return context->legacy;
  }
  for (CUstream s = streams; s; s = s->next)
    if (s == handle) return s->closing ? NULL : s;
  return NULL;
}

/* ---- enqueueing */

void stream_push(CUstream stream, standin_work run, standin_work finish, void *argument, struct mark *after) {
  work *w = cell_new();
  struct mark *end = cell_new();
  w->run = run;
  w->finish = finish;
  w->argument = argument;
  w->after = mark_keep(after);
  w->end = mark_keep(end);
  w->order = order_token();
  end->order = order_token();
  mark_drop(stream->last);
  stream->last = mark_keep(end);
  if (stream->tail) stream->tail->next = w;
  else stream->head = w;
  stream->tail = w;
  stream->pending++;
  ORDER_RELEASE(w->order);
  driver_ring();
}

static int idle(CUstream stream) { return !stream->last || stream->last->done; }

/* The legacy stream waits for every blocking stream of its context, and each of them for it. */
static void legacy_order(CUstream stream) {
  CUstream legacy = stream->context->legacy;
  if (stream == legacy) {
    for (CUstream s = streams; s; s = s->next)
      if (s != legacy && s->context == stream->context && !(s->flags & CU_STREAM_NON_BLOCKING) && s->last)
        stream_push(legacy, NULL, NULL, NULL, s->last);
  } else if (legacy && !(stream->flags & CU_STREAM_NON_BLOCKING) && legacy->last) {
    stream_push(stream, NULL, NULL, NULL, legacy->last);
  }
}

/* Finds a stream, and waits while it is full; the lock must be held. */
static CUstream find_room(CUcontext context, CUstream handle) {
  CUstream stream = stream_find(context, handle);
  while (stream && stream->pending >= MOST_PENDING && !atomic_load(&driver_broken)) {
    driver_wait();
    stream = stream_find(context, handle); /* it may be gone by now */
  }
  return stream;
}

static CUresult submit(CUcontext context, CUstream handle, standin_work run, standin_work finish, void *argument) {
  driver_lock();
  CUstream stream = find_room(context, handle);
  CUresult status = stream ? capture_implicit(context, stream) : CUDA_ERROR_INVALID_HANDLE;
  int capturing = !status && capture_status(stream) != CAPTURE_NONE;
  if (capturing && capture_status(stream) == CAPTURE_INVALIDATED) status = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!status && capturing) capture_add(stream);
  if (!status && !capturing) {
    legacy_order(stream);
    stream_push(stream, run, finish, argument, NULL);
  }
  driver_unlock();
  if (!status && capturing && finish) finish(argument); /* a graph is never run */
  return status;
}

CUresult stream_submit(CUstream handle, standin_work run, standin_work finish, void *argument) {
  return submit(context_current(), handle, run, finish, argument);
}

API int standin_enqueue(void *context, void *stream, standin_work run, standin_work finish, void *argument) {
  int broken = atomic_load(&driver_broken);
  return broken ? broken : submit(context, stream, run, finish, argument);
}

API standin_mark *standin_mark_of(void *context, void *handle) {
  driver_lock();
  CUstream stream = stream_find(context, handle);
  struct mark *mark = stream ? mark_keep(stream->last) : NULL;
  driver_unlock();
  return mark;
}

API void standin_mark_drop(standin_mark *mark) {
  driver_lock();
  mark_drop(mark);
  driver_unlock();
}

API void standin_follow(void *context, void *handle, standin_mark *mark) {
  driver_lock();
  CUstream stream = stream_find(context, handle);
  if (stream && mark && capture_status(stream) == CAPTURE_NONE) stream_push(stream, NULL, NULL, NULL, mark);
  driver_unlock();
}

void context_drain(CUcontext context) {
  int waited;
  do {
    waited = 0;
    for (CUstream s = streams; s; s = s->next) {
      if (s->context != context || !s->last) continue;
      waited = !idle(s);
      mark_await(s->last);
      if (waited) break; /* the list may have changed meanwhile */
    }
  } while (waited && !atomic_load(&driver_broken));
}

void capture_end_everywhere(struct capture *capture) {
  for (CUstream s = streams; s; s = s->next)
    if (s->capture == capture) {
      s->capture = NULL;
      capture_leave(capture);
    }
}

/* ---- the API */

API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  ENTER(NEEDS_CONTEXT);
  if (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  driver_lock();
  *stream = stream_new(context_current(), flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
  driver_unlock();
  return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream *stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

/* Returns at once; what is queued still runs. */
API CUresult cuStreamDestroy_v2(CUstream handle) {
  ENTER(NEEDS_DRIVER);
  if ((uintptr_t)handle <= STREAM_PER_THREAD) return CUDA_ERROR_INVALID_HANDLE;
  driver_lock();
  CUstream stream = stream_find(NULL, handle);
  if (stream) {
    stream->closing = 1;
    if (stream->capture) capture_abandon(stream);
    driver_ring();
  }
  driver_unlock();
  return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* Begins a function that asks about a stream: finds it, with the lock held whatever is returned. */
static CUresult look_up(CUstream handle, CUstream *stream) {
  driver_lock();
  *stream = stream_find(context_current(), handle);
  return *stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuStreamQuery(CUstream handle) {
  ENTER(NEEDS_CONTEXT);
  CUstream stream;
  CUresult status = look_up(handle, &stream);
  if (!status) status = capture_refuse(stream);
  if (!status && !idle(stream)) status = CUDA_ERROR_NOT_READY;
  else if (!status) mark_await(stream->last);
  driver_unlock();
  return status ? status : atomic_load(&driver_broken);
}

API CUresult cuStreamSynchronize(CUstream handle) {
  ENTER(NEEDS_CONTEXT);
  CUstream stream;
  CUresult status = look_up(handle, &stream);
  if (!status) status = capture_refuse(stream);
  if (!status && stream == stream->context->legacy) legacy_order(stream);
  if (!status) mark_await(stream->last);
  driver_unlock();
  return status ? status : atomic_load(&driver_broken);
}

#define STREAM_QUESTION(name, type, expression)       \
  API CUresult name(CUstream handle, type *answer) {  \
    ENTER(NEEDS_CONTEXT);                             \
    CUstream stream;                                  \
    CUresult status = look_up(handle, &stream);       \
    if (!status) *answer = expression;                \
    driver_unlock();                                  \
    return status;                                    \
  }

STREAM_QUESTION(cuStreamGetFlags, unsigned, stream->flags)
STREAM_QUESTION(cuStreamGetPriority, int, stream->priority)
STREAM_QUESTION(cuStreamGetId, unsigned long long, stream->id)
STREAM_QUESTION(cuStreamGetDevice, CUdevice, stream->context->device)
STREAM_QUESTION(cuStreamGetCtx, CUcontext, stream->context)

API CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext *context, void **green) {
  *green = NULL;
  return cuStreamGetCtx(handle, context);
}
