// Decode attention over a packed cache: tiles of 64 tokens per kv head, key codes reconstructed on the integer tensor
// cores, values absorbed. docs/kernels.md draws the layout. Compiled at first use; needs no headers.
//
// D head_dim, G query heads per kv head (at most 8), JF fast eighths of rotary pairs, NW warps per program, MT row tiles of 16 tokens held at once.
// A lane is (g, t) = (lane / 4, lane % 4); row r = 2 m + h of lane group g is token 8 g + r of its tile.

typedef unsigned int u32;
typedef unsigned char u8;

#define NB (D / 16)   // blocks of 16 channels
#define KS (D / 32)   // steps of 32 channels on the integer tensor cores
#define J (D / 16)    // pairs of 8-column tiles: dims 8 j .. and D / 2 + 8 j ..
#define JS (J - JF)   // of them slow ones: absorbed into the query instead of reconstructed
#define ANGLE_BYTES (J * 64 > HT * JF * 128 ? J * 64 : HT * JF * 128)
#define RECORD_AT (ANGLE_BYTES + (JS > 0 ? J * 64 : 0))
#define HT ((G + 3) / 4)  // tiles of 4 query heads, each in an even column
#define MAGIC 0x4B400000
#define MAGIC_F 12582912.0f
#define FLOOR -1.0e4f
#define HIDDEN -3.0e38f

