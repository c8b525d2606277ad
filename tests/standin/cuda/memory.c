/* Device memory: addresses that fault when the host touches them, shadowed by host memory and checked to the byte.

   Addresses are never given out twice, so a pointer that was freed stays wrong. Fresh memory holds 0xCB. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { GUARD = 4096, ALIGNMENT = 512, FRESH = 0xCB, MAX_BLOCKS = 1 << 16, DEFAULT_MIB = 16384 };

typedef struct {
  CUdeviceptr base;
  size_t bytes;
  char *shadow;
  int device, live, pinned, pooled;
} block;

static const size_t space = 1ul << 38; /* of addresses; ThreadSanitizer leaves no room for much more */
static CUdeviceptr start, next_address;
static block blocks[MAX_BLOCKS]; /* device memory, by ascending address; pinned host memory has blocks of its own */
static size_t block_count, in_use[MAX_DEVICES];
static block pinned[1024];

static size_t capacity(void) {
  const char *value = getenv("STANDIN_MEMORY_MIB");
  return (size_t)(value ? atol(value) : DEFAULT_MIB) << 20;
}

static block *find_device(CUdeviceptr pointer) {
  size_t low = 0, high = block_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (blocks[middle].base <= pointer) low = middle + 1;
    else high = middle;
  }
  block *b = low ? &blocks[low - 1] : NULL;
  return b && b->live && pointer < b->base + b->bytes ? b : NULL;
}

/* Is this an address of a device? Before the first allocation there are none, and host memory may lie low. */
static int on_device(CUdeviceptr pointer) { return start && pointer >= start && pointer < start + space; }

static block *find(CUdeviceptr pointer) {
  if (on_device(pointer)) return find_device(pointer);
  for (size_t i = 0; i < LENGTH(pinned); i++)
    if (pinned[i].live && pointer >= pinned[i].base && pointer < pinned[i].base + pinned[i].bytes) return &pinned[i];
  return NULL;
}

void *memory_range(CUdeviceptr pointer, size_t bytes) {
  driver_lock();
  block *b = find(pointer);
  char *place = b && bytes <= b->base + b->bytes - pointer ? b->shadow + (pointer - b->base) : NULL;
  driver_unlock();
  return place;
}

void *memory_any(CUdeviceptr pointer, size_t bytes) {
  return on_device(pointer) ? memory_range(pointer, bytes) : (void *)(uintptr_t)pointer;
}

API void *standin_shadow(uint64_t pointer, size_t bytes) { return memory_range(pointer, bytes); }

static CUresult reserve(void) {
  long place = syscall(SYS_mmap, 0L, space, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0L);
  if (place == -1) return CUDA_ERROR_OUT_OF_MEMORY;
  start = next_address = (CUdeviceptr)place;
  return CUDA_SUCCESS;
}

static void forget_freed_blocks(void) {
  size_t kept = 0;
  for (size_t i = 0; i < block_count; i++)
    if (blocks[i].live) blocks[kept++] = blocks[i];
  block_count = kept;
}

static CUresult place_block(CUdeviceptr *pointer, size_t bytes, int device) {
  size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (!start && reserve()) return CUDA_ERROR_OUT_OF_MEMORY;
  if (block_count == MAX_BLOCKS) forget_freed_blocks();
  if (block_count == MAX_BLOCKS || bytes > capacity() - in_use[device]) return CUDA_ERROR_OUT_OF_MEMORY;
  if (rounded + GUARD > start + space - next_address) return CUDA_ERROR_OUT_OF_MEMORY;
  char *shadow = aligned_alloc(ALIGNMENT, rounded);
  if (!shadow) return CUDA_ERROR_OUT_OF_MEMORY;
  memset(shadow, FRESH, bytes);
  blocks[block_count++] = (block){next_address, bytes, shadow, device, 1, 0, 0};
  in_use[device] += bytes;
  *pointer = next_address;
  next_address += rounded + GUARD;
  return CUDA_SUCCESS;
}

CUresult memory_new(CUdeviceptr *pointer, size_t bytes, int device) {
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  driver_lock();
  CUresult status = place_block(pointer, bytes, device);
  driver_unlock();
  return status;
}

CUresult memory_release(CUdeviceptr pointer) {
  driver_lock();
  block *b = find_device(pointer);
  char *shadow = b && b->base == pointer ? b->shadow : NULL;
  if (shadow) {
    b->live = 0;
    in_use[b->device] -= b->bytes;
  }
  driver_unlock();
  if (!atomic_load(&driver_broken)) free(shadow); /* else work that never ends may still touch it */
  return shadow ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- allocation that waits for nothing, and freeing that waits for everything */

static CUresult unsafe_in_capture(void) {
  driver_lock();
  CUresult refused = capture_unsafe();
  driver_unlock();
  return refused;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
  ENTER(NEEDS_CONTEXT);
  CUresult refused = unsafe_in_capture();
  return refused ? refused : memory_new(pointer, bytes, context_current()->device);
}

API CUresult cuMemFree_v2(CUdeviceptr pointer) {
  ENTER(NEEDS_CONTEXT);
  if (!pointer) return CUDA_SUCCESS;
  driver_lock();
  CUresult refused = capture_unsafe();
  if (!refused) context_drain(context_current());
  driver_unlock();
  return refused ? refused : memory_release(pointer);
}

API CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  ENTER(NEEDS_CONTEXT);
  (void)flags;
  char *memory = bytes ? aligned_alloc(GUARD, (bytes + GUARD - 1) / GUARD * GUARD) : NULL;
  if (!memory) return bytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
  CUresult status = CUDA_ERROR_OUT_OF_MEMORY;
  driver_lock();
  for (size_t i = 0; status && i < LENGTH(pinned); i++)
    if (!pinned[i].live) {
      pinned[i] = (block){(uintptr_t)memory, bytes, memory, context_current()->device, 1, 1, 0};
      status = CUDA_SUCCESS;
    }
  driver_unlock();
  *pointer = memory;
  return status;
}

