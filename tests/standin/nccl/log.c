/* The log in NCCL's own form, the text of the last warning, and the version that the stand-in says it is. */
#define _GNU_SOURCE
#include "comm.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LEVEL_NONE, LEVEL_VERSION, LEVEL_WARN, LEVEL_INFO, LEVEL_ABORT, LEVEL_TRACE };
enum { DEFAULT_VERSION = 23203, LINE = 1024 };

extern char **environ;
static FILE *output;
static int level = -1, mask;
static char host[256], last_error[LINE];

long setting(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value && *value ? strtol(value, NULL, 0) : otherwise;
}

int nccl_version(void) { return (int)setting("STANDIN_NCCL_VERSION", DEFAULT_VERSION); }

static int read_level(void) {
  static const char *const words[] = {"", "VERSION", "WARN", "INFO", "ABORT", "TRACE"};
  const char *value = getenv("NCCL_DEBUG");
  for (size_t i = 1; value && i < LENGTH(words); i++)
    if (!strcasecmp(value, words[i])) return (int)i;
  return LEVEL_NONE;
}

static int read_mask(void) {
  static const struct { const char *word; int bits; } words[] = {
      {"INIT", SUB_INIT}, {"ENV", SUB_ENV}, {"BOOTSTRAP", SUB_BOOTSTRAP}, {"NET", SUB_NET},
      {"P2P", SUB_P2P},   {"SHM", SUB_SHM}, {"DESTROY", SUB_DESTROY},     {"ALL", ~0}};
  const char *value = getenv("NCCL_DEBUG_SUBSYS");
  if (!value) return SUB_INIT | SUB_ENV | (nccl_version() >= 22300 ? SUB_BOOTSTRAP : 0);
  int inverted = *value == '^', bits = inverted ? ~0 : 0;
  char *copy = strdup(value + inverted), *rest = copy, *word;
  while ((word = strsep(&rest, ",")))
    for (size_t i = 0; i < LENGTH(words); i++)
      if (!strcasecmp(word, words[i].word)) bits = inverted ? bits & ~words[i].bits : bits | words[i].bits;
  free(copy);
  return bits;
}

/* The path of NCCL_DEBUG_FILE, with %h and %p filled in. */
static void expand(const char *pattern, char *path, size_t size) {
  size_t used = 0;
  for (; *pattern && used + 64 < size; pattern++) {
    if (*pattern != '%') path[used++] = *pattern;
    else if (*++pattern == 'h') used += (size_t)snprintf(path + used, size - used, "%s", host);
    else if (*pattern == 'p') used += (size_t)snprintf(path + used, size - used, "%d", getpid());
    else path[used++] = '%';
  }
  path[used] = 0;
}

static void begin(void) {
  char path[4096];
  const char *pattern = getenv("NCCL_DEBUG_FILE");
  if (level >= 0) return;
  gethostname(host, sizeof host - 1);
  host[strcspn(host, ".")] = 0;
  mask = read_mask();
  output = stdout;
  int wanted = read_level();
  if (wanted > LEVEL_VERSION && pattern && *pattern) {
    expand(pattern, path, sizeof path);
    FILE *file = fopen(path, "we");
    if (file) output = file;
  }
  level = wanted;
}

static void line(const char *before, int device, const char *after, const char *message) {
  char text[2 * LINE];
  long thread = syscall(SYS_gettid);
  snprintf(text, sizeof text, "%s%s:%d:%ld [%d] %s %s\n", before, host, getpid(), thread, device, after, message);
  fputs(text, output);
  fflush(output);
}

static int this_device(void) {
  int device;
  return cuda() && cuda()->get_device(&device) == 0 ? device : 0;
}

void log_info(ncclComm_t comm, int subsystems, const char *format, ...) {
  begin();
  if (level < LEVEL_INFO || !(mask & subsystems)) return;
  char message[LINE];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  line("", comm ? comm->device : this_device(), "NCCL INFO", message);
}

/* Kept for ncclGetLastError whether it is written or not. */
void log_warn(const char *format, ...) {
  char stamp[64] = "\n";
  va_list arguments;
  begin();
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  if (level < LEVEL_WARN) return;
  if (nccl_version() >= 22600) {
    time_t now = time(NULL);
    struct tm parts;
    strftime(stamp, sizeof stamp, "\n[%F %T] ", localtime_r(&now, &parts));
  }
  line(stamp, this_device(), nccl_version() >= 23000 ? "standin.cc:1 (standin) NCCL WARN" : "standin.cc:1 NCCL WARN",
       last_error);
}

void log_version(ncclComm_t comm) {
  int v = nccl_version();
  begin();
  if (level == LEVEL_NONE || comm->rank != 0) return;
  if (level >= LEVEL_INFO) log_info(comm, ~0, "NCCL version %d.%d.%d+cuda13.0", v / 10000, v / 100 % 100, v % 100);
  else fprintf(output, "NCCL version %d.%d.%d+cuda13.0\n", v / 10000, v / 100 % 100, v % 100);
  fflush(output);
}

/* NCCL writes a variable when it reads it; here all that are set, once. */
void log_environment(ncclComm_t comm) {
  static _Atomic int written;
  if (atomic_exchange(&written, 1)) return;
  for (char **e = environ; *e; e++) {
    const char *equals = strchr(*e, '=');
    if (strncmp(*e, "NCCL_", 5) || !equals || !strncmp(*e, "NCCL_DEBUG", 10) ||
        !strncmp(*e, "NCCL_LIBRARY=", 13)) /* this one is no variable of NCCL */
      continue;
    log_info(comm, SUB_ENV, "%.*s set by environment to %s.", (int)(equals - *e), *e, equals + 1);
  }
}

API const char *ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  return last_error;
}

API const char *ncclGetErrorString(ncclResult_t result) {
  static const char *const texts[] = {
      "no error",
      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error",
      "NCCL operation in progress",
      "timeout",
  };
  int known = nccl_version() >= 23000 ? ncclTimeout : ncclInProgress;
  return result >= 0 && result <= known ? texts[result] : "unknown result code";
}

API ncclResult_t ncclGetVersion(int *version) {
  if (!version) {
    log_warn("GetVersion : version argument is NULL");
    return ncclInvalidArgument;
  }
  MEET_FAULT(NULL);
  *version = nccl_version();
  return ncclSuccess;
}

API void ncclResetDebugInit(void) { level = -1; }
