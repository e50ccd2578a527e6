// Values absorbed in integers: softmax weights of 16 bits in two bytes, codes as they lie in their bytes. Rows of the product are channels: those
// of the upper half of a block count four times.

#define WEIGHT_STEPS 32640.f  // steps of a weight of one; none is above LIMIT, so that two bytes hold it
#define LIMIT 2.f
#define VALUE_SCALE (1.f / WEIGHT_STEPS)
#define FAINT 9.5367432e-7f   // least value scale that the reference of the weights looks at

__device__ __forceinline__ void umma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// weights of a lane's 8 tokens as operands: column 2 t has the upper bytes of head t and column 2 t + 1 the lower
__device__ __forceinline__ void operands(u32 (&b)[HT][4], const float (&weight)[HT][4][2], float steps) {
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const u32 x = __float_as_uint(fmaf(weight[ht][n][0], steps, MAGIC_F)), y = __float_as_uint(fmaf(weight[ht][n][1], steps, MAGIC_F));
      b[ht][n] = transpose8(__byte_perm(x, y, 0x4051));
    }
}

// 32 tokens of 16 latents: fields of x under `mask` are of channel g, two bits higher up those of channel g + 8; y has 16 tokens more
__device__ __forceinline__ void value_half(int (&o)[HT][NB][4], int i, u32 x, u32 y, u32 mask, const u32 (&b)[HT][4], int n) {
  const u32 a0 = x & mask, a1 = x & (mask << 2), a2 = y & mask, a3 = y & (mask << 2);
#pragma unroll
  for (int ht = 0; ht < HT; ht++) umma(o[ht][i], a0, a1, a2, a3, b[ht][n], b[ht][n + 1]);
}
__device__ __forceinline__ void pair_plane(int (&o)[HT][NB][4], int i, const u8* at, int lane, const u32 (&b)[HT][4]) {
  const uint2 v = ((const uint2*)at)[lane];
  value_half(o, i, v.x, v.x >> 4, 0x03030303u, b, 0);
  value_half(o, i, v.y, v.y >> 4, 0x03030303u, b, 2);
}
// a plane of one bit, which counts once or, behind another plane, twice
template <int TWICE>
__device__ __forceinline__ void single_plane(int (&o)[HT][NB][4], int i, const u8* at, int lane, const u32 (&b)[HT][4]) {
  const u32 v = ((const u32*)at)[lane];
  if (TWICE) {
    value_half(o, i, v << 1, v >> 3, 0x02020202u, b, 0);
    value_half(o, i, v, v >> 4, 0x02020202u, b, 2);
  } else {
    value_half(o, i, v, v >> 4, 0x01010101u, b, 0);
    value_half(o, i, v >> 1, v >> 5, 0x01010101u, b, 2);
  }
}
// planes of one rank: `pairs` blocks have one of two bits, those up to `all` one of one bit
template <int LATER>
__device__ __forceinline__ void value_rank(int (&o)[HT][NB][4], const u8* at, int pairs, int all, int lane, const u32 (&b)[HT][4]) {
  const u8* singles = at + 128 * pairs;
#pragma unroll
  for (int i = 0; i < NB; i++) {
    if (i >= all) break;
    if (i < pairs) pair_plane(o, i, at + 256 * i, lane, b);
    else single_plane<LATER>(o, i, singles + 128 * i, lane, b);
  }
}
// sums of codes times weights over all blocks, divided by 2^(width - 2) of blocks wider than that. Byte w - 1 of `counts` is how many blocks
// have w bits or more
__device__ __forceinline__ void sum_values(int (&o)[HT][NB][4], const u8* at, unsigned long long counts, int lane, const float (&weight)[HT][4][2]) {
  u32 b[HT][4];
  operands(b, weight, WEIGHT_STEPS);
  value_rank<0>(o, at, (int)(counts >> 8) & 255, (int)counts & 255, lane, b);
  float steps = WEIGHT_STEPS;
#pragma unroll 1
  while (counts >> 16) {
    at += 128 * (((int)(counts >> 8) & 255) + ((int)counts & 255));
    counts >>= 16; steps *= 0.25f;
    operands(b, weight, steps);
    value_rank<1>(o, at, (int)(counts >> 8) & 255, (int)counts & 255, lane, b);
  }
}
__device__ __forceinline__ unsigned long long value_counts(const int* widths) {
  unsigned long long counts = 0;
  for (int i = 0; i < NB; i++)
    for (int w = 0; w < widths[i]; w++) counts += 1ull << (8 * w);
  return counts;
}

