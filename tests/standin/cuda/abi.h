/* The part of the CUDA driver's binary interface that the stand-in speaks: types and numbers, as cuda.h has them. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct graph *CUgraph;
typedef struct graph_exec *CUgraphExec;
typedef struct node *CUgraphNode;
typedef struct module *CUmodule;
typedef const struct kernel *CUfunction;
typedef struct pool *CUmemoryPool;
typedef void (*CUhostFn)(void *);
typedef struct { unsigned char bytes[16]; } CUuuid;

enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_ILLEGAL_STATE = 401,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
  CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
  CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
  CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
  CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
  CUDA_ERROR_CAPTURED_EVENT = 907,
  CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
};

enum { CU_STREAM_NON_BLOCKING = 1 };
enum { STREAM_LEGACY = 1, STREAM_PER_THREAD = 2 }; /* the two special handles beside 0 */
enum { CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2, CU_EVENT_INTERPROCESS = 4 };
enum { CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_INVALIDATED };
enum { CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED };
enum { NODE_KERNEL = 0, NODE_HOST = 3, NODE_WAIT_EVENT = 6, NODE_EVENT_RECORD = 7 }; /* CUgraphNodeType */
enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 };

enum { /* CUdevice_attribute */
  ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
  ATTRIBUTE_WARP_SIZE = 10,
  ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  ATTRIBUTE_PCI_BUS_ID = 33,
  ATTRIBUTE_PCI_DEVICE_ID = 34,
  ATTRIBUTE_UNIFIED_ADDRESSING = 41,
  ATTRIBUTE_PCI_DOMAIN_ID = 50,
  ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED = 78,
  ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115,
};

enum { /* CUpointer_attribute */
  POINTER_CONTEXT = 1,
  POINTER_MEMORY_TYPE = 2,
  POINTER_DEVICE_POINTER = 3,
  POINTER_HOST_POINTER = 4,
  POINTER_BUFFER_ID = 7,
  POINTER_IS_MANAGED = 8,
  POINTER_DEVICE_ORDINAL = 9,
  POINTER_RANGE_START_ADDR = 11,
  POINTER_RANGE_SIZE = 12,
  POINTER_MAPPED = 13,
};

typedef struct { /* CUlaunchConfig */
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  CUstream stream;
  void *attributes;
  unsigned attribute_count;
} CUlaunchConfig;
