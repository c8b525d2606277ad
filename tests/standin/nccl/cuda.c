/* The door to the CUDA stand-in. The real NCCL opens the driver at run time too, so loading it needs none. */
#define _GNU_SOURCE
#include "comm.h"

#include <dlfcn.h>
#include <string.h>

static cuda_door door;
static _Atomic int opened; /* 0 not tried, 1 there, -1 not there */

static int find(void *library, const char *name, void *place) {
  void *symbol = dlsym(library, name);
  memcpy(place, &symbol, sizeof symbol);
  return symbol != NULL;
}

static int open_door(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  return library && find(library, "standin_enqueue", &door.enqueue) &&
         find(library, "standin_capture", &door.capture) && find(library, "standin_mark_of", &door.mark_of) &&
         find(library, "standin_mark_drop", &door.mark_drop) && find(library, "standin_follow", &door.follow) &&
         find(library, "standin_shadow", &door.shadow) && find(library, "standin_break", &door.fail) &&
         find(library, "standin_identity", &door.identity) && find(library, "cuCtxGetDevice", &door.get_device) &&
         find(library, "cuCtxGetCurrent", &door.get_context) && find(library, "cuMemAlloc_v2", &door.allocate) &&
         find(library, "cuMemFree_v2", &door.release) && find(library, "cuGetErrorString", &door.error_text);
}

const cuda_door *cuda(void) {
  if (!atomic_load(&opened)) atomic_store(&opened, open_door() ? 1 : -1);
  return atomic_load(&opened) == 1 ? &door : NULL;
}

ncclResult_t cuda_current(int *device, void **context) {
  const char *text = "CUDA driver version is insufficient for CUDA runtime version";
  int status = cuda() ? door.get_device(device) : -1;
  if (!status) status = door.get_context(context);
  if (!status) return ncclSuccess;
  if (status > 0) door.error_text(status, &text);
  log_warn("Cuda failure '%s'", text);
  return ncclUnhandledCudaError;
}
