/* The kernels that every image has, whatever it holds. */
#pragma once
#include "driver.h"

enum { MAX_PARAMETERS = 6 };

struct kernel {
  const char *name;
  void (*run)(const uint64_t *arguments);
  unsigned char bytes[MAX_PARAMETERS]; /* of each parameter, in order */
};

const struct kernel *kernel_named(const char *name);
