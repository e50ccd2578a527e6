// Scores of a tile: codes of its keys, 16 tokens at a time, times the matrix of the fast pairs and the absorbed queries of the slow ones.
//
// A field of two bits in the low half of a byte is an e4m3 number: of tokens of even place in bits 0 and 1, itself times 2^-9, and of odd ones in
// bits 2 and 3, four times as much, for which their queries are smaller. Plane 0 is not in the record: it is one everywhere and its rows are the
// sum of the offsets.

#define SUMS (4 * JF + (JS > 0 ? 4 * HT : 0))

// what a walk over tiles reads in shared memory
struct Tables {
  const uint2* rot;            // [4 m][JF][32] cos and sin of this warp's even tokens, from the start of the span
  const int4* planes;          // [2 KS]: byte in the record, bits, block, weight of the lowest bit
  unsigned long long matrix;   // of this group: fast pairs and absorbed queries
};

// operands of rows 2 m and 2 m + 1; planes 1 .. TWOS have two bits
template <int TWOS>
__device__ __forceinline__ void unpack_keys(u32 (&a)[KS][4], const u8* rec, int m, int lane) {
  a[0][0] = 0x10101010u; a[0][1] = 0x20202020u;
#pragma unroll
  for (int i = 1; i < 2 * KS; i++) {
    // planes that a head lacks are read from somewhere and meet rows of zeros
    const u32* at = (const u32*)(rec + (i <= TWOS ? 256 * (i - 1) : 128 * (TWOS + i - 1))) + lane;
    u32 even, odd;
    if (i <= TWOS) {
      const u32 word = at[32 * (m / 2)], moved = m % 2 ? word >> 4 : word;
      even = moved & 0x03030303u; odd = moved & 0x0C0C0C0Cu;
    } else {
      const u32 word = at[0];
      even = (word >> (2 * m)) & 0x01010101u;
      odd = (m == 0 ? word << 1 : word >> (m == 0 ? 0 : 2 * m - 1)) & 0x04040404u;
    }
    a[i / 2][i % 2 * 2] = even; a[i / 2][i % 2 * 2 + 1] = odd;
  }
}

__device__ __forceinline__ void multiply(u32 (&k)[SUMS], const u32 (&a)[KS][4], const Tables& with) {
  arrive();
  wgmma<0>(k, a[0], with.matrix);
#pragma unroll
  for (int i = 1; i < KS; i++) wgmma<1>(k, a[i], with.matrix + i * (CORES / 16));
  close_group();
}

// scores before token scales: sc[ht][m][0] is token 8 g + 2 m of head 4 ht + t, [1] the token after it. `select` picks a head's columns of the
// absorbed queries, `far` is one and the place of the lane's first token from the middle of the span
template <int TWOS>
__device__ __forceinline__ void key_scores(float (&sc)[HT][4][2], const u8* rec, const Tables& with, const uint2* turned,
                                           const u32 (&select)[HT][2], u32 far, int lane) {
#pragma unroll
  for (int m = 0; m < 4; m++) {
    u32 a[KS][4], sum[SUMS];
    unpack_keys<TWOS>(a, rec, m, lane);
    multiply(sum, a, with);
    pending<0>();
    keep(sum);
#pragma unroll
    for (int i = 0; i < KS; i++) keep(a[i]);
    float s[HT][4];
#pragma unroll
    for (int ht = 0; ht < HT; ht++) {
#pragma unroll
      for (int c = 0; c < 4; c++) s[ht][c] = 0.f;
      if (JS > 0) {
        const u32* slow = sum + 4 * JF + 4 * ht;
        const u32 place = add2(far, m == 0 ? 0u : m == 1 ? 0x28000000u : m == 2 ? 0x2C000000u : 0x2E000000u);  // (0, 2 m / 64)
        hmma(s[ht], mul2(slow[0], place), mul2(slow[1], place), mul2(slow[2], place), mul2(slow[3], place), select[ht][0], select[ht][1]);
      }
    }
#pragma unroll
    for (int j = 0; j < JF; j++) {
      // both rows of a lane are turned as the first is; the second meets a query turned back by a token in the odd columns
      const uint2 c = with.rot[(m * JF + j) * 32 + lane];
      u32 f[4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 v = sum[4 * j + r], w = sum[4 * j + 2 + r];
        f[r] = fma2(neg2(w), c.y, mul2(v, c.x));
        f[2 + r] = fma2(w, c.x, mul2(v, c.y));
      }
#pragma unroll
      for (int ht = 0; ht < HT; ht++) {
        const uint2 q = turned[(ht * JF + j) * 32 + lane];
        hmma(s[ht], f[0], f[1], f[2], f[3], q.x, q.y);
      }
    }
#pragma unroll
    for (int ht = 0; ht < HT; ht++) { sc[ht][m][0] = s[ht][0]; sc[ht][m][1] = s[ht][3]; }
  }
}
