// New tokens into the slots of their requests: keys turned back by their positions, values as they are, nothing received yet.
//
// A program has one kv head of one token, a thread two dimensions D / 2 apart. Rows and sums say where: those that belong to nobody have a place too.

#include "device.cuh"

extern "C" __global__ void keep_rows(int heads, int key_stride, int value_stride, const void* keys, const void* values, const float* cosine,
                                     const float* sine, const long long* rows, const long long* sums, void* out_keys, void* out_values, float* received) {
  const int n = blockIdx.x, h = blockIdx.y, i = threadIdx.x;
  const long long key = (long long)n * key_stride + h * D + i, value = (long long)n * value_stride + h * D + i;
  const long long angle = (long long)n * D + i, to = (rows[n] * heads + h) * D + i;
  const float low = element(keys, key), high = element(keys, key + D / 2);
  store(out_keys, to, low * cosine[angle] - high * sine[angle]);
  store(out_keys, to + D / 2, high * cosine[angle + D / 2] + low * sine[angle + D / 2]);
  store(out_values, to, element(values, value));
  store(out_values, to + D / 2, element(values, value + D / 2));
  if (i == 0) received[sums[n * heads + h]] = 0.f;
}
