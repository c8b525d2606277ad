// data[i] *= factor in the element's own type, as NCCL's sum that multiplies first does: a product is rounded once, to
// the nearest (ties to even); integers wrap; 8-bit floats stay at their largest number.
// No header is needed, so that NVRTC alone can compile it; and a C compiler can, given the few names of CUDA.

// A small float's value; `infinite`: the largest exponent is for infinities, else only its last number is none.
__device__ float premul_widened(unsigned int code, int exponent_bits, int fraction_bits, int infinite) {
  unsigned int top = (1u << exponent_bits) - 1, field = code >> fraction_bits & top;
  unsigned int whole = 1u << fraction_bits, fraction = code & (whole - 1);
  int least = 2 - (1 << (exponent_bits - 1));
  float value;
  if (infinite ? field == top && fraction : field == top && fraction == whole - 1)
    value = __uint_as_float(0x7FFFFFFFu);
  else if (infinite && field == top)
    value = __uint_as_float(0x7F800000u);
  else
    value = field ? ldexpf((float)(whole + fraction), (int)field - 1 + least - fraction_bits)
                  : ldexpf((float)fraction, least - fraction_bits);
  return code >> (exponent_bits + fraction_bits) & 1 ? -value : value;
}

// The nearest small float.
__device__ unsigned int premul_rounded(float value, int exponent_bits, int fraction_bits, int infinite, int saturates) {
  unsigned int bits = exponent_bits + fraction_bits, none = (1u << bits) - 1;
  unsigned int infinity = ((1u << exponent_bits) - 1) << fraction_bits, largest = (infinite ? infinity : none) - 1;
  unsigned int sign = __float_as_uint(value) >> 31 << bits, code = none;
  float size = fabsf(value);
  if (value != value) return sign | none;
  if (size <= 3.4028235e38f) {
    int least = 2 - (1 << (exponent_bits - 1)), exponent = size > 0 ? ilogbf(size) : least;
    if (exponent < least) exponent = least;
    // Counted from the number with this exponent and no fraction; one that is rounded up to the next is right as well.
    code = (unsigned int)rintf(ldexpf(size, fraction_bits - exponent));
    code += (unsigned int)(exponent - least) << fraction_bits;
  }
  if (code > largest) code = saturates ? largest : infinity;
  return sign | code;
}

__device__ unsigned int premul_product(unsigned int code, unsigned int by, int exponent_bits, int fraction_bits,
                                       int infinite, int saturates) {
  float product = premul_widened(code, exponent_bits, fraction_bits, infinite) *
                  premul_widened(by, exponent_bits, fraction_bits, infinite);
  return premul_rounded(product, exponent_bits, fraction_bits, infinite, saturates);
}

#define PREMUL_EACH(type, member, product)                 \
  {                                                        \
    type *at = (type *)data, by = f.member;                \
    for (; i < count; i += step) at[i] = (type)(product);  \
    return;                                                \
  }

// kind: the number of the element type, as butter_mpi.DType has it. factor: one element, in the lowest bytes.
#ifdef __cplusplus
extern "C"
#endif
__global__ void premul(void *data, unsigned long long count, unsigned long long factor, unsigned int kind) {
  unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
  union {
    unsigned long long u64;
    unsigned int u32;
    unsigned short u16;
    unsigned char u8;
    float f32;
    double f64;
  } f;
  f.u64 = factor;
  switch (kind) {
    case 0: case 1: PREMUL_EACH(unsigned char, u8, at[i] * by)
    case 2: case 3: PREMUL_EACH(unsigned int, u32, at[i] * by)
    case 4: case 5: PREMUL_EACH(unsigned long long, u64, at[i] * by)
    case 6: PREMUL_EACH(unsigned short, u16, premul_product(at[i], by, 5, 10, 1, 0))
    case 7: PREMUL_EACH(float, f32, at[i] * by)
    case 8: PREMUL_EACH(double, f64, at[i] * by)
    case 9: PREMUL_EACH(unsigned short, u16, premul_product(at[i], by, 8, 7, 1, 0))
    case 10: PREMUL_EACH(unsigned char, u8, premul_product(at[i], by, 4, 3, 0, 1))
    case 11: PREMUL_EACH(unsigned char, u8, premul_product(at[i], by, 5, 2, 1, 1))
    case 12: case 13: PREMUL_EACH(unsigned short, u16, (unsigned int)at[i] * by)
  }
}
