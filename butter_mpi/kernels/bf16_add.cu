// target[i] += source[i] in bfloat16: added in single precision, rounded once to the nearest (ties to even).
// No header is needed, so that NVRTC alone can compile it.

__device__ float widened(unsigned short bits) { return __uint_as_float(static_cast<unsigned int>(bits) << 16); }

__device__ unsigned short rounded(float value) {
  unsigned int bits = __float_as_uint(value);
  // A number that is none keeps its top bits and stays one that is none.
  if (value != value) return static_cast<unsigned short>((bits >> 16) | 0x40u);
  return static_cast<unsigned short>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

extern "C" __global__ void bf16_add_inplace(unsigned short *target, const unsigned short *source,
                                            unsigned long long count) {
  unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  for (unsigned long long i = blockIdx.x * static_cast<unsigned long long>(blockDim.x) + threadIdx.x; i < count; i += step)
    target[i] = rounded(widened(target[i]) + widened(source[i]));
}
