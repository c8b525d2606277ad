/* Graph capture: which streams are in one, and the calls that spoil it. What is captured becomes nodes of a graph. */
#include "driver.h"

static unsigned long long next_capture = 1;
static CUstream capturing[64]; /* the origins of the captures that are not ended */
static _Thread_local int thread_mode = CAPTURE_GLOBAL;
static _Thread_local char thread_identity;

static unsigned long long this_thread(void) { return (uintptr_t)&thread_identity; }

int capture_status(CUstream stream) { return stream->capture ? stream->capture->status : CAPTURE_NONE; }

void capture_add(CUstream stream) { node_add(&stream->capture->nodes, (struct node){.type = NODE_KERNEL}); }

API int standin_capture(void *context, void *handle, standin_launch launch, standin_work drop, void *argument,
                        int by_host) {
  driver_lock();
  CUstream stream = stream_find(context, handle);
  int captured = stream && capture_status(stream) == CAPTURE_ACTIVE;
  if (captured) {
    struct node **nodes = &stream->capture->nodes;
    node_add(nodes, (struct node){.type = NODE_WAIT_EVENT});
    if (by_host) node_add(nodes, (struct node){.type = NODE_HOST, .launch = standin_host_node});
    node_add(nodes, (struct node){.type = NODE_KERNEL, .launch = launch, .drop = drop, .argument = argument});
    node_add(nodes, (struct node){.type = NODE_EVENT_RECORD});
  }
  driver_unlock();
  return captured;
}

void capture_leave(struct capture *capture) {
  if (--capture->refs) return;
  nodes_drop(capture->nodes);
  cell_free(capture);
}

void capture_join(CUstream stream, struct capture *capture) {
  if (stream->capture || capture->status != CAPTURE_ACTIVE) return;
  stream->capture = capture;
  capture->refs++;
}

CUresult capture_refuse(CUstream stream) {
  if (!stream->capture) return CUDA_SUCCESS;
  stream->capture->status = CAPTURE_INVALIDATED;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

/* A thread in relaxed mode may do anything; others meet the captures that their mode and the capture's cover. */
CUresult capture_unsafe(void) {
  CUresult status = CUDA_SUCCESS;
  if (thread_mode == CAPTURE_RELAXED) return status;
  for (size_t i = 0; i < LENGTH(capturing); i++) {
    struct capture *c = capturing[i] ? capturing[i]->capture : NULL;
    if (!c || c->mode == CAPTURE_RELAXED) continue;
    int own = c->owner == this_thread();
    if (!own && (c->mode == CAPTURE_THREAD_LOCAL || thread_mode == CAPTURE_THREAD_LOCAL)) continue;
    c->status = CAPTURE_INVALIDATED;
    status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return status;
}

/* A blocking stream whose capture stands beside the legacy stream, or NULL. */
static CUstream beside(CUcontext context, CUstream stream) {
  if (stream != context->legacy) return NULL;
  for (size_t i = 0; i < LENGTH(capturing); i++) {
    CUstream s = capturing[i];
    if (s && s->context == context && !(s->flags & CU_STREAM_NON_BLOCKING)) return s;
  }
  return NULL;
}

CUresult capture_implicit(CUcontext context, CUstream stream) {
  CUstream captured = beside(context, stream);
  if (!captured) return CUDA_SUCCESS;
  captured->capture->status = CAPTURE_INVALIDATED;
  return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

/* A question about the legacy stream has the same answer, but leaves the capture as it is. */
static CUresult asked(CUcontext context, CUstream stream) {
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  return beside(context, stream) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

static CUresult begin(CUstream stream, int mode) {
  if (stream == stream->context->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
  for (size_t i = 0; i < LENGTH(capturing); i++) {
    if (capturing[i]) continue;
    struct capture *c = cell_new();
    c->refs = 1;
    c->status = CAPTURE_ACTIVE;
    c->mode = mode;
    c->id = next_capture++;
    c->owner = this_thread();
    c->origin = stream;
    stream->capture = c;
    capturing[i] = stream;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
  ENTER(NEEDS_CONTEXT);
  if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  driver_lock();
  CUstream stream = stream_find(context_current(), handle);
  CUresult status = stream ? begin(stream, mode) : CUDA_ERROR_INVALID_HANDLE;
  driver_unlock();
  return status;
}

static void close_capture(struct capture *capture) {
  for (size_t i = 0; i < LENGTH(capturing); i++)
    if (capturing[i] == capture->origin) capturing[i] = NULL;
  capture_end_everywhere(capture);
}

void capture_abandon(CUstream stream) {
  struct capture *c = stream->capture;
  if (c->origin == stream) {
    close_capture(c);
    return;
  }
  stream->capture = NULL;
  capture_leave(c);
}

static CUresult end(CUstream stream, CUgraph *graph) {
  struct capture *c = stream->capture;
  if (!c) return CUDA_ERROR_ILLEGAL_STATE;
  if (c->origin != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (c->mode != CAPTURE_RELAXED && c->owner != this_thread()) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  int valid = c->status == CAPTURE_ACTIVE;
  *graph = NULL;
  if (valid) {
    *graph = graph_new(c->nodes);
    c->nodes = NULL;
  }
  close_capture(c);
  return valid ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

API CUresult cuStreamEndCapture(CUstream handle, CUgraph *graph) {
  ENTER(NEEDS_CONTEXT);
  driver_lock();
  CUstream stream = stream_find(context_current(), handle);
  CUresult status = stream ? end(stream, graph) : CUDA_ERROR_INVALID_HANDLE;
  driver_unlock();
  return status;
}

API CUresult cuStreamIsCapturing(CUstream handle, int *answer) {
  ENTER(NEEDS_CONTEXT);
  driver_lock();
  CUstream stream = stream_find(context_current(), handle);
  CUresult status = asked(context_current(), stream);
  if (!status) *answer = capture_status(stream);
  driver_unlock();
  return status;
}

static CUresult information(CUstream handle, int *answer, uint64_t *id) {
  driver_lock();
  CUstream stream = stream_find(context_current(), handle);
  CUresult status = asked(context_current(), stream);
  if (!status) *answer = capture_status(stream);
  if (!status && id) *id = stream->capture ? stream->capture->id : 0;
  driver_unlock();
  return status;
}

API CUresult cuStreamGetCaptureInfo_v2(CUstream handle, int *answer, uint64_t *id, CUgraph *graph, void **dependencies,
                                       size_t *count) {
  ENTER(NEEDS_CONTEXT);
  if (graph) *graph = NULL;
  if (dependencies) *dependencies = NULL;
  if (count) *count = 0;
  return information(handle, answer, id);
}

API CUresult cuStreamGetCaptureInfo_v3(CUstream handle, int *answer, uint64_t *id, CUgraph *graph, void **dependencies,
                                       void **edges, size_t *count) {
  if (edges) *edges = NULL;
  return cuStreamGetCaptureInfo_v2(handle, answer, id, graph, dependencies, count);
}

API CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
  ENTER(NEEDS_DRIVER);
  int before = thread_mode;
  if (*mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  thread_mode = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}
