/* The table behind cuGetProcAddress: name, the CUDA version from which a variant holds, the function. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*anything)(void);

typedef struct {
  const char *name;
  int since;
  anything function;
} entry;

#define PLAIN(name) extern void name(void);
#define AS(name, since, symbol) extern void symbol(void);
#include "entries.h"
#undef PLAIN
#undef AS
extern void cuGetErrorName(void), cuGetErrorString(void), cuGetProcAddress(void), cuGetProcAddress_v2(void);

static const entry entries[] = {
#define PLAIN(name) {#name, 0, name},
#define AS(name, since, symbol) {#name, since, symbol},
#include "entries.h"
    {"cuGetErrorName", 0, cuGetErrorName},
    {"cuGetErrorString", 0, cuGetErrorString},
    {"cuGetProcAddress", 0, cuGetProcAddress},
    {"cuGetProcAddress", 12000, cuGetProcAddress_v2},
};

enum { FOUND = 0, NO_SYMBOL = 1, VERSION_TOO_OLD = 2 };

static anything look_up(const char *name, int version, int *status) {
  const entry *best = NULL;
  *status = NO_SYMBOL;
  for (size_t i = 0; i < LENGTH(entries); i++) {
    const entry *e = &entries[i];
    if (strcmp(e->name, name)) continue;
    if (e->since > version) *status = best ? FOUND : VERSION_TOO_OLD;
    else if (!best || e->since > best->since) best = e;
  }
  if (best) *status = FOUND;
  return best ? best->function : NULL;
}

/* STANDIN_TRACE=1 writes what is asked for and missing. */
API CUresult standin_get(const char *name, anything *function, int version, uint64_t flags, int *status) __asm__(
    "cuGetProcAddress_v2");
API CUresult standin_get(const char *name, anything *function, int version, uint64_t flags, int *status) {
  (void)flags;
  int found;
  *function = look_up(name, version, &found);
  if (status) *status = found;
  if (!*function && getenv("STANDIN_TRACE")) fprintf(stderr, "stand-in: no %s for version %d\n", name, version);
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult standin_get_old(const char *name, anything *function, int version, uint64_t flags) __asm__(
    "cuGetProcAddress");
API CUresult standin_get_old(const char *name, anything *function, int version, uint64_t flags) {
  return standin_get(name, function, version, flags, NULL);
}