__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 neg2(u32 a) { u32 d; asm("neg.f16x2 %0,%1;" : "=r"(d) : "r"(a)); return d; }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
__device__ __forceinline__ u32 add2(u32 a, u32 b) { u32 d; asm("add.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 max2(u32 a, u32 b) { u32 d; asm("max.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 pack2(float lo, float hi) { u32 d; asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
__device__ __forceinline__ float half_lo(u32 v) { float f; asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,l;}" : "=f"(f) : "r"(v)); return f; }
__device__ __forceinline__ float half_hi(u32 v) { float f; asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,h;}" : "=f"(f) : "r"(v)); return f; }
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 transpose8(u32 a) { u32 d; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(a)); return d; }

__device__ __forceinline__ void imma(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// a copy the compiler cannot see through: values met at a branch would be moved into place at every use
__device__ __forceinline__ u32 fixed(u32 x, u32 zero) { u32 d; asm volatile("or.b32 %0,%1,%2;" : "=r"(d) : "r"(x), "r"(zero)); return d; }
// the same from a start that is kept: d = c + a b
__device__ __forceinline__ void imma_from(int (&d)[4], const int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void hmma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void copy16(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from)); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// element e of a tensor in the model's dtype: 0 float16, 1 bfloat16, 2 float32
__device__ __forceinline__ float element(const void* p, long long e) {
#if QTYPE == 2
  return ((const float*)p)[e];
#elif QTYPE == 1
  return __uint_as_float(((u32)((const unsigned short*)p)[e]) << 16);
#else
  return half_lo((u32)((const unsigned short*)p)[e]);
#endif
}
__device__ __forceinline__ void store(void* p, long long e, float v) {
#if QTYPE == 2
  ((float*)p)[e] = v;
#elif QTYPE == 1
  unsigned short b; asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(b) : "f"(v)); ((unsigned short*)p)[e] = b;
#else
  ((unsigned short*)p)[e] = (unsigned short)(pack2(v, 0.f) & 0xFFFF);
#endif
}

// rows R0 .. R0 + N - 1 of the 8 rows of 4 channels that a lane holds of one key block, as bytes, from planes of 2 and 1 bits
template <int N, int R0> __device__ __forceinline__ void key_rows(u32 (&out)[N], const u8*& at, int width, int lane) {
  if (width >= 2) {
    const uint2 v = ((const uint2*)at)[lane];
    at += 256;
#pragma unroll
    for (int i = 0; i < N; i++) { const int r = R0 + i; out[i] = ((r < 4 ? v.x : v.y) >> (2 * (r & 3))) & 0x03030303u; }
#pragma unroll 1
    for (width -= 2; width >= 2; width -= 2) {
      const uint2 x = ((const uint2*)at)[lane];
      at += 256;
#pragma unroll
      for (int i = 0; i < N; i++) { const int r = R0 + i; out[i] = out[i] * 4 + (((r < 4 ? x.x : x.y) >> (2 * (r & 3))) & 0x03030303u); }
    }
    if (width) {
      const u32 x = ((const u32*)at)[lane];
      at += 128;
#pragma unroll
      for (int i = 0; i < N; i++) out[i] = out[i] * 2 + ((x >> (R0 + i)) & 0x01010101u);
    }
  } else {
    const u32 v = width ? ((const u32*)at)[lane] : 0u;
    at += 128 * width;
#pragma unroll
    for (int i = 0; i < N; i++) out[i] = (v >> (R0 + i)) & 0x01010101u;
  }
}

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

struct Shape {
  int heads, splits, exact, span, slots, sinks, ring, tile_bytes, max_tiles, stage_bytes, halves;
  float scaling;  // softmax scale * log2(e)
};
#define SHAPE_ARGUMENTS int heads, int splits, int exact, int span, int slots, int sinks, int ring, int tile_bytes, int max_tiles, \
                        int stage_bytes, int halves, float scaling
#define SHAPE const Shape s = {heads, splits, exact, span, slots, sinks, ring, tile_bytes, max_tiles, stage_bytes, halves, scaling}

// eight neighbouring elements of a row in the model's dtype
__device__ __forceinline__ void eight(float (&v)[8], const void* p, long long e) {
#if QTYPE == 2
  const float4 x = ((const float4*)p)[e / 4], y = ((const float4*)p)[e / 4 + 1];
  v[0] = x.x; v[1] = x.y; v[2] = x.z; v[3] = x.w; v[4] = y.x; v[5] = y.y; v[6] = y.z; v[7] = y.w;
#else
  const uint4 x = ((const uint4*)p)[e / 8]; const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if QTYPE == 1
    v[2 * i] = __uint_as_float(w[i] << 16); v[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
#else
    v[2 * i] = half_lo(w[i]); v[2 * i + 1] = half_hi(w[i]);
#endif
  }
#endif
}

// a share of the exact tokens (sinks and window) of one sequence and head: its partial lies in model space
__device__ void exact_part(const Shape& s, int share, const void* q, const void* keys, const void* values, const float* angles,
                           const int* tokens, const int* tiles, const int* hidden, float* part, float* stat, u8* smem) {
  const int h = blockIdx.y, b = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = NW * 32;
  const int total = tokens[b], packed = 64 * tiles[b], first = hidden[b];
  const int sinks = min(total, s.sinks), recent = max(total - s.sinks - packed, 0), all = sinks + recent;
  const int begin = all * share / s.exact, count = all * (share + 1) / s.exact - begin;
  float* query = (float*)smem;              // [G][D]
  float* sums = query + G * D;              // [token groups][G][D]
  int* slot_of = (int*)(sums + (2 * NW * 32 / (D / 2) + 1) * G * D);  // [count]
  float* score = (float*)(slot_of + s.slots);                         // [count][G]
  for (int i = threadIdx.x; i < G * D; i += threads)
    query[i] = element(q, ((long long)(b * s.heads + h) * G) * D + i) * s.scaling;
  for (int i = threadIdx.x; i < count; i += threads) {
    const int n = begin + i;
    slot_of[i] = n < sinks ? n : s.sinks + (packed + n - sinks) % s.ring;
  }
  __syncthreads();
  // eight lanes share a token: four tokens a warp at once
  for (int i = warp * 4 + lane / 8; i < (count + 3) / 4 * 4; i += NW * 4) {
    float dot[G];
#pragma unroll
    for (int g = 0; g < G; g++) dot[g] = 0.f;
    if (i < count) {
      const int slot = slot_of[i];
      const long long row = ((long long)(b * s.slots + slot) * s.heads + h) * D;
#pragma unroll
      for (int c = lane % 8; c < D / 16; c += 8) {
        float x[8], y[8];
        eight(x, keys, row + 8 * c); eight(y, keys, row + D / 2 + 8 * c);
        const float4* turn = (const float4*)(angles + (slot * (D / 2) + 8 * c) * 2);
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          const float4 a = turn[e / 2];
          const float l0 = x[e] * a.x - y[e] * a.y, h0 = y[e] * a.x + x[e] * a.y;
          const float l1 = x[e + 1] * a.z - y[e + 1] * a.w, h1 = y[e + 1] * a.z + x[e + 1] * a.w;
#pragma unroll
          for (int g = 0; g < G; g++) {
            const float2 ql = *(const float2*)(query + g * D + 8 * c + e), qh = *(const float2*)(query + g * D + D / 2 + 8 * c + e);
            dot[g] += l0 * ql.x + l1 * ql.y + h0 * qh.x + h1 * qh.y;
          }
        }
      }
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
#pragma unroll
      for (int o = 4; o; o >>= 1) dot[g] += __shfl_xor_sync(~0u, dot[g], o);
      const int n = begin + i, token = n < sinks ? n : s.sinks + packed + n - sinks;
      if (i < count && lane % 8 == 0) score[i * G + g] = token < first ? HIDDEN : dot[g];
    }
  }
  __syncthreads();
  float top[G], sum[G];
#pragma unroll
  for (int g = 0; g < G; g++) {
    float m = FLOOR;
    for (int n = lane; n < count; n += 32) m = fmaxf(m, score[n * G + g]);
#pragma unroll
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    float l = 0.f;
    for (int n = lane; n < count; n += 32) l += ex2(score[n * G + g] - m);
#pragma unroll
    for (int o = 16; o; o >>= 1) l += __shfl_xor_sync(~0u, l, o);
    top[g] = m; sum[g] = l;
  }
  // a thread has two dimensions and every group-th token
  const int groups = threads / (D / 2), pair = threadIdx.x % (D / 2), mine = threadIdx.x / (D / 2);
  if (mine < groups) {
    float v0[G], v1[G];
#pragma unroll
    for (int g = 0; g < G; g++) { v0[g] = 0.f; v1[g] = 0.f; }
#pragma unroll 8
    for (int n = mine; n < count; n += groups) {
      const long long e = ((long long)(b * s.slots + slot_of[n]) * s.heads + h) * D + 2 * pair;
      const float x = element(values, e), y = element(values, e + 1);
#pragma unroll
      for (int g = 0; g < G; g++) { const float p = ex2(score[n * G + g] - top[g]); v0[g] += p * x; v1[g] += p * y; }
    }
#pragma unroll
    for (int g = 0; g < G; g++) { sums[(mine * G + g) * D + 2 * pair] = v0[g]; sums[(mine * G + g) * D + 2 * pair + 1] = v1[g]; }
  }
  __syncthreads();
  const long long out = ((long long)(b * s.heads + h) * (s.splits + s.exact) + s.splits + share) * G;
  for (int i = threadIdx.x; i < G * D; i += threads) {
    float v = 0.f;
    for (int n = 0; n < groups; n++) v += sums[n * G * D + i];
    part[out * D + i] = v;
  }
  if (threadIdx.x == 0) {
#pragma unroll
    for (int g = 0; g < G; g++) { stat[(out + g) * 3] = top[g]; stat[(out + g) * 3 + 1] = sum[g]; stat[(out + g) * 3 + 2] = 0.f; }
  }
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
        const int c0 = MAGIC - (sum[p][0] >> halves), c1 = MAGIC - (sum[p][1] >> halves);
        x.start[(ht * 2 + p) * 4 + t] = make_int4(c0, c1, c0, c1);
      }
    }
    x.scale[ht][0] = __shfl_sync(~0u, unit, 8 * t); x.scale[ht][1] = __shfl_sync(~0u, unit, 8 * t + 4);
  }
}

