// Queries: pairs that turn little in a tile go into the key matrix, the others are turned back to the tile's start.

#define MAGIC 0x4B400000

__device__ __forceinline__ void imma(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// the same from a start that is kept: d = c + a b
__device__ __forceinline__ void imma_from(int (&d)[4], const int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// queries absorbed into the key matrix: 8-bit integers in two parts; the fragments lie in shared memory, a warp's own
struct Absorbed {
  uint4* parts;         // [HT][KS][32]: high and low parts of two blocks
  int4* start;          // [HT][2][4]: accumulator starts of columns 2 t, 2 t + 1, twice
  float scale[HT][2];   // of value and slope, high part
};

// slow pairs turn little in 128 tokens: score = (q . k) + delta (q' . k), both absorbed, in columns 2 t and 2 t + 1
template <int STEPS>
__device__ __forceinline__ void absorb(Absorbed& x, const uint4* rows, const u32* offsets, const float* query, const float* theta,
                                       const float4* angles, int halves, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    const float* q = query + (ht * 4 + g / 2) * D;
    u32 b[JS + 1][2];
#pragma unroll
    for (int i = 0; i < JS; i++) {
      const int pair = 8 * (JF + i) + 2 * t;
      const float4 cs = angles[(JF + i) * 4 + t];
      const float2 ql = *(const float2*)(q + pair), qh = *(const float2*)(q + D / 2 + pair);
      float l0 = ql.x * cs.x + qh.x * cs.z, l1 = ql.y * cs.y + qh.y * cs.w;
      float h0 = qh.x * cs.x - ql.x * cs.z, h1 = qh.y * cs.y - ql.y * cs.w;
      if (g & 1) {
        const float2 th = *(const float2*)(theta + pair);
        const float a0 = th.x * h0, a1 = th.y * h1;
        h0 = -th.x * l0; h1 = -th.y * l1; l0 = a0; l1 = a1;
      }
      b[i][0] = pack2(l0, l1); b[i][1] = pack2(h0, h1);
    }
    u32 h[2 * STEPS][2], top = 0;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) {
      float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int k = 0; k < JS; k++) { const uint4 w = rows[(i * JS + k) * 32 + lane]; hmma(c, w.x, w.y, w.z, w.w, b[k][0], b[k][1]); }
      h[i][0] = transpose8(pack2(c[0], c[1])); h[i][1] = transpose8(pack2(c[2], c[3]));
      top = max2(top, max2(h[i][0] & 0x7FFF7FFFu, h[i][1] & 0x7FFF7FFFu));
    }
    float most = fmaxf(half_lo(top), half_hi(top));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1)); most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const u32 inverse = pack2(126.5f / fmaxf(most, 0.00390625f), 126.5f / fmaxf(most, 0.00390625f));
    const float unit = 1.f / half_lo(inverse);
    const u32 shift = 0x66006600u, back = 0xE600E600u, fine = 0x5BF05BF0u;  // 1536, -1536, 254
    int sum[2][4];
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
      for (int c = 0; c < 4; c++) sum[p][c] = 0;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) {
      const u32 u0 = fma2(h[i][0], inverse, shift), u1 = fma2(h[i][1], inverse, shift);
      const u32 r0 = fma2(h[i][0], inverse, neg2(add2(u0, back))), r1 = fma2(h[i][1], inverse, neg2(add2(u1, back)));
      h[i][0] = __byte_perm(u0, u1, 0x6420);
      h[i][1] = __byte_perm(fma2(r0, fine, shift), fma2(r1, fine, shift), 0x6420);
    }
    // the offsets as codes (twice them, where they are halves): every row of the product is the sum to take off
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      const u32 o0 = offsets[(2 * k) * 4 + t], o1 = offsets[(2 * k + 1) * 4 + t];
      const u32 a[4] = {o0, o0, o1, o1};
      imma(sum[0], a, h[2 * k][0], h[2 * k + 1][0]);
      imma(sum[1], a, h[2 * k][1], h[2 * k + 1][1]);
      x.parts[(ht * KS + k) * 32 + lane] = make_uint4(h[2 * k][0], h[2 * k + 1][0], h[2 * k][1], h[2 * k + 1][1]);
    }
    if (g == 0) {
#pragma unroll
      for (int p = 0; p < 2; p++) {
        // a half step of the first part is 127 of the second: left out, it would shift all scores of the tile
        const int h0 = p && halves ? 127 * (sum[0][0] & 1) : 0, h1 = p && halves ? 127 * (sum[0][1] & 1) : 0;
        const int c0 = MAGIC - (sum[p][0] >> halves) - h0, c1 = MAGIC - (sum[p][1] >> halves) - h1;
        x.start[(ht * 2 + p) * 4 + t] = make_int4(c0, c1, c0, c1);
      }
    }
    x.scale[ht][0] = __shfl_sync(~0u, unit, 8 * t); x.scale[ht][1] = __shfl_sync(~0u, unit, 8 * t + 4);
  }
}

