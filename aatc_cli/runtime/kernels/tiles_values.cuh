// Values of sixteen tokens of a class: digits times softmax weights, summed digit by digit.
//
// A field of digits in the low byte of a half is, read as float16, itself times 2^-24: products take it as it lies under a mask. Rows of a product
// are digits, whose sums are put together with what each counts at the end (tiles_merge.cuh).

// of head 4 qt + t: the reference of the weights, their sum, and that with value scales; sums of digits by steps
#define WEIGHTS (PAIRED ? 2 : OT)   // operands of weights
struct Sums { float o[VS > 0 ? VS : 1][SETS][4], reference[QT], weight[QT], mass[QT]; };

__device__ __forceinline__ void clear(Sums& s) {
#pragma unroll
  for (int qt = 0; qt < QT; qt++) { s.reference[qt] = FLOOR; s.weight[qt] = 0.f; s.mass[qt] = 0.f; }
#pragma unroll
  for (int i = 0; i < VS; i++)
#pragma unroll
    for (int n = 0; n < SETS; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s.o[i][n][e] = 0.f;
}

__device__ __forceinline__ void no_weights(u32 (&b)[WEIGHTS][2]) {
#pragma unroll
  for (int n = 0; n < WEIGHTS; n++) { b[n][0] = 0u; b[n][1] = 0u; }
}
// scores become softmax weights times value scales, as operands; the reference of the weights moves only where one would be large
__device__ __forceinline__ void weigh(u32 (&b)[WEIGHTS][2], const float (&sc)[QT][2], Sums& s, const Walk& w, const u8* rec, int lane) {
  bool large = false;
#pragma unroll
  for (int qt = 0; qt < QT; qt++) large |= fmaxf(sc[qt][0], sc[qt][1]) > s.reference[qt] + MOVE;
  if (__any_sync(~0u, large)) {
    float f[2 * OT];
#pragma unroll
    for (int qt = 0; qt < 2 * OT; qt++) {
      f[qt] = 1.f;
      if (qt >= QT) continue;
      float top = fmaxf(s.reference[qt], fmaxf(sc[qt][0], sc[qt][1]));
#pragma unroll
      for (int n = 4; n < 32; n <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, n));
      f[qt] = ex2(s.reference[qt] - top);
      s.reference[qt] = top; s.weight[qt] *= f[qt]; s.mass[qt] *= f[qt];
    }
#pragma unroll
    for (int i = 0; i < VS; i++)
#pragma unroll
      for (int n = 0; n < SETS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s.o[i][n][e] *= f[PAIRED ? 0 : n / 2 * 2 + e % 2];
  }
  const float scale0 = w.scales[rec[32 + lane / 4]], scale1 = w.scales[rec[40 + lane / 4]];
  float p0[2 * OT], p1[2 * OT];
#pragma unroll
  for (int qt = 0; qt < 2 * OT; qt++) {
    p0[qt] = 0.f; p1[qt] = 0.f;
    if (qt >= QT) continue;
    const float e0 = ex2(sc[qt][0] - s.reference[qt]), e1 = ex2(sc[qt][1] - s.reference[qt]);
    p0[qt] = e0 * scale0; p1[qt] = e1 * scale1;
    s.weight[qt] += e0 + e1; s.mass[qt] += p0[qt] + p1[qt];
  }
#if PAIRED
  // of the first block of a step in even columns and of the second in odd ones
  const u32 x0 = transpose8(pack2(p0[0], p0[0])), x1 = transpose8(pack2(p1[0], p1[0]));
  const bool odd = lane / 4 % 2;
  b[0][0] = odd ? 0u : x0; b[0][1] = odd ? 0u : x1; b[1][0] = odd ? x0 : 0u; b[1][1] = odd ? x1 : 0u;
#else
#pragma unroll
  for (int ot = 0; ot < OT; ot++) {
    b[ot][0] = transpose8(pack2(p0[2 * ot], p0[2 * ot + 1])); b[ot][1] = transpose8(pack2(p1[2 * ot], p1[2 * ot + 1]));
  }
#endif
}

// sixteen digits, the `block` of a step: rows under `mask` and `above` of w are tokens 2 t and 2 t + 1, of v those 8 further on
__device__ __forceinline__ void take_digits(float (&o)[SETS][4], int block, u32 w, u32 v, u32 mask, u32 above, const u32 (&b)[WEIGHTS][2]) {
  const u32 a0 = w & mask, a1 = w & above, a2 = v & mask, a3 = v & above;
#pragma unroll
  for (int ot = 0; ot < OT; ot++) {
    const int of = PAIRED ? block : ot;
    hmma(o[PAIRED ? 0 : 2 * ot + block], a0, a1, a2, a3, b[of][0], b[of][1]);
  }
}
// steps of digits of one size, into sums from `first` on; two at a time, so that no product waits for the one before. at: the lane's first word
template <int bits, int first, int n>
__device__ __forceinline__ void sum_steps(Sums& s, const u32 (&b)[WEIGHTS][2], const u8* at) {
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const bool two = i + 1 < n;
    float (&o)[SETS][4] = s.o[first + i], (&p)[SETS][4] = s.o[first + (two ? i + 1 : i)];
    if (bits == 4) {
      const u32 w = *(const u32*)(at + 256 * i), x = *(const u32*)(at + 256 * i + 128);
      const u32 y = two ? *(const u32*)(at + 256 * i + 256) : 0u, z = two ? *(const u32*)(at + 256 * i + 384) : 0u;
      take_digits(o, 0, w, w >> 8, 0x000F000Fu, 0x00F000F0u, b);
      if (two) take_digits(p, 0, y, y >> 8, 0x000F000Fu, 0x00F000F0u, b);
      take_digits(o, 1, x, x >> 8, 0x000F000Fu, 0x00F000F0u, b);
      if (two) take_digits(p, 1, z, z >> 8, 0x000F000Fu, 0x00F000F0u, b);
    } else if (bits == 2) {
      const u32 x = *(const u32*)(at + 128 * i), y = two ? *(const u32*)(at + 128 * i + 128) : 0u;
      take_digits(o, 0, x, x >> 8, 0x00030003u, 0x000C000Cu, b);
      if (two) take_digits(p, 0, y, y >> 8, 0x00030003u, 0x000C000Cu, b);
      take_digits(o, 1, x, x >> 8, 0x00300030u, 0x00C000C0u, b);
      if (two) take_digits(p, 1, y, y >> 8, 0x00300030u, 0x00C000C0u, b);
    } else {
      const u32 x = *(const u32*)(at + 64 * i);
      take_digits(o, 0, x, x >> 8, 0x00010001u, 0x00020002u, b);
      take_digits(p, 0, x, x >> 8, 0x00100010u, 0x00200020u, b);
      take_digits(o, 1, x, x >> 8, 0x00040004u, 0x00080008u, b);
      take_digits(p, 1, x, x >> 8, 0x00400040u, 0x00800080u, b);
    }
  }
}