// queries of even columns turned back to the start of the tile, [J][16] a pair of registers, over the angles they use
__device__ __forceinline__ void turn_queries(float4* angles, const float* query, int lane) {
  const int g = lane / 4, t = lane % 4;
  u32 q[HT][JF][2];
#pragma unroll
  for (int j = 0; j < JF; j++) {
    const float4 cs = angles[j * 4 + t];
#pragma unroll
    for (int ht = 0; ht < HT; ht++) {
      const float* from = query + (ht * 4 + g / 2) * D + 8 * j + 2 * t;
      const float2 ql = *(const float2*)from, qh = *(const float2*)(from + D / 2);
      q[ht][j][0] = pack2(ql.x * cs.x + qh.x * cs.z, ql.y * cs.y + qh.y * cs.w);
      q[ht][j][1] = pack2(qh.x * cs.x - ql.x * cs.z, qh.y * cs.y - ql.y * cs.w);
    }
  }
  __syncwarp();
  if (!(g & 1)) {
#pragma unroll
    for (int ht = 0; ht < HT; ht++)
#pragma unroll
      for (int j = 0; j < JF; j++) ((uint2*)angles)[((ht * JF + j) * 4 + g / 2) * 4 + t] = make_uint2(q[ht][j][0], q[ht][j][1]);
  }
  __syncwarp();
}

