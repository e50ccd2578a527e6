// Values absorbed in integers: softmax weights of 16 bits in two bytes, codes as they lie in the low half of a byte.

#define WEIGHT_STEPS 32640.f  // steps of a weight of one; none is above LIMIT, so that two bytes hold it
#define LIMIT 2.f

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

template <int BY> __device__ __forceinline__ u32 moved(u32 word) { return BY > 0 ? word >> (BY > 0 ? BY : 0) : word << (BY < 0 ? -BY : 0); }
// a plane of 16 latents times the weights of 64 tokens: fields of BITS go to bit PLACE of their bytes, whose low half is a number
template <int BITS, int PLACE>
__device__ __forceinline__ void value_plane(int (&o)[HT][NB][4], int i, const u8*& at, int lane, const u32 (&b)[HT][4]) {
  u32 x, y;
  if (BITS == 2) { const uint2 v = ((const uint2*)at)[lane]; x = v.x; y = v.y; }
  else { x = ((const u32*)at)[lane]; y = x >> 1; }
  const u32 mask = (BITS == 2 ? 0x03030303u : 0x01010101u) << PLACE;
  const u32 f[4][2] = {{moved<-PLACE>(x) & mask, moved<-PLACE>(y) & mask}, {moved<2 - PLACE>(x) & mask, moved<2 - PLACE>(y) & mask},
                       {moved<4 - PLACE>(x) & mask, moved<4 - PLACE>(y) & mask}, {moved<6 - PLACE>(x) & mask, moved<6 - PLACE>(y) & mask}};
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int n = 0; n < 4; n += 2) umma(o[ht][i], f[n][0], f[n][1], f[n + 1][0], f[n + 1][1], b[ht][n], b[ht][n + 1]);
  at += 128 * BITS;
}
// all planes of a block, the first at weight one: sums come out divided by 2^(width - first plane)
__device__ __forceinline__ void value_block(int (&o)[HT][NB][4], int i, const u8*& at, int width, int lane, const u32 (&b)[HT][4],
                                            const float (&weight)[HT][4][2]) {
  if (width >= 2) {
    value_plane<2, 2>(o, i, at, lane, b);
    if (width == 3) value_plane<1, 1>(o, i, at, lane, b);
    if (width >= 4) value_plane<2, 0>(o, i, at, lane, b);
    if (width > 4) {
      u32 less[HT][4];
      operands(less, weight, WEIGHT_STEPS / 16.f);
      if (width == 5) value_plane<1, 3>(o, i, at, lane, less);
      else value_plane<2, 2>(o, i, at, lane, less);
      if (width == 7) value_plane<1, 1>(o, i, at, lane, less);
      if (width == 8) value_plane<2, 0>(o, i, at, lane, less);
    }
  } else if (width) value_plane<1, 2>(o, i, at, lane, b);
}
// sums of codes times weights over all blocks; widths have four bits each in wv
__device__ __forceinline__ void sum_values(int (&o)[HT][NB][4], const u8* at, unsigned long long wv, int lane, const float (&weight)[HT][4][2]) {
  u32 b[HT][4];
  operands(b, weight, WEIGHT_STEPS);
#pragma unroll
  for (int i = 0; i < NB; i++) {
    const int width = (int)(wv >> (4 * i)) & 15;
    value_block(o, i, at, width, lane, b, weight);
  }
}

// scores sc, times key scales, become softmax weights e times value scales; sums follow. The reference mref of the weights moves only where
// one would exceed LIMIT
__device__ __forceinline__ void weigh(const Shape& s, float (&sc)[HT][4][2], float (&e)[HT][4][2], const u8* scales, int tile, int first_hidden,
                                      bool valid, int (&o)[HT][NB][4], float (&mref)[HT], float (&l)[HT], float (&lv)[HT], int lane) {
  const int g = lane / 4;
  const uint4 ka = ((const uint4*)scales)[g], va = ((const uint4*)(scales + 128))[g];
  const u32 kw[4] = {ka.x, ka.y, ka.z, ka.w}, vw[4] = {va.x, va.y, va.z, va.w};
  const int first = !valid ? 64 : first_hidden - (s.sinks + 64 * tile);  // rows before are hidden
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int m = 0; m < 4; m++) { sc[ht][m][0] *= half_lo(kw[m]); sc[ht][m][1] *= half_hi(kw[m]); }
  if (first > 0) {
#pragma unroll
    for (int ht = 0; ht < HT; ht++)
#pragma unroll
      for (int m = 0; m < 4; m++) {
        if (8 * g + 2 * m < first) sc[ht][m][0] = HIDDEN;
        if (8 * g + 2 * m + 1 < first) sc[ht][m][1] = HIDDEN;
      }
  }
  float v[4][2];
#pragma unroll
  for (int m = 0; m < 4; m++) { v[m][0] = valid ? half_lo(vw[m]) : 0.f; v[m][1] = valid ? half_hi(vw[m]) : 0.f; }
  bool fits = true;
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    float top = 0.f;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) { e[ht][m][r] = ex2(sc[ht][m][r] - mref[ht]); top = fmaxf(top, e[ht][m][r] * fmaxf(v[m][r], 1.f)); }
    fits &= top <= LIMIT;
  }
  if (!__all_sync(~0u, fits)) {
#pragma unroll
    for (int ht = 0; ht < HT; ht++) {
      float top = mref[ht];
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) top = fmaxf(top, sc[ht][m][r] + __log2f(fmaxf(v[m][r], 1.f)));
#pragma unroll
      for (int n = 4; n < 32; n <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, n));
      const float f = ex2(mref[ht] - top);
      mref[ht] = top; l[ht] *= f; lv[ht] *= f;
#pragma unroll
      for (int i = 0; i < NB; i++)
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
          const float sum = fmaf((float)o[ht][i][c], 256.f, (float)o[ht][i][c + 1]) * f, upper = rintf(sum * (1.f / 256.f));
          o[ht][i][c] = (int)upper; o[ht][i][c + 1] = __float2int_rn(fmaf(upper, -256.f, sum));
        }
#pragma unroll
      for (int m = 0; m < 4; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) e[ht][m][r] = ex2(sc[ht][m][r] - top);
    }
  }
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        l[ht] += e[ht][m][r];
        e[ht][m][r] *= v[m][r];
        lv[ht] += e[ht][m][r];
      }
}
