/* Events: a name for the end of what a stream held when the event was recorded. */
#include "driver.h"

#include <stdatomic.h>

enum { MAGIC = 0x45564e54 };

struct event {
  int magic;
  unsigned flags;
  struct mark *mark;       /* NULL if never recorded: such an event is complete */
  struct capture *capture; /* instead, if it was recorded in one */
};

static void forget(CUevent event) {
  mark_drop(event->mark);
  if (event->capture) capture_leave(event->capture);
  event->mark = NULL;
  event->capture = NULL;
}

static int valid(CUevent event) { return event && event->magic == MAGIC; }

API CUresult cuEventCreate(CUevent *event, unsigned flags) {
  ENTER(NEEDS_CONTEXT);
  unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  if (flags & ~known) return CUDA_ERROR_INVALID_VALUE;
  driver_lock();
  *event = cell_new();
  (*event)->magic = MAGIC;
  (*event)->flags = flags;
  driver_unlock();
  return CUDA_SUCCESS;
}

API CUresult cuEventDestroy_v2(CUevent event) {
  ENTER(NEEDS_DRIVER);
  if (!valid(event)) return CUDA_ERROR_INVALID_HANDLE;
  driver_lock();
  forget(event);
  event->magic = 0;
  cell_free(event);
  driver_unlock();
  return CUDA_SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream handle) {
  ENTER(NEEDS_CONTEXT);
  if (!valid(event)) return CUDA_ERROR_INVALID_HANDLE;
  CUresult status = stream_submit(handle, NULL, NULL, NULL); /* an end of its own, so that its time is right */
  if (status) return status;
  driver_lock();
  CUstream stream = stream_find(context_current(), handle);
  forget(event);
  if (stream->capture) {
    event->capture = stream->capture;
    event->capture->refs++;
  } else {
    event->mark = mark_keep(stream->last);
  }
  driver_unlock();
  return CUDA_SUCCESS;
}

API CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned flags) {
  return flags ? CUDA_ERROR_INVALID_VALUE : cuEventRecord(event, handle);
}

/* What a stream waits for is fixed here: recording the event again later changes nothing. */
API CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
  ENTER(NEEDS_CONTEXT);
  if (!valid(event)) return CUDA_ERROR_INVALID_HANDLE;
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  driver_lock();
  CUstream stream = stream_find(context_current(), handle);
  CUresult status = stream ? capture_implicit(context_current(), stream) : CUDA_ERROR_INVALID_HANDLE;
  if (!status && stream->capture && event->mark) {
    stream->capture->status = CAPTURE_INVALIDATED;
    status = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  } else if (!status && event->capture) {
    capture_join(stream, event->capture);
  } else if (!status && event->mark && !stream->capture) {
    stream_push(stream, NULL, NULL, NULL, event->mark);
  }
  driver_unlock();
  return status;
}

static CUresult refuse_captured(CUevent event) {
  if (!event->capture) return CUDA_SUCCESS;
  event->capture->status = CAPTURE_INVALIDATED;
  return CUDA_ERROR_CAPTURED_EVENT;
}

API CUresult cuEventQuery(CUevent event) {
  ENTER(NEEDS_CONTEXT);
  if (!valid(event)) return CUDA_ERROR_INVALID_HANDLE;
  driver_lock();
  CUresult status = refuse_captured(event);
  if (!status) status = capture_unsafe();
  if (!status && event->mark && !event->mark->done) status = CUDA_ERROR_NOT_READY;
  else if (!status) mark_await(event->mark);
  driver_unlock();
  return status ? status : atomic_load(&driver_broken);
}

API CUresult cuEventSynchronize(CUevent event) {
  ENTER(NEEDS_CONTEXT);
  if (!valid(event)) return CUDA_ERROR_INVALID_HANDLE;
  driver_lock();
  CUresult status = refuse_captured(event);
  if (!status) mark_await(event->mark);
  driver_unlock();
  return status ? status : atomic_load(&driver_broken);
}

API CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
  ENTER(NEEDS_CONTEXT);
  if (!valid(start) || !valid(end) || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING))
    return CUDA_ERROR_INVALID_HANDLE;
  driver_lock();
  CUresult status = start->mark && end->mark ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  if (!status && !(start->mark->done && end->mark->done)) status = CUDA_ERROR_NOT_READY;
  if (!status) *milliseconds = (float)(end->mark->time - start->mark->time);
  driver_unlock();
  return status;
}