// scores of one tile before token scales: sc[ht][m][0] is row g, [1] row g + 8, of head 4 ht + t
template <int STEPS>
__device__ __forceinline__ void key_scores(float (&sc)[HT][4][2], const u8* rec, unsigned long long widths, const Absorbed& x,
                                           float delta, const uint4* bs, const uint2* rot, const int4* init, const uint2* turned,
                                           u32 zero, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int part = 0; part < 4 / MT; part++) {
    u32 a[STEPS][MT][4];
    const u8* at = rec;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) {
      const int width = (int)(widths >> (4 * i)) & 15;
      u32 rows[2 * MT];
      if (part == 0) key_rows<2 * MT, 0>(rows, at, width, lane);
      else key_rows<2 * MT, 8 - 2 * MT>(rows, at, width, lane);
#pragma unroll
      for (int m = 0; m < MT; m++) { a[i / 2][m][(i & 1) * 2] = fixed(rows[2 * m], zero); a[i / 2][m][(i & 1) * 2 + 1] = fixed(rows[2 * m + 1], zero); }
    }
    float s[HT][MT][4];
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
#pragma unroll JU
    for (int j = 0; j < JF; j++) {
      int lo[MT][4], hi[MT][4];
      const int4 z = init[(j * 4 + t) * 2], y = init[(j * 4 + t) * 2 + 1];
      const int zl[4] = {z.x, z.y, z.z, z.w}, zh[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        const uint4 f = bs[(j * KS + k) * 32 + lane];
#pragma unroll
        for (int m = 0; m < MT; m++) {
          if (k == 0) { imma_from(lo[m], zl, a[0][m], f.x, f.y); imma_from(hi[m], zh, a[0][m], f.z, f.w); }
          else { imma(lo[m], a[k][m], f.x, f.y); imma(hi[m], a[k][m], f.z, f.w); }
        }
      }
      uint2 q[HT];
#pragma unroll
      for (int ht = 0; ht < HT; ht++) q[ht] = g & 1 ? make_uint2(0u, 0u) : turned[((ht * JF + j) * 4 + g / 2) * 4 + t];
#pragma unroll
      for (int m = 0; m < MT; m++) {
        u32 f[4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float scale = 0.015625f, shift = -MAGIC_F * 0.015625f;
          const u32 v = pack2(fmaf(__int_as_float(lo[m][2 * r]), scale, shift), fmaf(__int_as_float(lo[m][2 * r + 1]), scale, shift));
          const u32 w = pack2(fmaf(__int_as_float(hi[m][2 * r]), scale, shift), fmaf(__int_as_float(hi[m][2 * r + 1]), scale, shift));
          const uint2 c = rot[(((part * MT + m) * 2 + r) * JF + j) * 32 + lane];
          f[r] = fma2(neg2(w), c.y, mul2(v, c.x));
          f[2 + r] = fma2(w, c.x, mul2(v, c.y));
        }
#pragma unroll
        for (int ht = 0; ht < HT; ht++) hmma(s[ht][m], f[0], f[1], f[2], f[3], q[ht].x, q[ht].y);
      }
    }
#pragma unroll
    for (int ht = 0; ht < HT; ht++)
#pragma unroll
      for (int m = 0; m < MT; m++) { sc[ht][part * MT + m][0] = s[ht][m][0]; sc[ht][part * MT + m][1] = s[ht][m][2]; }
  }
}