API CUresult cuMemAllocHost_v2(void **pointer, size_t bytes) { return cuMemHostAlloc(pointer, bytes, 0); }

API CUresult cuMemFreeHost(void *pointer) {
  ENTER(NEEDS_CONTEXT);
  driver_lock();
  context_drain(context_current());
  block *b = find((uintptr_t)pointer);
  int known = b && b->pinned && b->shadow == pointer;
  if (known) b->live = 0;
  driver_unlock();
  if (known) free(pointer);
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
  ENTER(NEEDS_CONTEXT);
  driver_lock();
  *total = capacity();
  *available = *total - in_use[context_current()->device];
  driver_unlock();
  return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *total, CUdevice device) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  *total = capacity();
  return CUDA_SUCCESS;
}

/* ---- what a pointer is */

static int known(CUdeviceptr pointer, block *copy) {
  driver_lock();
  block *b = find(pointer);
  if (b) *copy = *b;
  driver_unlock();
  return b != NULL;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer) {
  ENTER(NEEDS_CONTEXT);
  block b;
  if (!known(pointer, &b)) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = b.base;
  if (bytes) *bytes = b.bytes;
  return CUDA_SUCCESS;
}

static CUresult describe(void *out, int attribute, const block *b, CUdeviceptr pointer) {
  switch (attribute) {
    case POINTER_CONTEXT: *(CUcontext *)out = b->pooled ? NULL : context_of_device(b->device); break;
    case POINTER_MEMORY_TYPE: *(unsigned *)out = b->pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
    case POINTER_DEVICE_POINTER: *(CUdeviceptr *)out = pointer; break;
    case POINTER_HOST_POINTER:
      if (!b->pinned) return CUDA_ERROR_INVALID_VALUE;
      *(void **)out = (void *)(uintptr_t)pointer;
      break;
    case POINTER_BUFFER_ID: *(unsigned long long *)out = b->base; break;
    case POINTER_IS_MANAGED: *(unsigned *)out = 0; break;
    case POINTER_DEVICE_ORDINAL: *(int *)out = b->device; break;
    case POINTER_RANGE_START_ADDR: *(CUdeviceptr *)out = b->base; break;
    case POINTER_RANGE_SIZE: *(size_t *)out = b->bytes; break;
    case POINTER_MAPPED: *(unsigned *)out = 1; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr pointer) {
  ENTER(NEEDS_CONTEXT);
  block b;
  return known(pointer, &b) ? describe(out, attribute, &b, pointer) : CUDA_ERROR_INVALID_VALUE;
}

/* Unlike its sister, this one succeeds for an ordinary host pointer, and answers with zeros and -2. */
API CUresult cuPointerGetAttributes(unsigned count, const int *attributes, void **out, CUdeviceptr pointer) {
  ENTER(NEEDS_CONTEXT);
  block b;
  int found = known(pointer, &b);
  for (unsigned i = 0; i < count; i++) {
    int narrow = attributes[i] == POINTER_MEMORY_TYPE || attributes[i] == POINTER_IS_MANAGED ||
                 attributes[i] == POINTER_DEVICE_ORDINAL || attributes[i] == POINTER_MAPPED;
    if (found && describe(out[i], attributes[i], &b, pointer) == CUDA_SUCCESS) continue;
    if (narrow) *(int *)out[i] = attributes[i] == POINTER_DEVICE_ORDINAL ? -2 : 0;
    else *(uint64_t *)out[i] = 0;
  }
  return CUDA_SUCCESS;
}

/* ---- stream-ordered allocation: one pool a device, without limits of its own */

static CUmemoryPool pool_of(int device) { return (CUmemoryPool)(uintptr_t)(0x1000 + device); }

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  *pool = pool_of(device);
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) { return cuDeviceGetDefaultMemPool(pool, device); }

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value) {
  ENTER(NEEDS_DRIVER);
  (void)pool;
  int narrow = attribute <= 3; /* the first three attributes are switches */
  if (narrow) *(int *)value = 0;
  else *(uint64_t *)value = 0;
  return CUDA_SUCCESS;
}

API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value) {
  ENTER(NEEDS_DRIVER);
  (void)pool, (void)attribute, (void)value;
  return CUDA_SUCCESS;
}

API CUresult cuMemPoolSetAccess(CUmemoryPool pool, const void *access, size_t count) {
  ENTER(NEEDS_DRIVER);
  (void)pool, (void)access, (void)count;
  return CUDA_SUCCESS;
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t bytes) {
  ENTER(NEEDS_DRIVER);
  (void)pool, (void)bytes;
  return CUDA_SUCCESS;
}

static void mark_pooled(CUdeviceptr pointer) {
  driver_lock();
  find_device(pointer)->pooled = 1;
  driver_unlock();
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
  ENTER(NEEDS_CONTEXT);
  CUresult status = stream_submit(stream, NULL, NULL, NULL);
  if (!status) status = memory_new(pointer, bytes, (int)((uintptr_t)pool - 0x1000));
  if (!status) mark_pooled(*pointer);
  return status;
}

API CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
  ENTER(NEEDS_CONTEXT);
  return cuMemAllocFromPoolAsync(pointer, bytes, pool_of(context_current()->device), stream);
}

static void release_later(void *pointer) { memory_release((uintptr_t)pointer); }

API CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
  ENTER(NEEDS_CONTEXT);
  if (!memory_range(pointer, 1)) return CUDA_ERROR_INVALID_VALUE;
  return stream_submit(stream, release_later, NULL, (void *)(uintptr_t)pointer);
}
