/* Arithmetic in every data type, rounded at each step as the type is, in the order of ranks. All access to device
   memory is here; in the ThreadSanitizer build these reads and writes are the ones that are checked. */
#include "comm.h"

#include <math.h>
#include <string.h>

static const unsigned char widths[DTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

size_t dtype_bytes(int dtype) { return widths[dtype]; }

int dtype_is_integer(int dtype) { return dtype <= ncclUint64; }

void buffer_copy(void *target, const void *source, size_t bytes) { memmove(target, source, bytes); }

/* ---- floats of one and two bytes: sign, exponent, mantissa. e4m3 has no infinity, and one NaN. */
typedef struct {
  int exponent_bits, mantissa_bits, has_infinity;
} format;

static const format half = {5, 10, 1}, bfloat = {8, 7, 1}, e4m3 = {4, 3, 0}, e5m2 = {5, 2, 1};

static float widen(unsigned bits, format f) {
  int bias = (1 << (f.exponent_bits - 1)) - 1, top = (1 << f.exponent_bits) - 1;
  int exponent = (int)(bits >> f.mantissa_bits) & top, mantissa = (int)bits & ((1 << f.mantissa_bits) - 1);
  float sign = bits >> (f.exponent_bits + f.mantissa_bits) & 1 ? -1.0f : 1.0f;
  if (exponent == top && f.has_infinity) return mantissa ? NAN : sign * INFINITY;
  if (exponent == top && mantissa == (1 << f.mantissa_bits) - 1) return NAN;
  if (exponent == 0) return sign * ldexpf((float)mantissa, 1 - bias - f.mantissa_bits);
  return sign * ldexpf((float)(mantissa | 1 << f.mantissa_bits), exponent - bias - f.mantissa_bits);
}

/* To the nearest, ties to even. Too large becomes infinity; for the one-byte types the largest number. */
static unsigned narrow(float value, format f) {
  int bias = (1 << (f.exponent_bits - 1)) - 1, top = (1 << f.exponent_bits) - 1, exponent;
  unsigned full = (1u << f.mantissa_bits) - 1, infinity = (unsigned)top << f.mantissa_bits;
  unsigned sign = (signbit(value) ? 1u : 0u) << (f.exponent_bits + f.mantissa_bits);
  unsigned largest = f.has_infinity ? infinity - 1 : (infinity | full) - 1;
  if (isnan(value)) return sign | infinity | full;
  if (value == 0) return sign;
  if (isinf(value)) return sign | (f.has_infinity ? infinity : largest);
  frexpf(fabsf(value), &exponent);
  exponent = exponent - 1 < 1 - bias ? 1 - bias : exponent - 1;
  unsigned steps = (unsigned)nearbyintf(ldexpf(fabsf(value), f.mantissa_bits - exponent));
  unsigned bits = steps <= full ? steps : ((unsigned)(exponent + bias - 1) << f.mantissa_bits) + steps;
  if (bits > largest) return sign | (f.exponent_bits + f.mantissa_bits == 7 ? largest : infinity);
  return sign | bits;
}

/* bfloat16 is the upper half of a float, and the type that is used most. */
static float widen_bfloat(unsigned bits) {
  uint32_t wide = bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static unsigned narrow_bfloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (isnan(value)) return narrow(value, bfloat);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

/* ---- one loop a type and operation: LOAD and STORE turn stored bits into numbers and back */
#define SAME(x) (x)
#define LOAD_HALF(x) widen(x, half)
#define STORE_HALF(x) (uint16_t)narrow(x, half)
#define LOAD_BFLOAT(x) widen_bfloat(x)
#define STORE_BFLOAT(x) (uint16_t)narrow_bfloat(x)
#define LOAD_E4M3(x) widen(x, e4m3)
#define STORE_E4M3(x) (uint8_t)narrow(x, e4m3)
#define LOAD_E5M2(x) widen(x, e5m2)
#define STORE_E5M2(x) (uint8_t)narrow(x, e5m2)

/* A type's code, how it is stored, the number it is reckoned with, and how the one becomes the other. Integers wrap, so
   they are reckoned without sign where that matters. */
#define EACH_TYPE(DO)                                            \
  DO(ncclInt8, int8_t, int32_t, SAME, (int8_t))                  \
  DO(ncclUint8, uint8_t, uint32_t, SAME, (uint8_t))              \
  DO(ncclInt32, int32_t, int64_t, SAME, (int32_t))               \
  DO(ncclUint32, uint32_t, uint64_t, SAME, (uint32_t))           \
  DO(ncclInt64, int64_t, int64_t, SAME, (int64_t))               \
  DO(ncclUint64, uint64_t, uint64_t, SAME, (uint64_t))           \
  DO(ncclFloat16, uint16_t, float, LOAD_HALF, STORE_HALF)        \
  DO(ncclFloat32, float, float, SAME, SAME)                      \
  DO(ncclFloat64, double, double, SAME, SAME)                    \
  DO(ncclBfloat16, uint16_t, float, LOAD_BFLOAT, STORE_BFLOAT)   \
  DO(ncclFloat8e4m3, uint8_t, float, LOAD_E4M3, STORE_E4M3)      \
  DO(ncclFloat8e5m2, uint8_t, float, LOAD_E5M2, STORE_E5M2)

#define LOOP(stored, number, LOAD, STORE, expression)        \
  for (size_t i = 0; i < count; i++) {                       \
    number a = LOAD(into[i]), b = LOAD(from[i]);             \
    into[i] = STORE(expression);                             \
  }                                                          \
  break

#define COMBINE_TYPE(code, stored, number, LOAD, STORE)                                 \
  case code: {                                                                          \
    stored *into = total;                                                               \
    const stored *from = more;                                                          \
    switch (op) {                                                                       \
      case ncclProd: LOOP(stored, number, LOAD, STORE, a * b);                          \
      case ncclMax: LOOP(stored, number, LOAD, STORE, a > b || a != a ? a : b);         \
      case ncclMin: LOOP(stored, number, LOAD, STORE, a < b || a != a ? a : b);         \
      default: LOOP(stored, number, LOAD, STORE, a + b);                                \
    }                                                                                   \
    break;                                                                              \
  }

void buffer_combine(void *total, const void *more, size_t count, int dtype, int op) {
  switch (dtype) { EACH_TYPE(COMBINE_TYPE) }
}

#define SCALE_TYPE(code, stored, number, LOAD, STORE)                                          \
  case code: {                                                                                 \
    stored *at = buffer;                                                                       \
    number by = dtype_is_integer(code) ? (number)integer : (number)LOAD((stored)STORE((number)real)); \
    for (size_t i = 0; i < count; i++) at[i] = STORE(LOAD(at[i]) * by);                        \
    break;                                                                                     \
  }

void buffer_scale(void *buffer, size_t count, int dtype, double real, int64_t integer) {
  switch (dtype) { EACH_TYPE(SCALE_TYPE) }
}

#define DIVIDE_TYPE(code, stored, number, LOAD, STORE)                                     \
  case code: {                                                                             \
    stored *at = buffer;                                                                   \
    for (size_t i = 0; i < count; i++) at[i] = STORE(LOAD(at[i]) / (number)by);            \
    break;                                                                                 \
  }

void buffer_divide(void *buffer, size_t count, int dtype, int by) {
  switch (dtype) { EACH_TYPE(DIVIDE_TYPE) }
}

#define READ_TYPE(code, stored, number, LOAD, STORE)    \
  case code: {                                          \
    stored value;                                       \
    memcpy(&value, scalar, sizeof value);               \
    *real = (double)LOAD(value);                        \
    *integer = (int64_t)LOAD(value);                    \
    break;                                              \
  }

void scalar_read(const void *scalar, int dtype, double *real, int64_t *integer) {
  switch (dtype) { EACH_TYPE(READ_TYPE) }
}
