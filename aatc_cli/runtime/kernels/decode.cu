// Decode attention over a packed cache: tiles of 64 tokens per kv head, key codes reconstructed on the integer tensor
// cores, values absorbed. docs/kernels.md draws the layout. Compiled at first use; needs no headers.
//
// D head_dim, G query heads per kv head (at most 8), JF fast eighths of rotary pairs, NW warps per program, MT row tiles of 16 tokens held at once.
// A lane is (g, t) = (lane / 4, lane % 4); row r = 2 m + h of lane group g is token 8 g + r of its tile.

#define NB (D / 16)   // blocks of 16 channels
#define KS (D / 32)   // steps of 32 channels on the integer tensor cores
#define J (D / 16)    // pairs of 8-column tiles: dims 8 j .. and D / 2 + 8 j ..
#define JS (J - JF)   // of them slow ones: absorbed into the query instead of reconstructed
#define ANGLE_BYTES (J * 64 > HT * JF * 128 ? J * 64 : HT * JF * 128)
#define RECORD_AT (ANGLE_BYTES + (JS > 0 ? J * 64 : 0))
#define HT ((G + 3) / 4)  // tiles of 4 query heads, each in an even column

#include "device.cuh"
#include "shape.cuh"
#include "values.cuh"
#include "exact.cuh"
#include "absorb.cuh"
#include "merge.cuh"

// a copy the compiler cannot see through: values met at a branch would be moved into place at every use
__device__ __forceinline__ u32 fixed(u32 x, u32 zero) { u32 d; asm volatile("or.b32 %0,%1,%2;" : "=r"(d) : "r"(x), "r"(zero)); return d; }
// rows R0 .. R0 + N - 1 of the 8 rows of 4 channels that a lane holds of one key block, as bytes, from planes of 2 bits at `pairs` and of 1 at `singles`
template <int N, int R0>
__device__ __forceinline__ void key_rows(u32 (&out)[N], const u8*& pairs, const u8*& singles, int width, int lane) {
  if (width >= 2) {
    const uint2 v = make_uint2(((const u32*)pairs)[lane], ((const u32*)pairs)[lane + 32]);
    pairs += 256;
#pragma unroll
    for (int i = 0; i < N; i++) { const int r = R0 + i; out[i] = ((r < 4 ? v.x : v.y) >> (2 * (r & 3))) & 0x03030303u; }
#pragma unroll 1
    for (width -= 2; width >= 2; width -= 2) {
      const uint2 x = make_uint2(((const u32*)pairs)[lane], ((const u32*)pairs)[lane + 32]);
      pairs += 256;
#pragma unroll
      for (int i = 0; i < N; i++) { const int r = R0 + i; out[i] = out[i] * 4 + (((r < 4 ? x.x : x.y) >> (2 * (r & 3))) & 0x03030303u); }
    }
    if (width) {
      const u32 x = ((const u32*)singles)[lane];
      singles += 128;
#pragma unroll
      for (int i = 0; i < N; i++) out[i] = out[i] * 2 + ((x >> (R0 + i)) & 0x01010101u);
    }
  } else {
    const u32 v = width ? ((const u32*)singles)[lane] : 0u;
    singles += 128 * width;
#pragma unroll
    for (int i = 0; i < N; i++) out[i] = (v >> (R0 + i)) & 0x01010101u;
  }
}