// the tiles of one warp: running maximum, sums and summed latents of each head
template <int STEPS>
__device__ __forceinline__ void walk(const Shape& s, int from, int to, int warp, int lane, const u8* base, int bytes, int value_at,
                                     unsigned long long wk, unsigned long long wv, const uint4* bs, const uint2* rot, const int4* init,
                                     const uint4* rows, const u32* offsets, const float* query, const float* theta,
                                     const float4* tile_angles, int first_hidden, u8* stage, float (&o)[HT][NB][4], float (&mref)[HT],
                                     float (&l)[HT], float (&lv)[HT]) {
  const int g = lane / 4;
  Absorbed x;
  x.parts = (uint4*)(stage + 2 * s.stage_bytes); x.start = (int4*)(x.parts + HT * KS * 32);
  const int span = s.span, last = from + (int)((long long)(to - from) * (warp + 1) / NW);
  int tile = from + (int)((long long)(to - from) * warp / NW), buffer = 0;
  // a stage holds the angles of a tile's start, those its absorbed queries are of, and its record
  const auto fetch = [&](u8* to_stage, int n, bool absorbs) {
    for (int i = lane; i < J * 4; i += 32) {
      copy16(address(to_stage + 16 * i), tile_angles + (long long)n * J * 4 + i);
      if (JS > 0 && absorbs) copy16(address(to_stage + ANGLE_BYTES + 16 * i), tile_angles + (long long)(n + span - 1) * J * 4 + i);
    }
    for (int i = lane * 16; i < bytes; i += 512) copy16(address(to_stage + RECORD_AT + i), base + (long long)n * s.tile_bytes + i);
  };
  if (tile < last) fetch(stage, tile, true);
  commit();
  for (int place = 0; tile < last; buffer ^= 1, tile++) {
    if (tile + 1 < last) fetch(stage + (buffer ^ 1) * s.stage_bytes, tile + 1, place + 1 == span);
    commit();
    wait<1>();
    __syncwarp();
    u8* held = stage + buffer * s.stage_bytes;
    const u8* rec = held + RECORD_AT;
    if (JS > 0 && place == 0) absorb<STEPS>(x, rows, offsets, query, theta, (const float4*)(held + ANGLE_BYTES), s.halves, lane);
    turn_queries((float4*)held, query, lane);
    float sc[HT][4][2];
    const float delta = (float)(place - span + 1) + 0.125f * g;
    key_scores<STEPS>(sc, rec, wk, x, delta, bs, rot, init, (const uint2*)held, (u32)s.halves >> 1, lane);

    // scores in log2 units times the token scale
    const u8* scales = rec + bytes - 256;
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
    u32 p[HT][4][2];
#pragma unroll
    for (int ht = 0; ht < HT; ht++)
#pragma unroll
      for (int m = 0; m < 4; m++) {
        const float boost = m == 0 ? 16.f : m == 1 ? 4.f : m == 2 ? 1.f : 0.25f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float v = r ? half_hi(vw[m]) : half_lo(vw[m]), e = ex2(sc[ht][m][r] - mref[ht]);
          l[ht] += e; lv[ht] += e * v;
          p[ht][m][r] = transpose8(pack2(e * v * boost, 0.f));
        }
      }
    const u8* at = rec + value_at;
#pragma unroll
    for (int i = 0; i < NB; i++) {
      const int width = (int)(wv >> (4 * i)) & 15;
      value_block(o, i, at, width, lane, p);
    }
    __syncwarp();
    place = place + 1 == span ? 0 : place + 1;
  }
  wait<0>();
}