// scores sc, before key scales, become softmax weights times value scales; sums follow. The reference mref of the weights moves only where
// one would exceed LIMIT
__device__ __forceinline__ void weigh(const Shape& s, float (&sc)[HT][4][2], float (&weight)[HT][4][2], const u8* scales, int tile,
                                      int first_hidden, bool valid, int (&o)[HT][NB][4], float (&mref)[HT], float (&l)[HT], float (&lv)[HT],
                                      int lane) {
  const int g = lane / 4;
  const uint4 ka = ((const uint4*)scales)[g], va = ((const uint4*)(scales + 128))[g];
  const u32 kw[4] = {ka.x, ka.y, ka.z, ka.w}, vw[4] = {va.x, va.y, va.z, va.w};
  float k[4][2], v[4][2];
#pragma unroll
  for (int m = 0; m < 4; m++) { k[m][0] = half_lo(kw[m]); k[m][1] = half_hi(kw[m]); v[m][0] = half_lo(vw[m]); v[m][1] = half_hi(vw[m]); }
  const int first = !valid ? 64 : first_hidden - (s.sinks + 64 * tile);  // rows before are hidden
  if (first > 0) {
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (8 * g + 2 * m + r < first) {
          k[m][r] = 1.f; v[m][r] = 0.f;
#pragma unroll
          for (int ht = 0; ht < HT; ht++) sc[ht][m][r] = HIDDEN;
        }
  }
  bool fits = true;
  float sum[HT], sum_v[HT];
#pragma unroll
  for (int again = 0; again < 2; again++) {
#pragma unroll
    for (int ht = 0; ht < HT; ht++) {
      float top = 0.f;
      sum[ht] = 0.f; sum_v[ht] = 0.f;
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float e = ex2(fmaf(sc[ht][m][r], k[m][r], -mref[ht]));
          weight[ht][m][r] = e * v[m][r];
          sum[ht] += e; sum_v[ht] += weight[ht][m][r];
          top = fmaxf(top, weight[ht][m][r]);
        }
      fits &= top <= LIMIT && sum[ht] <= 64.f / FAINT;
    }
    if (again || __all_sync(~0u, fits)) break;
#pragma unroll
    for (int ht = 0; ht < HT; ht++) {
      float top = mref[ht];
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) top = fmaxf(top, fmaf(sc[ht][m][r], k[m][r], __log2f(fmaxf(v[m][r], FAINT))));
#pragma unroll
      for (int n = 4; n < 32; n <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, n));
      const float f = ex2(mref[ht] - top);
      mref[ht] = top; l[ht] *= f; lv[ht] *= f;
      if (!__any_sync(~0u, l[ht] > 0.f)) continue;  // nothing was summed yet
#pragma unroll
      for (int i = 0; i < NB; i++)
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
          const float both = fmaf((float)o[ht][i][c], 256.f, (float)o[ht][i][c + 1]) * f, upper = rintf(both * (1.f / 256.f));
          o[ht][i][c] = (int)upper; o[ht][i][c + 1] = __float2int_rn(fmaf(upper, -256.f, both));
        }
    }
  }
#pragma unroll
  for (int ht = 0; ht < HT; ht++) { l[ht] += sum[ht]; lv[ht] += sum_v[ht]; }
}