// fast pairs of a query turned back by a tile's angles; `row` is the query of a lane's column, the next tile of heads `step` further
__device__ __forceinline__ void turn_fast(u32 (&q)[HT][JF][2], const float4* angles, const float* row, int step, int t) {
#pragma unroll
  for (int j = 0; j < JF; j++) {
    const float4 cs = angles[j * 4 + t];
#pragma unroll
    for (int ht = 0; ht < HT; ht++) {
      const float* from = row + ht * step + 8 * j + 2 * t;
      const float2 ql = *(const float2*)from, qh = *(const float2*)(from + D / 2);
      q[ht][j][0] = pack2(ql.x * cs.x + qh.x * cs.z, ql.y * cs.y + qh.y * cs.w);
      q[ht][j][1] = pack2(qh.x * cs.x - ql.x * cs.z, qh.y * cs.y - ql.y * cs.w);
    }
  }
}

// absorbed scores of row tiles part * MT ..: codes against value and slope; s[ht][m][0] is row g of head 4 ht + t
// and [2] row g + 8
template <int STEPS>
__device__ __forceinline__ void slow_scores(float (&s)[HT][MT][4], const u32 (&a)[STEPS][MT][4], const Absorbed& x, float delta, int part,
                                            int lane) {
  const int t = lane % 4;
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    if (JS == 0) {
#pragma unroll
      for (int m = 0; m < MT; m++) { s[ht][m][0] = 0.f; s[ht][m][1] = 0.f; s[ht][m][2] = 0.f; s[ht][m][3] = 0.f; }
      continue;
    }
    int hi[MT][4], lo[MT][4];
    const int4 z = x.start[(ht * 2) * 4 + t], y = x.start[(ht * 2 + 1) * 4 + t];
    const int zs[4] = {z.x, z.y, z.z, z.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      const uint4 b = x.parts[(ht * KS + k) * 32 + lane];
#pragma unroll
      for (int m = 0; m < MT; m++) {
        if (k == 0) { imma_from(hi[m], zs, a[0][m], b.x, b.y); imma_from(lo[m], ys, a[0][m], b.z, b.w); }
        else { imma(hi[m], a[k][m], b.x, b.y); imma(lo[m], a[k][m], b.z, b.w); }
      }
    }
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float far = delta + 0.015625f * (2 * (part * MT + m) + r);
        const float value = fmaf(__int_as_float(lo[m][2 * r]) - MAGIC_F, 1.f / 254.f, __int_as_float(hi[m][2 * r]) - MAGIC_F);
        const float slope = (__int_as_float(hi[m][2 * r + 1]) - MAGIC_F) * x.scale[ht][1];
        s[ht][m][2 * r] = fmaf(value, x.scale[ht][0], far * slope);
        s[ht][m][2 * r + 1] = 0.f;
      }
  }
}