// queries of even columns turned back to the start of the tile, [J][16] a pair of registers, over the angles they use
__device__ __forceinline__ void turn_queries(float4* angles, const float* query, int lane) {
  const int g = lane / 4, t = lane % 4;
  u32 q[HT][JF][2];
  turn_fast(q, angles, query + g / 2 * D, 4 * D, t);
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
__device__ __forceinline__ void key_scores(float (&sc)[HT][4][2], const u8* rec, int pairs, unsigned long long widths, const Absorbed& x,
                                           float delta, const uint4* bs, const uint2* rot, const int4* init, const uint2* turned,
                                           u32 zero, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int part = 0; part < 4 / MT; part++) {
    u32 a[STEPS][MT][4];
    const u8 *at = rec, *singles = rec + 256 * pairs;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) {
      const int width = (int)(widths >> (4 * i)) & 15;
      u32 rows[2 * MT];
      if (part == 0) key_rows<2 * MT, 0>(rows, at, singles, width, lane);
      else key_rows<2 * MT, 8 - 2 * MT>(rows, at, singles, width, lane);
#pragma unroll
      for (int m = 0; m < MT; m++) { a[i / 2][m][(i & 1) * 2] = fixed(rows[2 * m], zero); a[i / 2][m][(i & 1) * 2 + 1] = fixed(rows[2 * m + 1], zero); }
    }
    float s[HT][MT][4];
    slow_scores<STEPS>(s, a, x, delta, part, lane);
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
                                     unsigned long long wk, int pairs, unsigned long long counts, const uint4* bs, const uint2* rot, const int4* init,
                                     const uint4* rows, const u32* offsets, const float* query, const float* theta,
                                     const float4* tile_angles, int first_hidden, u8* stage, int (&o)[HT][NB][4], float (&mref)[HT],
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
      if (JS > 0 && absorbs) copy16(address(to_stage + ANGLE_BYTES + 16 * i), tile_angles + (long long)(n + span / 2) * J * 4 + i);
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
    const float delta = (float)(place - span / 2) + 0.125f * g;
    key_scores<STEPS>(sc, rec, pairs, wk, x, delta, bs, rot, init, (const uint2*)held, (u32)s.halves >> 1, lane);

    float weight[HT][4][2];
    weigh(s, sc, weight, rec + bytes - 256, tile, first_hidden, true, o, mref, l, lv, lane);
    sum_values(o, rec + value_at, counts, lane, weight);
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
             const int* tiles, const int* hidden, const u32* decode, const float* value_offset, int* arrivals, float* part, float* stat, void* out) {
  SHAPE;
  extern __shared__ __align__(16) u8 smem[];
  if (blockIdx.z < s.exact) {
    exact_part(s, blockIdx.z, q, keys, values, slot_angles, tokens, tiles, hidden, part, stat, smem);
    finish(s, part, stat, decode, value_offset, arrivals, out, smem);
    return;
  }
  const int h = blockIdx.y, b = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    query[i] = head < G ? element(q, ((long long)(b * s.heads + h) * G + head) * D + d) * s.scaling *
                              pair_scale[h * (D / 2) + d % (D / 2)] : 0.f;
  }
  const unsigned long long counts = value_counts(widths + h * 2 * NB + NB);
  unsigned long long wk = 0;
  int value_at = 0, steps = 0, pairs = 0;
#pragma unroll
  for (int i = 0; i < NB; i++) {
    const int k = widths[h * 2 * NB + i];
    wk |= (unsigned long long)k << (4 * i);
    value_at += 128 * k; steps += k > 0; pairs += k / 2;
  }
  __syncthreads();

  const int split = blockIdx.z - s.exact, count = tiles[b], first_hidden = hidden[b];
  const int from = (int)((long long)count * split / s.splits);
  const int to = (int)((long long)count * (split + 1) / s.splits);
  const int bytes = offsets[h + 1] - offsets[h];
  const u8* base = data + (long long)b * s.max_tiles * s.tile_bytes + offsets[h];

  int sums[HT][NB][4];
  float mref[HT], l[HT], lv[HT];
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    mref[ht] = FLOOR; l[ht] = 0.f; lv[ht] = 0.f;
#pragma unroll
    for (int i = 0; i < NB; i++) { sums[ht][i][0] = 0; sums[ht][i][1] = 0; sums[ht][i][2] = 0; sums[ht][i][3] = 0; }
  }
#define WALK(n) walk<(n)>(s, from, to, warp, lane, base, bytes, value_at, wk, pairs, counts, bs, rot, init, wide, twice, query, turn, tile_angles, \
                        first_hidden, stage, sums, mref, l, lv)
  // specialised for half, three quarters and all of the channels
  const int need = (steps + 1) / 2;
  if (KS >= 2 && need <= KS / 2) WALK(KS / 2 > 0 ? KS / 2 : 1);
  else if (KS >= 4 && need <= KS / 2 + KS / 4) WALK(KS / 2 + KS / 4 > 0 ? KS / 2 + KS / 4 : 1);
  else WALK(KS);

  merge_warps(s, sums, mref, l, lv, smem, part, stat, split);
  finish(s, part, stat, decode, value_offset, arrivals, out, smem);
}
