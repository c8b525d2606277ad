/* ncclConfig_t: what of it is read, by the version of the library and by the version that the caller filled. */
#include "comm.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* How large the structure is in a version of the library. */
static size_t size_in(int version) {
  static const struct { int since; size_t size; } sizes[] = {
      {23200, 120}, {23100, 112}, {23000, 96}, {22900, 88}, {22800, 80}, {22700, 72}, {0, 48}};
  for (size_t i = 0; i < LENGTH(sizes); i++)
    if (version >= sizes[i].since) return sizes[i].size;
  return 0;
}

static const ncclConfig_t unset = {
    .size = sizeof unset, .magic = CONFIG_MAGIC, .blocking = UNSET, .cgaClusterSize = UNSET, .minCTAs = UNSET,
    .maxCTAs = UNSET, .splitShare = UNSET, .trafficClass = UNSET, .collnetEnable = UNSET, .CTAPolicy = UNSET,
    .shrinkShare = UNSET, .nvlsCTAs = UNSET, .nChannelsPerNetPeer = UNSET, .nvlinkCentricSched = UNSET,
    .graphUsageMode = UNSET, .numRmaCtx = UNSET, .maxP2pPeers = UNSET, .graphStreamOrdering = UNSET,
    .launchOrderImplicit = UNSET, .numRmaSig = UNSET, .rmaEagerInit = UNSET, .hostCftMode = UNSET,
    .nvlsHostMode = UNSET};

/* Each checked field: where it is, which values it takes, and the version below which the caller did not know it. */
#define FIELD(name, low, high, since) {offsetof(ncclConfig_t, name), #name, low, high, since}
static const struct { size_t offset; const char *name; int low, high; unsigned since; } fields[] = {
    FIELD(blocking, 0, 1, 21400),
    FIELD(cgaClusterSize, 0, INT32_MAX, 21700),
    FIELD(minCTAs, 1, INT32_MAX, 21700),
    FIELD(maxCTAs, 1, INT32_MAX, 21700),
    FIELD(splitShare, 0, 1, 0),
    FIELD(trafficClass, INT32_MIN, INT32_MAX, 22500),
    FIELD(collnetEnable, 0, 1, 22700),
    FIELD(CTAPolicy, 0, 3, 22700),
    FIELD(shrinkShare, 0, 1, 22700),
    FIELD(nvlsCTAs, 1, INT32_MAX, 22700),
    FIELD(nChannelsPerNetPeer, 1, 64, 22800),
    FIELD(nvlinkCentricSched, 0, 1, 22800),
    FIELD(graphUsageMode, 0, 2, 22900),
    FIELD(numRmaCtx, 0, INT32_MAX, 22900),
    FIELD(maxP2pPeers, 1, INT32_MAX, 23000),
    FIELD(graphStreamOrdering, 0, 1, 23005),
};

static int *at(ncclConfig_t *config, size_t offset) { return (int *)((char *)config + offset); }

static ncclResult_t check_fields(ncclConfig_t *config) {
  for (size_t i = 0; i < LENGTH(fields); i++) {
    int *value = at(config, fields[i].offset);
    if (config->version < fields[i].since) *value = UNSET;
    if (*value == UNSET || (*value >= fields[i].low && *value <= fields[i].high)) continue;
    log_warn("Invalid config %s attribute value %d", fields[i].name, *value);
    return ncclInvalidArgument;
  }
  /* Compared as given: minCTAs alone is larger than an unset maxCTAs. */
  if (config->minCTAs > config->maxCTAs) {
    log_warn("Invalid config min/max channels attribute value %d/%d", config->minCTAs, config->maxCTAs);
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

ncclResult_t config_read(const ncclConfig_t *given, ncclConfig_t *config) {
  size_t own = size_in(nccl_version());
  *config = unset;
  if (given) memcpy(config, given, given->size < own ? given->size : own);
  if (config->magic != CONFIG_MAGIC) {
    log_warn("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    return ncclInvalidArgument;
  }
  ncclResult_t result = given ? check_fields(config) : ncclSuccess;
  if (config->blocking == UNSET) config->blocking = 1;
  const char *forced = getenv("NCCL_COMM_BLOCKING");
  if (forced && (!strcmp(forced, "0") || !strcmp(forced, "1"))) config->blocking = forced[0] == '1';
  return result;
}
