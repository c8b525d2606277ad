/* The work of the device itself. Compiled with -fsanitize=thread in the build of that name: its reads and writes are
   the ones that are checked. */
#define _GNU_SOURCE
#include "kernels.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

void device_copy(void *target, const void *source, size_t bytes) { memmove(target, source, bytes); }

void device_fill(void *target, uint64_t value, size_t width, size_t count) {
  for (size_t i = 0; i < count; i++) memcpy((char *)target + i * width, &value, width);
}

static void *array(const uint64_t *argument, size_t bytes) {
  void *place = memory_range(*argument, bytes);
  if (!place) standin_break(CUDA_ERROR_ILLEGAL_ADDRESS);
  return place;
}

static float widen(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7FFF;
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* bf16_add_inplace(target, source, count): target[i] += source[i], rounded to nearest even */
static void bf16_add_inplace(const uint64_t *a) {
  size_t count = a[2];
  uint16_t *target = array(&a[0], count * 2), *source = array(&a[1], count * 2);
  for (size_t i = 0; target && source && i < count; i++) target[i] = narrow(widen(target[i]) + widen(source[i]));
}

/* The kernel of the package, compiled as C: what CUDA has, and one thread. */
#define __device__ static
#define __global__ static
static const struct { unsigned x; } blockIdx = {0}, threadIdx = {0}, blockDim = {1}, gridDim = {1};

static float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

#include "../../../butter_mpi/kernels/premul.cu"

/* premul(data, count, factor, kind): data[i] *= factor, in the element type of that number */
static void run_premul(const uint64_t *a) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1, 2, 2};
  void *data = a[3] < LENGTH(sizes) ? array(&a[0], a[1] * sizes[a[3]]) : NULL;
  if (data) premul(data, a[1], a[2], (unsigned)a[3]);
}

/* fill_f32(target, value, count) */
static void fill_f32(const uint64_t *a) {
  float value, *target = array(&a[0], a[2] * 4);
  memcpy(&value, &a[1], sizeof value);
  for (size_t i = 0; target && i < a[2]; i++) target[i] = value;
}

/* axpy_f32(factor, source, target, count): target[i] += factor * source[i] */
static void axpy_f32(const uint64_t *a) {
  float factor, *source = array(&a[1], a[3] * 4), *target = array(&a[2], a[3] * 4);
  memcpy(&factor, &a[0], sizeof factor);
  for (size_t i = 0; source && target && i < a[3]; i++) target[i] += factor * source[i];
}

/* delay_us(microseconds) */
static void delay_us(const uint64_t *a) {
  uint32_t microseconds = (uint32_t)a[0];
  struct timespec left = {microseconds / 1000000, microseconds % 1000000 * 1000};
  while (nanosleep(&left, &left)) continue;
}

/* wait_flag(flag): until the 32-bit word there is not 0. The word may be in ordinary host memory. */
static void wait_flag(const uint64_t *a) {
  const _Atomic uint32_t *flag = memory_any(a[0], sizeof *flag);
  if (!flag) standin_break(CUDA_ERROR_ILLEGAL_ADDRESS);
  while (flag && !atomic_load_explicit(flag, memory_order_relaxed)) {
    struct timespec nap = {0, 100000};
    nanosleep(&nap, NULL);
  }
}

static const struct kernel kernels[] = {
    {"bf16_add_inplace", bf16_add_inplace, {8, 8, 8}}, {"fill_f32", fill_f32, {8, 4, 8}},
    {"axpy_f32", axpy_f32, {4, 8, 8, 8}},              {"delay_us", delay_us, {4}},
    {"wait_flag", wait_flag, {8}},                         {"premul", run_premul, {8, 8, 8, 4}},
};

const struct kernel *kernel_named(const char *name) {
  for (size_t i = 0; i < LENGTH(kernels); i++)
    if (!strcmp(kernels[i].name, name)) return &kernels[i];
  return NULL;
}
