/* Contexts: one primary context a device, the stack of current contexts of a thread, and how every call begins. */
#include "driver.h"

#include <stdatomic.h>

static struct context contexts[MAX_DEVICES];
static _Thread_local CUcontext stack[MAX_STACK];
static _Thread_local int depth;

_Atomic int driver_broken;

CUcontext context_current(void) { return depth ? stack[depth - 1] : NULL; }
CUcontext context_of_device(int device) { return &contexts[device]; }

API void standin_break(int status) {
  atomic_store(&driver_broken, status);
  driver_ring();
}

CUresult driver_enter(const char *function, enum needs needs) {
  fault found = standin_fault(function);
  if (found.kind == FAULT_CODE) {
    if (found.sticky) standin_break(found.code);
    return found.code;
  }
  if (needs >= NEEDS_DRIVER && !driver_ready()) return CUDA_ERROR_NOT_INITIALIZED;
  if (needs < NEEDS_CONTEXT) return CUDA_SUCCESS;
  if (!context_current()) return CUDA_ERROR_INVALID_CONTEXT;
  return atomic_load(&driver_broken);
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  driver_lock();
  contexts[device].device = device;
  contexts[device].retained++;
  driver_unlock();
  *context = &contexts[device];
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  driver_lock();
  int held = contexts[device].retained > 0;
  if (held && --contexts[device].retained == 0) context_drain(&contexts[device]);
  driver_unlock();
  return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  driver_lock();
  *flags = contexts[device].flags;
  *active = contexts[device].retained > 0;
  driver_unlock();
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  contexts[device].flags = flags;
  return CUDA_SUCCESS;
}

/* A context beside the primary one, so that its refusal can be tested. */
static CUresult context_create(CUcontext *context, unsigned flags, CUdevice device) {
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (depth == MAX_STACK) return CUDA_ERROR_INVALID_VALUE;
  driver_lock();
  *context = cell_new();
  driver_unlock();
  (*context)->device = device;
  (*context)->flags = flags;
  (*context)->retained = 1;
  stack[depth++] = *context;
  return CUDA_SUCCESS;
}

API CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device) {
  ENTER(NEEDS_DRIVER);
  return context_create(context, flags, device);
}

API CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned flags, CUdevice device) {
  ENTER(NEEDS_DRIVER);
  (void)parameters;
  return context_create(context, flags, device);
}

API CUresult cuCtxDestroy_v2(CUcontext context) {
  ENTER(NEEDS_DRIVER);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  driver_lock();
  context_drain(context);
  driver_unlock();
  if (context_current() == context) depth--;
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
  ENTER(NEEDS_DRIVER);
  if (depth == 0) depth = 1;
  stack[depth - 1] = context;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
  ENTER(NEEDS_DRIVER);
  *context = context_current();
  return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
  ENTER(NEEDS_DRIVER);
  if (!context) return CUDA_ERROR_INVALID_CONTEXT;
  if (depth == MAX_STACK) return CUDA_ERROR_INVALID_VALUE;
  stack[depth++] = context;
  return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
  ENTER(NEEDS_DRIVER);
  if (!context_current()) return CUDA_ERROR_INVALID_CONTEXT;
  if (context) *context = context_current();
  depth--;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device) {
  ENTER(NEEDS_CONTEXT);
  *device = context_current()->device;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context) {
  ENTER(NEEDS_CONTEXT);
  *device = (context ? context : context_current())->device;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetFlags(unsigned *flags) {
  ENTER(NEEDS_CONTEXT);
  *flags = context_current()->flags;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
  ENTER(NEEDS_CONTEXT);
  *id = (uintptr_t)(context ? context : context_current());
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version) {
  (void)context;
  ENTER(NEEDS_DRIVER);
  *version = 13000;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  ENTER(NEEDS_CONTEXT);
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

static CUresult synchronize(CUcontext context) {
  driver_lock();
  CUresult refused = capture_unsafe();
  if (!refused) context_drain(context);
  driver_unlock();
  return refused ? refused : atomic_load(&driver_broken);
}

API CUresult cuCtxSynchronize(void) {
  ENTER(NEEDS_CONTEXT);
  return synchronize(context_current());
}

API CUresult cuCtxSynchronize_v2(CUcontext context) {
  ENTER(NEEDS_CONTEXT);
  return synchronize(context ? context : context_current());
}
