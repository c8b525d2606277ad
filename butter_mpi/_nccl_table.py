"""NCCL's C interface from 2.18 to 2.32 as a table that is kept by hand: a new release is a few new rows.

A row is the first release whose header has it, and its declaration as ``nccl.h`` writes it, with the value that
``nccl.h`` gives an untouched field. Where a later row has the name of an earlier one, it holds from its release on.
Differences from ``nccl.h``: the unique ID is ``uint8_t`` (a ``char`` array would end at the first zero), the list of
extensions is a ``void *``, and the two nested types of ``ncclConfigExt_t`` have names.

``tests/contract/test_nccl_abi.py`` holds every row against facts that were recorded from the headers themselves.
"""

from __future__ import annotations

__all__ = ["HEADERS", "TABLE"]

HEADERS = """
2.18.1 2.18.3 2.18.5 2.18.6 2.19.1 2.19.3 2.19.4 2.20.3 2.20.5 2.21.5 2.22.3 2.23.4 2.24.3 2.25.1 2.26.2
2.26.3 2.26.5 2.26.6 2.27.3 2.27.5 2.27.6 2.27.7 2.28.3 2.28.7 2.28.9 2.29.2 2.29.3 2.29.7 2.30.3 2.30.4
2.30.7 2.31.2 2.32.3
"""
"""The releases whose headers were read. A library between two of them is served by the older one's layouts."""