// grid (batch, kv heads, exact + splits), NW * 32 threads; the short programs of exact tokens come first
extern "C" __global__ void __launch_bounds__(NW * 32, CTAS)
decode_split(SHAPE_ARGUMENTS, const void* q, const u8* data, const int* widths, const int* offsets, const uint4* matrix, const int4* start,
             const uint4* rows, const u32* row_offsets, const float* pair_scale, const float* theta, const float4* tile_angles,
             const uint2* row_angles, const void* keys, const void* values, const float* slot_angles, const int* tokens,
             const int* tiles, const int* hidden, float* part, float* stat) {
  SHAPE;
  extern __shared__ __align__(16) u8 smem[];
  if (blockIdx.z < s.exact) { exact_part(s, blockIdx.z, q, keys, values, slot_angles, tokens, tiles, hidden, part, stat, smem); return; }
  const int h = blockIdx.y, b = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint4* bs = (uint4*)smem;                        // [JF][KS][32] integer key matrix of the fast pairs
  uint4* wide = bs + JF * KS * 32;                 // [NB][JS][32] float16 key rows of the slow pairs
  uint2* rot = (uint2*)(wide + NB * JS * 32);    // [4 m][2 h][JF][32] cos and sin of the tile's tokens
  int4* init = (int4*)(rot + 8 * JF * 32);         // [JF][4][2] accumulator starts
  u32* twice = (u32*)(init + JF * 8);              // [NB][4] offsets as codes
  float* turn = (float*)(twice + NB * 4);          // [D / 2] angle per 64 tokens
  float* query = turn + D / 2;                     // [4 HT][D] scaled queries, zero above G
  u8* stage = (u8*)(query + 4 * HT * D) + warp * (2 * s.stage_bytes + HT * (KS * 512 + 128));
  const int threads = NW * 32;
  for (int i = threadIdx.x; i < JF * KS * 32; i += threads) bs[i] = matrix[(long long)h * JF * KS * 32 + i];
  for (int i = threadIdx.x; i < NB * JS * 32; i += threads) wide[i] = rows[(long long)h * NB * JS * 32 + i];
  for (int i = threadIdx.x; i < 8 * JF * 32; i += threads) rot[i] = row_angles[i];
  for (int i = threadIdx.x; i < JF * 8; i += threads) init[i] = start[h * JF * 8 + i];
  for (int i = threadIdx.x; i < NB * 4; i += threads) twice[i] = row_offsets[h * NB * 4 + i];
  for (int i = threadIdx.x; i < D / 2; i += threads) turn[i] = theta[i] * 64.f;
  for (int i = threadIdx.x; i < 4 * HT * D; i += threads) {
    const int head = i / D, d = i % D;
    query[i] = head < G ? element(q, ((long long)(b * s.heads + h) * G + head) * D + d) * s.scaling * 64.f *
                              pair_scale[h * (D / 2) + d % (D / 2)] : 0.f;
  }
  unsigned long long wk = 0, wv = 0;
  int value_at = 0, steps = 0;
#pragma unroll
  for (int i = 0; i < NB; i++) {
    const int k = widths[h * 2 * NB + i], v = widths[h * 2 * NB + NB + i];
    wk |= (unsigned long long)k << (4 * i); wv |= (unsigned long long)v << (4 * i);
    value_at += 128 * k; steps += k > 0;
  }
  __syncthreads();

  const int split = blockIdx.z - s.exact, count = tiles[b], first_hidden = hidden[b];
  const int from = (int)((long long)count * split / s.splits);
  const int to = (int)((long long)count * (split + 1) / s.splits);
  const int bytes = offsets[h + 1] - offsets[h];
  const u8* base = data + (long long)b * s.max_tiles * s.tile_bytes + offsets[h];

  float o[HT][NB][4], mref[HT], l[HT], lv[HT];
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    mref[ht] = FLOOR; l[ht] = 0.f; lv[ht] = 0.f;
#pragma unroll
    for (int i = 0; i < NB; i++) { o[ht][i][0] = 0.f; o[ht][i][1] = 0.f; o[ht][i][2] = 0.f; o[ht][i][3] = 0.f; }
  }
