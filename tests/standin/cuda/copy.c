/* Copies, fills and host functions on streams. */
#include "driver.h"

#include <stdatomic.h>
#include <stdlib.h>

typedef struct {
  CUdeviceptr target, source; /* for a fill, the source is the value */
  size_t bytes, width;        /* the width of a fill's element */
} transfer;

static void run_copy(void *argument) {
  transfer *t = argument;
  void *target = memory_any(t->target, t->bytes), *source = memory_any(t->source, t->bytes);
  if (target && source) device_copy(target, source, t->bytes);
  else standin_break(CUDA_ERROR_ILLEGAL_ADDRESS);
}

static void run_fill(void *argument) {
  transfer *t = argument;
  void *target = memory_range(t->target, t->bytes);
  if (target) device_fill(target, t->source, t->width, t->bytes / t->width);
  else standin_break(CUDA_ERROR_ILLEGAL_ADDRESS);
}

static CUresult enqueue(CUstream stream, standin_work run, transfer t) {
  if (!t.bytes) return CUDA_SUCCESS;
  transfer *copy = malloc(sizeof *copy);
  *copy = t;
  CUresult status = stream_submit(stream, run, free, copy);
  if (status) free(copy);
  return status;
}

/* A call without a stream: on the legacy stream, and it waits. */
static CUresult at_once(standin_work run, transfer t) {
  driver_lock();
  CUresult status = capture_unsafe();
  driver_unlock();
  if (!status) status = enqueue(NULL, run, t);
  if (status) return status;
  driver_lock();
  mark_await(stream_find(context_current(), NULL)->last);
  driver_unlock();
  return atomic_load(&driver_broken);
}

/* Each side of a copy must be what the name says; a wrong host pointer is found by the host, a wrong device pointer
   when the copy is enqueued, as the driver does. */
static int is_device(CUdeviceptr pointer) { return memory_range(pointer, 1) != NULL; }

#define COPY(name, target_type, source_type, check)                                                      \
  API CUresult name##Async_v2(target_type target, source_type source, size_t bytes, CUstream stream) {   \
    ENTER(NEEDS_CONTEXT);                                                                                 \
    if (bytes && !(check)) return CUDA_ERROR_INVALID_VALUE;                                               \
    return enqueue(stream, run_copy, (transfer){(CUdeviceptr)target, (CUdeviceptr)source, bytes, 0});     \
  }                                                                                                       \
  API CUresult name##_v2(target_type target, source_type source, size_t bytes) {                          \
    ENTER(NEEDS_CONTEXT);                                                                                 \
    if (bytes && !(check)) return CUDA_ERROR_INVALID_VALUE;                                               \
    return at_once(run_copy, (transfer){(CUdeviceptr)target, (CUdeviceptr)source, bytes, 0});             \
  }

COPY(cuMemcpyHtoD, CUdeviceptr, const void *, is_device(target))
COPY(cuMemcpyDtoH, void *, CUdeviceptr, is_device(source))
COPY(cuMemcpyDtoD, CUdeviceptr, CUdeviceptr, is_device(target) && is_device(source))

API CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
  ENTER(NEEDS_CONTEXT);
  return enqueue(stream, run_copy, (transfer){target, source, bytes, 0});
}

API CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t bytes) {
  ENTER(NEEDS_CONTEXT);
  return at_once(run_copy, (transfer){target, source, bytes, 0});
}

#define FILL(bits, type)                                                                                        \
  API CUresult cuMemsetD##bits##Async(CUdeviceptr target, type value, size_t count, CUstream stream) {          \
    ENTER(NEEDS_CONTEXT);                                                                                       \
    if (target % sizeof(type) || (count && !is_device(target))) return CUDA_ERROR_INVALID_VALUE;                \
    return enqueue(stream, run_fill, (transfer){target, value, count * sizeof(type), sizeof(type)});            \
  }                                                                                                             \
  API CUresult cuMemsetD##bits##_v2(CUdeviceptr target, type value, size_t count) {                             \
    return cuMemsetD##bits##Async(target, value, count, NULL);                                                  \
  }

FILL(8, unsigned char)
FILL(16, unsigned short)
FILL(32, unsigned)

typedef struct {
  CUhostFn function;
  void *argument;
} host_call;

static void run_host(void *argument) {
  host_call *call = argument;
  call->function(call->argument);
}

API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
  ENTER(NEEDS_CONTEXT);
  host_call *call = malloc(sizeof *call);
  *call = (host_call){function, argument};
  CUresult status = stream_submit(stream, run_host, free, call);
  if (status) free(call);
  return status;
}

API CUresult cuLaunchHostFunc_v2(CUstream stream, CUhostFn function, void *argument, unsigned mode) {
  (void)mode;
  return cuLaunchHostFunc(stream, function, argument);
}