TABLE = """
functions
    2.18    ncclResult_t ncclGetVersion(int *version)
    2.18    ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId)
    2.18    ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
                ncclConfig_t *config)
    2.18    ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank)
    2.18    ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist)
    2.18    ncclResult_t ncclCommFinalize(ncclComm_t comm)
    2.18    ncclResult_t ncclCommDestroy(ncclComm_t comm)
    2.18    ncclResult_t ncclCommAbort(ncclComm_t comm)
    2.18    ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config)
    2.18    const char *ncclGetErrorString(ncclResult_t result)
    2.18    const char *ncclGetLastError(ncclComm_t comm)
    2.18    ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)
    2.18    ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
    2.18    ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
    2.18    ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
    2.18    ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                ncclScalarResidence_t residence, ncclComm_t comm)
    2.18    ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)
    2.18    ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)
    2.18    ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                cudaStream_t stream)
    2.18    ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                int root, ncclComm_t comm, cudaStream_t stream)
    2.18    ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
    2.18    ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
    2.18    ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream)
    2.18    ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                ncclComm_t comm, cudaStream_t stream)
    2.18    ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                cudaStream_t stream)
    2.18    ncclResult_t ncclGroupStart()
    2.18    ncclResult_t ncclGroupEnd()
    2.19.1  ncclResult_t ncclMemAlloc(void **ptr, size_t size)
    2.19.1  ncclResult_t ncclMemFree(void *ptr)
    2.19.1  ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle)
    2.19.1  ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle)
    2.22.3  ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo)
    2.23.4  ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId,
                ncclUniqueId *commIds, ncclConfig_t *config)
    2.24.3  void ncclResetDebugInit()
    2.27.3  ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount,
                ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags)
    2.27.3  ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
                int winFlags)
    2.27.3  ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win)
    2.28.3  ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                ncclComm_t comm, cudaStream_t stream)
    2.28.3  ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                int root, ncclComm_t comm, cudaStream_t stream)
    2.28.3  ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                int root, ncclComm_t comm, cudaStream_t stream)
    2.28.7  ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags)
    2.29.2  ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *uniqueId)
    2.29.2  ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank,
                ncclComm_t *newcomm, ncclConfig_t *config)
    2.29.2  ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **outUserPtr)
    2.29.2  ncclResult_t ncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer,
                ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
                cudaStream_t stream)
    2.29.2  ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
                cudaStream_t stream)
    2.29.2  ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm,
                cudaStream_t stream)
    2.29.7  ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags)
    2.29.7  ncclResult_t ncclCommResume(ncclComm_t comm)
    2.29.7  ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value)
    2.30.4  ncclResult_t ncclParamBind(ncclParamHandle_t *out, const char *key)
    2.30.4  ncclResult_t ncclParamGetI8(ncclParamHandle_t h, int8_t *out)
    2.30.4  ncclResult_t ncclParamGetI16(ncclParamHandle_t h, int16_t *out)
    2.30.4  ncclResult_t ncclParamGetI32(ncclParamHandle_t h, int32_t *out)
    2.30.4  ncclResult_t ncclParamGetI64(ncclParamHandle_t h, int64_t *out)
    2.30.4  ncclResult_t ncclParamGetU8(ncclParamHandle_t h, uint8_t *out)
    2.30.4  ncclResult_t ncclParamGetU16(ncclParamHandle_t h, uint16_t *out)
    2.30.4  ncclResult_t ncclParamGetU32(ncclParamHandle_t h, uint32_t *out)
    2.30.4  ncclResult_t ncclParamGetU64(ncclParamHandle_t h, uint64_t *out)
    2.30.4  ncclResult_t ncclParamGetStr(ncclParamHandle_t h, const char **out)
    2.30.4  ncclResult_t ncclParamGet(ncclParamHandle_t h, void *out, int maxLen, int *len)
    2.30.4  ncclResult_t ncclParamGetParameter(const char *key, const char **value, int *valueLen)
    2.30.4  ncclResult_t ncclParamGetAllParameterKeys(const char ***table, int *tableLen)
    2.30.4  void ncclParamDumpAll()
    2.31.2  ncclResult_t ncclAllReduceConfig(const void *sendbuff, void *recvbuff, size_t count,
                ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                const ncclCollConfig_t *config)
    2.31.2  ncclResult_t ncclBroadcastConfig(const void *sendbuff, void *recvbuff, size_t count,
                ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream,
                const ncclCollConfig_t *config)
    2.31.2  ncclResult_t ncclReduceConfig(const void *sendbuff, void *recvbuff, size_t count,
                ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream,
                const ncclCollConfig_t *config)
    2.31.2  ncclResult_t ncclAllGatherConfig(const void *sendbuff, void *recvbuff, size_t sendcount,
                ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)
    2.31.2  ncclResult_t ncclReduceScatterConfig(const void *sendbuff, void *recvbuff, size_t recvcount,
                ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                const ncclCollConfig_t *config)
    2.31.2  ncclResult_t ncclAlltoAllConfig(const void *sendbuff, void *recvbuff, size_t count,
                ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)
    2.31.2  ncclResult_t ncclGatherConfig(const void *sendbuff, void *recvbuff, size_t count,
                ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream,
                const ncclCollConfig_t *config)
    2.31.2  ncclResult_t ncclScatterConfig(const void *sendbuff, void *recvbuff, size_t count,
                ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream,
                const ncclCollConfig_t *config)
    2.32.3  ncclResult_t ncclSetEncryption(const ncclEncryptionConfig_t *config)

struct ncclUniqueId
    2.18    uint8_t internal[128]

struct ncclConfig_t
    2.18    size_t size
    2.18    unsigned int magic = NCCL_API_MAGIC
    2.18    unsigned int version
    2.18    int blocking = NCCL_CONFIG_UNDEF_INT
    2.18    int cgaClusterSize = NCCL_CONFIG_UNDEF_INT
    2.18    int minCTAs = NCCL_CONFIG_UNDEF_INT
    2.18    int maxCTAs = NCCL_CONFIG_UNDEF_INT
    2.18    const char *netName
    2.18    int splitShare = NCCL_CONFIG_UNDEF_INT
    2.26.2  int trafficClass = NCCL_CONFIG_UNDEF_INT
    2.27.3  const char *commName
    2.27.3  int collnetEnable = NCCL_CONFIG_UNDEF_INT
    2.27.3  int CTAPolicy = NCCL_CONFIG_UNDEF_INT
    2.27.3  int shrinkShare = NCCL_CONFIG_UNDEF_INT
    2.27.3  int nvlsCTAs = NCCL_CONFIG_UNDEF_INT
    2.28.3  int nChannelsPerNetPeer = NCCL_CONFIG_UNDEF_INT
    2.28.3  int nvlinkCentricSched = NCCL_CONFIG_UNDEF_INT
    2.29.2  int graphUsageMode = NCCL_CONFIG_UNDEF_INT
    2.29.2  int numRmaCtx = NCCL_CONFIG_UNDEF_INT
    2.30.3  int maxP2pPeers = NCCL_CONFIG_UNDEF_INT
    2.30.7  int graphStreamOrdering = NCCL_CONFIG_UNDEF_INT
    2.31.2  int launchOrderImplicit = NCCL_CONFIG_UNDEF_INT
    2.31.2  int numRmaSig = NCCL_CONFIG_UNDEF_INT
    2.31.2  int rmaEagerInit = NCCL_CONFIG_UNDEF_INT
    2.31.2  int hostCftMode = NCCL_CONFIG_UNDEF_INT
    2.32.3  int nvlsHostMode = NCCL_CONFIG_UNDEF_INT

struct ncclSimInfo_t
    2.22.3  size_t size
    2.22.3  unsigned int magic = 0x74685283
    2.22.3  unsigned int version
    2.22.3  float estimatedTime = NCCL_UNDEF_FLOAT

struct ncclWaitSignalDesc_t
    2.29.2  int opCnt
    2.29.2  int peer
    2.29.2  int sigIdx
    2.29.2  int ctx

struct ncclConfigExtKey
    2.31.2  int vendorId
    2.31.2  int optionId

union ncclConfigExtValue
    2.31.2  int i
    2.31.2  const char *s
    2.31.2  void *raw

struct ncclConfigExt_t
    2.31.2  void *next
    2.31.2  ncclConfigExtKey key
    2.31.2  ncclConfigExtValue val

struct ncclCollConfig_t
    2.31.2  size_t size
    2.31.2  unsigned int magic = NCCL_API_MAGIC
    2.31.2  unsigned int version
    2.31.2  ncclConfigExt_t *ext
    2.31.2  int minCTAs = NCCL_CONFIG_UNDEF_INT
    2.31.2  int maxCTAs = NCCL_CONFIG_UNDEF_INT
    2.31.2  int nvlsCTAs = NCCL_CONFIG_UNDEF_INT
    2.31.2  int cgaClusterSize = NCCL_CONFIG_UNDEF_INT
    2.31.2  const char *algSelection
    2.31.2  int forceAlgSelection = 1
    2.31.2  int CTAPolicy = NCCL_CONFIG_UNDEF_INT
    2.31.2  uint64_t userProfilerTag
    2.32.3  cudaEvent_t launchCompletionEvent

struct ncclEncryptionConfig_t
    2.32.3  size_t size
    2.32.3  unsigned int magic = NCCL_API_MAGIC
    2.32.3  unsigned int version
    2.32.3  int mode
    2.32.3  const char *psk

struct ncclCommProperties_t
    2.29.2  size_t size
    2.29.2  unsigned int magic = NCCL_API_MAGIC
    2.29.2  unsigned int version
    2.29.2  int rank
    2.29.2  int nRanks
    2.29.2  int cudaDev
    2.29.2  int nvmlDev
    2.29.2  bool deviceApiSupport
    2.29.2  bool multimemSupport
    2.29.2  uint8_t ginType
    2.29.7  int ginType
    2.29.7  int nLsaTeams
    2.29.7  bool hostRmaSupport
    2.29.7  int railedGinType
    2.31.2  uint64_t commHash
    2.31.2  int ginMinStride
    2.31.2  int ginConnectionType
    2.31.2  bool ginSupport[64]
    2.31.2  size_t devCommRuntimeVersionSize
    2.32.3  bool cftSupport
    2.32.3  bool cftMulticastSupport
    2.32.3  bool cftCountedSupport

enum ncclCommMemStat_t
    2.29.7  ncclStatGpuMemSuspend = 0
    2.29.7  ncclStatGpuMemSuspended = 1
    2.29.7  ncclStatGpuMemPersist = 2
    2.29.7  ncclStatGpuMemTotal = 3

enum ncclDataType_t
    2.18    ncclInt8 = 0
    2.18    ncclChar = 0
    2.18    ncclUint8 = 1
    2.18    ncclInt32 = 2
    2.18    ncclInt = 2
    2.18    ncclUint32 = 3
    2.18    ncclInt64 = 4
    2.18    ncclUint64 = 5
    2.18    ncclFloat16 = 6
    2.18    ncclHalf = 6
    2.18    ncclFloat32 = 7
    2.18    ncclFloat = 7
    2.18    ncclFloat64 = 8
    2.18    ncclDouble = 8
    2.18    ncclBfloat16 = 9
    2.18    ncclNumTypes = 10
    2.24.3  ncclNumTypes = 12
    2.24.3  ncclFloat8e4m3 = 10
    2.24.3  ncclFloat8e5m2 = 11

enum ncclEncryptionMode_t
    2.32.3  NCCL_ENCRYPTION_MODE_NONE = 0
    2.32.3  NCCL_ENCRYPTION_MODE_PSK = 1

enum ncclHostCftMode_t
    2.31.2  ncclHostCftDefault = -2147483648
    2.31.2  ncclHostCftEnable = 1
    2.31.2  ncclHostCftDisable = 2
    2.31.2  ncclHostCftFallback = 3

enum ncclNvlsHostMode_t
    2.32.3  ncclNvlsHostModeDefault = -2147483648
    2.32.3  ncclNvlsHostModeEnable = 0
    2.32.3  ncclNvlsHostModeDisableTransport = 1
    2.32.3  ncclNvlsHostModeDisableSymmetricMultimem = 2
    2.32.3  ncclNvlsHostModeDisable = 2147483647

enum ncclRedOp_dummy_t
    2.18    ncclNumOps_dummy = 5

enum ncclRedOp_t
    2.18    ncclSum = 0
    2.18    ncclProd = 1
    2.18    ncclMax = 2
    2.18    ncclMin = 3
    2.18    ncclAvg = 4
    2.18    ncclNumOps = 5
    2.18    ncclMaxRedOp = 2147483647

enum ncclResult_t
    2.18    ncclSuccess = 0
    2.18    ncclUnhandledCudaError = 1
    2.18    ncclSystemError = 2
    2.18    ncclInternalError = 3
    2.18    ncclInvalidArgument = 4
    2.18    ncclInvalidUsage = 5
    2.18    ncclRemoteError = 6
    2.18    ncclInProgress = 7
    2.18    ncclNumResults = 8
    2.30.3  ncclNumResults = 9
    2.30.3  ncclTimeout = 8

enum ncclScalarResidence_t
    2.18    ncclScalarDevice = 0
    2.18    ncclScalarHostImmediate = 1

macros
    2.18    NCCL_UNIQUE_ID_BYTES = 128
    2.18    NCCL_SPLIT_NOCOLOR = -1
    2.18    NCCL_CONFIG_UNDEF_INT = -2147483648
    2.22.3  NCCL_UNDEF_FLOAT = -1.0
    2.27.3  NCCL_SHRINK_DEFAULT = 0
    2.27.3  NCCL_SHRINK_ABORT = 1
    2.27.3  NCCL_CTA_POLICY_DEFAULT = 0
    2.27.3  NCCL_WIN_COLL_SYMMETRIC = 1
    2.27.3  NCCL_WIN_DEFAULT = 0
    2.27.3  NCCL_CTA_POLICY_EFFICIENCY = 1
    2.28.3  NCCL_WIN_REQUIRED_ALIGNMENT = 4096
    2.28.3  NCCL_CTA_POLICY_ZERO = 2
    2.28.7  NCCL_REVOKE_DEFAULT = 0
    2.29.2  NCCL_API_MAGIC = 0xCAFEBEEF
    2.29.7  NCCL_WIN_STRICT_ORDERING = 2
    2.29.7  NCCL_SUSPEND_MEM = 1
    2.32.3  NCCL_WIN_GIN_ONLY = 4
    2.32.3  NCCL_WIN_CFT_COUNTED = 8
"""
