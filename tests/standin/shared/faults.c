/* Injected faults: reads the rules once, when the library is loaded, and finds the one that a call meets. */
#define _GNU_SOURCE
#include "faults.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RULES = 32, EXIT_STATUS = 17 };

typedef enum { ACT_CODE, ACT_HANG, ACT_REMOTE, ACT_WRONG, ACT_SLEEP, ACT_EXIT, ACT_KILL } action;

typedef struct {
  char function[48];
  long first; /* the number of the call, from 1 */
  int onward; /* whether later calls meet it too */
  action act;
  long value;
  int sticky;
  _Atomic long calls;
} rule;

static rule rules[MAX_RULES];
static int rule_count;

/* The rank of this process, as launchers tell it; -1 if none does. */
static long rank_of_process(void) {
  static const char *const names[] = {"STANDIN_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    const char *value = getenv(names[i]);
    if (value && *value) return atol(value);
  }
  return -1;
}

static void refuse(const char *text) {
  fprintf(stderr, "STANDIN_FAULTS: cannot read the rule '%s'; see tests/standin/README.md\n", text);
  abort();
}

static void read_action(rule *r, const char *text, const char *whole) {
  static const struct { const char *word; action act; } words[] = {
      {"hang", ACT_HANG}, {"remote", ACT_REMOTE}, {"wrong", ACT_WRONG}, {"exit", ACT_EXIT}, {"kill", ACT_KILL}};
  char *end;
  for (size_t i = 0; i < sizeof words / sizeof *words; i++)
    if (!strcmp(text, words[i].word)) {
      r->act = words[i].act;
      return;
    }
  r->act = strncmp(text, "sleep", 5) ? ACT_CODE : ACT_SLEEP;
  if (r->act == ACT_SLEEP) text += 5;
  r->value = strtol(text, &end, 10);
  r->sticky = *end == '!';
  if (end == text || end[r->sticky]) refuse(whole);
}

/* [RANK@]FUNCTION[#N[+]]=ACTION */
static void read_rule(char *text, long rank) {
  char whole[128], *at = strchr(text, '@'), *equals = strchr(text, '='), *number;
  snprintf(whole, sizeof whole, "%s", text);
  if (!equals || rule_count == MAX_RULES) refuse(whole);
  *equals = 0;
  if (at) {
    *at = 0;
    if (atol(text) != rank) return;
    text = at + 1;
  }
  rule *r = &rules[rule_count++];
  r->first = 1;
  r->onward = 1;
  if ((number = strchr(text, '#'))) {
    char *end;
    *number++ = 0;
    r->first = strtol(number, &end, 10);
    r->onward = *end == '+';
    if (r->first < 1 || end[r->onward]) refuse(whole);
  }
  if (!*text || strlen(text) >= sizeof r->function) refuse(whole);
  strcpy(r->function, text);
  read_action(r, equals + 1, whole);
}

__attribute__((constructor)) static void read_rules(void) {
  const char *value = getenv("STANDIN_FAULTS");
  char *copy = value ? strdup(value) : NULL, *rest = copy, *one;
  while (rest && (one = strsep(&rest, ",")))
    if (*one) read_rule(one, rank_of_process());
  free(copy);
}

static int same_function(const char *rule_name, const char *function) {
  size_t n = strlen(rule_name);
  return !strncmp(rule_name, function, n) && (!function[n] || !strncmp(function + n, "_v", 2));
}

static void pause_ms(long ms) {
  struct timespec left = {ms / 1000, ms % 1000 * 1000000};
  while (nanosleep(&left, &left)) continue;
}

static fault carry_out(const rule *r) {
  switch (r->act) {
    case ACT_CODE: return (fault){FAULT_CODE, (int)r->value, r->sticky};
    case ACT_HANG: return (fault){FAULT_HANG, 0, 0};
    case ACT_REMOTE: return (fault){FAULT_REMOTE, 0, 0};
    case ACT_WRONG: return (fault){FAULT_WRONG, 0, 0};
    case ACT_SLEEP: pause_ms(r->value); break;
    case ACT_EXIT: _exit(EXIT_STATUS);
    case ACT_KILL: kill(getpid(), SIGKILL); break;
  }
  return (fault){FAULT_NONE, 0, 0};
}

fault standin_fault(const char *function) {
  for (int i = 0; i < rule_count; i++) {
    rule *r = &rules[i];
    if (!same_function(r->function, function)) continue;
    long call = atomic_fetch_add(&r->calls, 1) + 1;
    if (call != r->first && !(r->onward && call > r->first)) continue;
    fault found = carry_out(r);
    if (found.kind != FAULT_NONE) return found;
  }
  return (fault){FAULT_NONE, 0, 0};
}
