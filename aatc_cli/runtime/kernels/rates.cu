// how fast a device shifts and masks: eight words of a thread, independent of one another
typedef unsigned int u32;

extern "C" __global__ void integer_rate(const int rounds, const int by, const u32 mask, u32* out) {
  u32 word[8], found[8];
#pragma unroll
  for (int i = 0; i < 8; i++) { word[i] = threadIdx.x * 0x9E3779B9u + i; found[i] = blockIdx.x; }
  for (int n = 0; n < rounds; n++) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      // one shift, and one logic instruction of three operands
      word[i] >>= by;
      found[i] = (word[i] & mask) ^ found[i];
    }
  }
  u32 all = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) all ^= found[i] + word[i];
  if (all == 0x12345678u) out[0] = all;
}
