// Values absorbed: sums of codes times softmax weights, by planes of two bits and one.

__device__ __forceinline__ void add_values(float (&o)[HT][NB][4], int i, int m, u32 a0, u32 a1, u32 a2, u32 a3, const u32 (&p)[HT][4][2]) {
#pragma unroll
  for (int ht = 0; ht < HT; ht++) hmma(o[ht][i], a0, a1, a2, a3, p[ht][m][0], p[ht][m][1]);
}
// one plane of 16 latents: 64 tokens against the weights p[m][h], whose step m carries 4^-m as the codes carry 4^m
__device__ __forceinline__ void value_pairs(float (&o)[HT][NB][4], int i, const u8* at, int lane, const u32 (&p)[HT][4][2]) {
  const uint2 v = ((const uint2*)at)[lane];
  const u32 x = v.x >> 8, y = v.y >> 8;
#pragma unroll
  for (int m = 0; m < 4; m++) { const u32 k = 0x00030003u << (2 * m); add_values(o, i, m, v.x & k, v.y & k, x & k, y & k, p); }
}
__device__ __forceinline__ void value_bits(float (&o)[HT][NB][4], int i, const u8* at, int lane, const u32 (&p)[HT][4][2]) {
  const u32 v = ((const u32*)at)[lane], a = v >> 1, b = v >> 8, c = v >> 9;
#pragma unroll
  for (int m = 0; m < 4; m++) { const u32 k = 0x00010001u << (2 * m); add_values(o, i, m, v & k, a & k, b & k, c & k, p); }
}
// all planes of a block, the first at weight one: sums come out divided by 2^(width - first plane)
__device__ __forceinline__ void value_block(float (&o)[HT][NB][4], int i, const u8*& at, int width, int lane, const u32 (&p)[HT][4][2]) {
  if (width >= 2) {
    value_pairs(o, i, at, lane, p);
    at += 256;
    if (width > 2) {
      u32 q[HT][4][2];
#pragma unroll
      for (int ht = 0; ht < HT; ht++)
#pragma unroll
        for (int m = 0; m < 4; m++) { q[ht][m][0] = p[ht][m][0]; q[ht][m][1] = p[ht][m][1]; }
#pragma unroll 1
      for (width -= 2; width > 0; width -= 2) {
        const u32 less = width == 1 ? 0x38003800u : 0x34003400u;  // a half, a quarter
#pragma unroll
        for (int ht = 0; ht < HT; ht++)
#pragma unroll
          for (int m = 0; m < 4; m++) { q[ht][m][0] = mul2(q[ht][m][0], less); q[ht][m][1] = mul2(q[ht][m][1], less); }
        if (width == 1) { value_bits(o, i, at, lane, q); at += 128; }
        else { value_pairs(o, i, at, lane, q); at += 256; }
      }
    }
  } else if (width) {
    value_bits(o, i, at, lane, p);
    at += 128;
  }
}

// scores sc become softmax weights p, times token scale and the power that undoes the codes' places, as operands; sums follow
__device__ __forceinline__ void weigh(const Shape& s, float (&sc)[HT][4][2], u32 (&p)[HT][4][2], const u8* scales, int tile, int first_hidden,
                                      bool valid, float (&o)[HT][NB][4], float (&mref)[HT], float (&l)[HT], float (&lv)[HT], int lane) {
  const int g = lane / 4;
  // scores in log2 units times the token scale
  const uint4 ka = ((const uint4*)scales)[g], va = ((const uint4*)(scales + 128))[g];
  const u32 kw[4] = {ka.x, ka.y, ka.z, ka.w}, vw[4] = {va.x, va.y, va.z, va.w};
  const int token = s.sinks + 64 * tile + 8 * g;
  float top[HT];
  bool grows = false;
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    top[ht] = HIDDEN;
#pragma unroll
    for (int m = 0; m < 4; m++) { sc[ht][m][0] *= half_lo(kw[m]); sc[ht][m][1] *= half_hi(kw[m]); }
    if (!valid) {
#pragma unroll
      for (int m = 0; m < 4; m++) { sc[ht][m][0] = HIDDEN; sc[ht][m][1] = HIDDEN; }
    }
    if (s.sinks + 64 * tile < first_hidden) {
#pragma unroll
      for (int m = 0; m < 4; m++) {
        if (token + 2 * m < first_hidden) sc[ht][m][0] = HIDDEN;
        if (token + 2 * m + 1 < first_hidden) sc[ht][m][1] = HIDDEN;
      }
    }
#pragma unroll
    for (int m = 0; m < 4; m++) top[ht] = fmaxf(top[ht], fmaxf(sc[ht][m][0], sc[ht][m][1]));
    grows |= top[ht] > mref[ht] + 8.f;
  }
  if (__any_sync(~0u, grows)) {
#pragma unroll
    for (int ht = 0; ht < HT; ht++) {
#pragma unroll
      for (int n = 4; n < 32; n <<= 1) top[ht] = fmaxf(top[ht], __shfl_xor_sync(~0u, top[ht], n));
      const float now = fmaxf(mref[ht], top[ht]), f = ex2(mref[ht] - now);
      mref[ht] = now; l[ht] *= f; lv[ht] *= f;
#pragma unroll
      for (int i = 0; i < NB; i++) { o[ht][i][0] *= f; o[ht][i][2] *= f; }
    }
  }
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const float boost = m == 0 ? 16.f : m == 1 ? 4.f : m == 2 ? 1.f : 0.25f;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float v = valid ? r ? half_hi(vw[m]) : half_lo(vw[m]) : 0.f, e = ex2(sc[ht][m][r] - mref[ht]);
        l[ht] += e; lv[ht] += e * v;
        p[ht][m][r] = transpose8(pack2(e * v * boost, 0.f));
      }
    }
}
