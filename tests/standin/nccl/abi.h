/* The part of NCCL's binary interface that the stand-in speaks, as nccl.h of 2.18 to 2.32 has it. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct comm *ncclComm_t;
typedef struct { unsigned char bytes[128]; } ncclUniqueId;
typedef void *cudaStream_t;
typedef int ncclResult_t, ncclDataType_t, ncclRedOp_t;

enum {
  ncclSuccess,
  ncclUnhandledCudaError,
  ncclSystemError,
  ncclInternalError,
  ncclInvalidArgument,
  ncclInvalidUsage,
  ncclRemoteError,
  ncclInProgress,
  ncclTimeout,
};

enum {
  ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64,
  ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, DTYPES,
};

enum { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, BUILTIN_OPS };
enum { ncclScalarDevice, ncclScalarHostImmediate };
enum { UNSET = INT32_MIN };
enum { NO_COLOR = -1, SHRINK_ABORT = 1, WINDOW_ALIGNMENT = 4096 };
#define CONFIG_MAGIC 0xcafebeefu
#define SIMULATION_MAGIC 0x74685283u

typedef struct { /* ncclConfig_t of 2.32; older ones end earlier */
  size_t size;
  unsigned magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char *netName;
  int splitShare, trafficClass;
  const char *commName;
  int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched, graphUsageMode,
      numRmaCtx, maxP2pPeers, graphStreamOrdering, launchOrderImplicit, numRmaSig, rmaEagerInit, hostCftMode,
      nvlsHostMode;
} ncclConfig_t;

typedef struct {
  size_t size;
  unsigned magic, version;
  float estimatedTime;
} ncclSimInfo_t;
