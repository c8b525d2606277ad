/* What shall go wrong in this process: the rules in STANDIN_FAULTS, whose grammar README.md has. */
#pragma once

typedef enum { FAULT_NONE, FAULT_CODE, FAULT_HANG, FAULT_REMOTE, FAULT_WRONG } fault_kind;

typedef struct {
  fault_kind kind;
  int code;   /* the status to return, for FAULT_CODE */
  int sticky; /* whether every later call of the process shall return it too */
} fault;

/* Counts one call of `function` (a suffix such as _v2 is ignored) and returns what shall happen in it. Sleeping and
   ending the process are done here. */
fault standin_fault(const char *function);
