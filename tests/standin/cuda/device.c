/* Devices: how many, what they are called, which of them CUDA_VISIBLE_DEVICES leaves; initialization and versions. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_DRIVER_VERSION = 13000, TEXT_OF_UUID = 41 };

static int initialized, visible_count;
static int visible[MAX_DEVICES]; /* ordinal -> number on the machine */

int driver_ready(void) { return initialized; }
int device_count(void) { return visible_count; }
int device_known(CUdevice device) { return device >= 0 && device < visible_count; }

static long setting(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

static int machine_count(void) {
  long n = setting("STANDIN_DEVICES", 1);
  return n < 0 ? 0 : n > MAX_DEVICES ? MAX_DEVICES : (int)n;
}

/* "stand-in", a hash of the machine's name, and the number of the device: the same in every process of a machine. */
static void uuid_of(int number, unsigned char uuid[16]) {
  const char *machine = getenv("STANDIN_MACHINE");
  uint32_t hash = 2166136261u;
  for (; machine && *machine; machine++) hash = (hash ^ (unsigned char)*machine) * 16777619u;
  memcpy(uuid, "stand-in", 8);
  memset(uuid + 8, 0, 8);
  memcpy(uuid + 8, &hash, sizeof hash);
  uuid[15] = (unsigned char)number;
}

static void uuid_text(int number, char text[TEXT_OF_UUID]) {
  unsigned char u[16];
  uuid_of(number, u);
  char *at = text + sprintf(text, "GPU-");
  for (int i = 0; i < 16; i++) at += sprintf(at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", u[i]);
}

/* A number, or the beginning of a UUID that only one device has; -1 for anything else. */
static int number_of(const char *entry, int count) {
  char *end, text[TEXT_OF_UUID];
  int found = -1;
  long number = strtol(entry, &end, 10);
  if (end != entry && !*end) return number >= 0 && number < count ? (int)number : -1;
  for (int i = 0; i < count; i++) {
    uuid_text(i, text);
    if (strncmp(text, entry, strlen(entry))) continue;
    if (found >= 0) return -1;
    found = i;
  }
  return strncmp(entry, "GPU-", 4) ? -1 : found;
}

/* As CUDA does: the list ends at its first entry that is no device; a device named twice leaves none. */
static void read_visible(void) {
  int count = machine_count();
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  visible_count = 0;
  for (int i = 0; !list && i < count; i++) visible[visible_count++] = i;
  char *copy = list ? strdup(list) : NULL, *rest = copy, *entry;
  while (rest && (entry = strsep(&rest, ",")) && visible_count < MAX_DEVICES) {
    int number = number_of(entry, count);
    if (number < 0) break;
    for (int i = 0; i < visible_count; i++)
      if (visible[i] == number) {
        visible_count = 0;
        free(copy);
        return;
      }
    visible[visible_count++] = number;
  }
  free(copy);
}

API CUresult cuInit(unsigned flags) {
  ENTER(NEEDS_NOTHING);
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  driver_lock();
  if (!initialized) read_visible();
  initialized = visible_count > 0;
  driver_unlock();
  return initialized ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

API CUresult cuDriverGetVersion(int *version) {
  ENTER(NEEDS_NOTHING);
  *version = (int)setting("STANDIN_DRIVER_VERSION", DEFAULT_DRIVER_VERSION);
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *count) {
  ENTER(NEEDS_DRIVER);
  *count = visible_count;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int size, CUdevice device) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(name, (size_t)size, "Stand-in GPU %d", visible[device]);
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  uuid_of(visible[device], uuid->bytes);
  return CUDA_SUCCESS;
}

static int bus_of(CUdevice device) { return visible[device] + 1; }

API CUresult cuDeviceGetPCIBusId(char *text, int size, CUdevice device) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(text, (size_t)size, "0000:%02X:00.0", (unsigned)bus_of(device));
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
  ENTER(NEEDS_DRIVER);
  unsigned domain, bus;
  if (sscanf(text, "%x:%x:", &domain, &bus) != 2) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < visible_count; i++)
    if (bus_of(i) == (int)bus) {
      *device = i;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_INVALID_DEVICE;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  switch (attribute) {
    case ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 1; break;
    case ATTRIBUTE_PCI_BUS_ID: *value = bus_of(device); break;
    case ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case ATTRIBUTE_UNIFIED_ADDRESSING:
    case ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  ENTER(NEEDS_DRIVER);
  if (!device_known(device) || !device_known(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = device != peer;
  return CUDA_SUCCESS;
}

API int standin_identity(int device, unsigned char uuid[16], int *bus) {
  if (!device_known(device)) return CUDA_ERROR_INVALID_DEVICE;
  uuid_of(visible[device], uuid);
  *bus = bus_of(device);
  return CUDA_SUCCESS;
}