#define WALK(n) walk<(n)>(s, from, to, warp, lane, base, bytes, value_at, wk, wv, bs, rot, init, wide, twice, query, turn, tile_angles, \
                        first_hidden, stage, o, mref, l, lv)
  // specialised for half, three quarters and all of the channels
  const int need = (steps + 1) / 2;
  if (KS >= 2 && need <= KS / 2) WALK(KS / 2 > 0 ? KS / 2 : 1);
  else if (KS >= 4 && need <= KS / 2 + KS / 4) WALK(KS / 2 + KS / 4 > 0 ? KS / 2 + KS / 4 : 1);
  else WALK(KS);

  // merge the warps of this program
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int n = 4; n < 32; n <<= 1) { l[ht] += __shfl_xor_sync(~0u, l[ht], n); lv[ht] += __shfl_xor_sync(~0u, lv[ht], n); }
  __syncthreads();
  float* sums = (float*)smem;                 // [NW][G][D]
  float* stats = sums + NW * G * D;           // [NW][4 HT][3]
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    const int head = ht * 4 + t;
    if (g == 0) {
      float* to_stat = stats + (warp * 4 * HT + head) * 3;
      to_stat[0] = mref[ht]; to_stat[1] = l[ht]; to_stat[2] = lv[ht];
    }
    if (head < G) {
#pragma unroll
      for (int i = 0; i < NB; i++) {
        sums[(warp * G + head) * D + 16 * i + g] = o[ht][i][0];
        sums[(warp * G + head) * D + 16 * i + g + 8] = o[ht][i][2];
      }
    }
  }
  __syncthreads();
  const long long out = ((long long)(b * s.heads + h) * (s.splits + s.exact) + split) * G;
  for (int i = threadIdx.x; i < G * D; i += threads) {
    const int head = i / D;
    float top = FLOOR, total = 0.f, sum_l = 0.f, sum_v = 0.f;
#pragma unroll
    for (int w = 0; w < NW; w++) top = fmaxf(top, stats[(w * 4 * HT + head) * 3]);
#pragma unroll
    for (int w = 0; w < NW; w++) {
      const float* from_stat = stats + (w * 4 * HT + head) * 3;
      const float f = ex2(from_stat[0] - top);
      total += f * sums[w * G * D + i]; sum_l += f * from_stat[1]; sum_v += f * from_stat[2];
    }
    part[out * D + i] = total;
    if (i % D == 0) { stat[(out + head) * 3] = top; stat[(out + head) * 3 + 1] = sum_l; stat[(out + head) * 3 + 2] = sum_v; }
  }
}

// grid (kv heads, batch, G), 4 D threads: merges the splits, decodes the summed latents once, adds the exact parts
extern "C" __global__ void __launch_bounds__(4 * D)
decode_combine(SHAPE_ARGUMENTS, const float* part, const float* stat, const unsigned short* decode, const float* offset, void* out) {
  SHAPE;
  __shared__ float latent[4][D], near[4][D], total[4][2];
  const int h = blockIdx.x, b = blockIdx.y, g = blockIdx.z, d = threadIdx.x % D, quarter = threadIdx.x / D;
  const int parts = s.splits + s.exact;
  const long long row = (long long)(b * s.heads + h) * parts * G + g;
  // a thread decodes a quarter of the channels of one dimension: its matrix is fetched before anything else is known
  u32 matrix[D / 4];
#pragma unroll
  for (int c = 0; c < D / 4; c++) matrix[c] = decode[((long long)h * D + quarter * (D / 4) + c) * D + d];
  float top = FLOOR;
#pragma unroll 8
  for (int i = 0; i < parts; i++) top = fmaxf(top, stat[(row + i * G) * 3]);
  float sum = 0.f, sum_v = 0.f, far = 0.f, exact_v = 0.f;
#pragma unroll 4
  for (int i = quarter; i < parts; i += 4) {
    const long long at = row + i * G;
    const float f = ex2(stat[at * 3] - top), v = f * part[at * D + d];
    sum += f * stat[at * 3 + 1]; sum_v += f * stat[at * 3 + 2];
    if (i < s.splits) far += v; else exact_v += v;
  }
  latent[quarter][d] = far * 1048576.f; near[quarter][d] = exact_v;
  if (d == 0) { total[quarter][0] = sum; total[quarter][1] = sum_v; }
  __syncthreads();
  if (quarter == 0) latent[0][d] = latent[0][d] + latent[1][d] + latent[2][d] + latent[3][d];
  __syncthreads();
  float value = near[quarter][d];
#pragma unroll
  for (int c = 0; c < D / 4; c++) value += latent[0][quarter * (D / 4) + c] * half_lo(matrix[c]);
  near[quarter][d] = value;
  __syncthreads();
  if (quarter) return;
  sum = total[0][0] + total[1][0] + total[2][0] + total[3][0];
  sum_v = total[0][1] + total[1][1] + total[2][1] + total[3][1];
  value = near[0][d] + near[1][d] + near[2][d] + near[3][d] - sum_v * offset[h * D + d];
  store(out, ((long long)(b * s.heads + h) * G + g) * D + d, value / sum);
}
