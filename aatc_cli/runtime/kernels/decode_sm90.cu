// Decode attention for Hopper: the codes of every plane of key bits are 8-bit floats as they lie, and four warps with a tile each multiply
// their next 16 tokens with one decode matrix in shared memory (wgmma). What is shared with decode.cu is in the headers.
//
// PS steps of 32 channels, two planes each; KINDS has bit n set where a head has n planes of two bits; JF fast eighths of rotary pairs; MT row tiles of 16 tokens held at once.

#define NB (D / 16)   // blocks of 16 channels
#define KS PS
#define J (D / 16)    // pairs of 8-column tiles: dims 8 j .. and D / 2 + 8 j ..
#define JS (J - JF)   // of them slow ones: absorbed into the query instead of reconstructed
#define HT ((G + 3) / 4)  // tiles of 4 query heads, each in an even column
#define ANGLE_BYTES (J * 64 > HT * JF * 256 ? J * 64 : HT * JF * 256)
#define RECORD_AT (ANGLE_BYTES + (JS > 0 ? J * 64 : 0))
#define CORES (JF * 512)  // bytes of the matrix a step
#define ROW (D + 8)       // floats from one query to the next, so that neighbours lie in other banks
#define QUERY_ROW (2 * ROW)
#define SECOND 3
#define VALUE_SCALE (0.25f / 32640.f)  // the first plane of a block counts four

#include "device.cuh"
#include "wgmma.cuh"
#include "values_sm90.cuh"
#include "exact.cuh"
#include "absorb.cuh"
#include "merge.cuh"

// queries of all columns turned back to the start of the tile, [JF][32] a pair of registers, over the angles they use; a lane's column is g
__device__ __forceinline__ void turn_queries(float4* angles, const float* query, int lane) {
  const int g = lane / 4, t = lane % 4;
  u32 q[HT][JF][2];
  turn_fast(q, angles, query + g * ROW, 8 * ROW, t);
  __syncwarp();
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int j = 0; j < JF; j++) ((uint2*)angles)[(ht * JF + j) * 32 + lane] = make_uint2(q[ht][j][0], q[ht][j][1]);
  __syncwarp();
}

// what a walk over tiles reads in shared memory
struct Tables {
  const uint4* wide;       // [2 KS][JS][32] float16 key rows of the slow pairs
  const uint2* rot;        // [4 m][JF][32] cos and sin of the tile's even tokens
  const int4* planes;      // [KS / 2, rounded up] byte of every plane in the record, those of two bits first
  const u32* start;        // [4][2 JF] accumulator starts
  const u32* twice;        // [2 KS][4] offsets as codes
  const float* turn;       // [D / 2] angle per 64 tokens
  const float* query;      // [4 HT][2][ROW] scaled queries, zero above G, each followed by itself turned back by a token
  unsigned long long matrix;
};

// scores of one tile before token scales: sc[ht][m][0] is row g, [1] row g + 8, of head 4 ht + t; TWOS planes have two bits
template <int TWOS>
__device__ __forceinline__ void key_scores(float (&sc)[HT][4][2], const u8* rec, const Tables& with, const Absorbed& x, float delta,
                                           const uint2* turned, int lane) {
  const int t = lane % 4;
#pragma unroll
  for (int part = 0; part < 4 / MT; part++) {
    u32 a[KS][MT][4];
#pragma unroll
    for (int i = 0; i < 2 * KS; i++) {
      const int4 four = with.planes[i / 4];
      const int at = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
      u32 word[(MT + 1) / 2];
#pragma unroll
      for (int r = 0; r < 2 * MT; r++) {
        const int row = part * 2 * MT + r;
        if (r % 4 == 0) word[r / 4] = i < TWOS ? *(const u32*)(rec + at + 4 * lane + 128 * (row / 4)) : *(const u32*)(rec + at + 4 * lane);
        a[i / 2][r / 2][(i & 1) * 2 + (r & 1)] = i < TWOS ? (word[r / 4] >> (2 * (row & 3))) & 0x03030303u : (word[r / 4] >> row) & 0x01010101u;
      }
    }
    u32 k[MT][4 * JF];
#pragma unroll
    for (int n = 0; n < 2 * JF; n += 2) {
      const uint2 begin = *(const uint2*)(with.start + t * 2 * JF + n);
#pragma unroll
      for (int m = 0; m < MT; m++) { k[m][2 * n] = k[m][2 * n + 1] = begin.x; k[m][2 * n + 2] = k[m][2 * n + 3] = begin.y; }
    }
    arrive();
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
      for (int i = 0; i < KS; i++) wgmma(k[m], a[i][m], with.matrix + i * (CORES / 16));
      close_group();
    }
    float s[HT][MT][4];
    slow_scores<KS>(s, a, x, delta, part, lane);
#pragma unroll
    for (int m = 0; m < MT; m++) {
      if (m == MT - 1) pending<0>(); else pending<1>();
      keep(k[m]);
#pragma unroll
      for (int j = 0; j < JF; j++) {
        // both rows of a lane are turned as the first is; the second meets a query turned back by a token in the odd columns
        const uint2 c = with.rot[((part * MT + m) * JF + j) * 32 + lane];
        u32 f[4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const u32 v = k[m][4 * j + r], w = k[m][4 * j + 2 + r];
          f[r] = fma2(neg2(w), c.y, mul2(v, c.x));
          f[2 + r] = fma2(w, c.x, mul2(v, c.y));
        }
#pragma unroll
        for (int ht = 0; ht < HT; ht++) {
          const uint2 q = turned[(ht * JF + j) * 32 + lane];
          hmma(s[ht][m], f[0], f[1], f[2], f[3], q.x, q.y);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < KS; i++)
#pragma unroll
      for (int m = 0; m < MT; m++) keep(a[i][m]);
#pragma unroll
    for (int ht = 0; ht < HT; ht++)
#pragma unroll
      for (int m = 0; m < MT; m++) { sc[ht][part * MT + m][0] = s[ht][m][0]; sc[ht][part * MT + m][1] = s[ht][m][3]; }
  }
}

// the tiles of one warp, of `length` of a program from `from` on: running maximum, sums and summed latents of each head
template <int TWOS>
__device__ __forceinline__ void walk(const Shape& s, const Tables& with, int from, int length, int warp, int lane, const u8* base, int bytes,
                                     int value_at, unsigned long long wv, const float4* tile_angles, int first_hidden, u8* stage,
                                     int (&o)[HT][NB][4], float (&mref)[HT], float (&l)[HT], float (&lv)[HT]) {
  const int g = lane / 4;
  Absorbed x;
  x.parts = (uint4*)(stage + s.stage_bytes); x.start = (int4*)(x.parts + HT * KS * 32);
  // keys of the next tile are under way while values are summed, and values while keys are: each has its place once
  const auto fetch_keys = [&](int n, bool absorbs) {
    for (int i = lane; i < J * 4; i += 32) {
      copy16(address(stage + 16 * i), tile_angles + (long long)n * J * 4 + i);
      if (JS > 0 && absorbs) copy16(address(stage + ANGLE_BYTES + 16 * i), tile_angles + (long long)(n + s.span / 2) * J * 4 + i);
    }
    for (int i = lane * 16; i < value_at; i += 512) copy16(address(stage + RECORD_AT + i), base + (long long)n * s.tile_bytes + i);
  };
  const auto fetch_values = [&](int n) {
    for (int i = value_at + lane * 16; i < bytes; i += 512) copy16(address(stage + RECORD_AT + i), base + (long long)n * s.tile_bytes + i);
  };
  // all warps walk as many steps, for they multiply together: one that has no tile left hides what it computes
  int tile = from + length * warp / NW;
  const int last = from + length * (warp + 1) / NW, rounds = (length + NW - 1) / NW;
  if (tile < last) fetch_keys(tile, true);
  commit();
  if (tile < last) fetch_values(tile);
  commit();
  const u8* rec = stage + RECORD_AT;
  for (int round = 0, place = 0; round < rounds; round++, tile++) {
    wait<1>();
    __syncwarp();
    if (JS > 0 && place == 0) absorb<KS>(x, with.wide, with.twice, with.query, with.turn, (const float4*)(stage + ANGLE_BYTES), s.halves, lane);
    turn_queries((float4*)stage, with.query, lane);
    float sc[HT][4][2];
    key_scores<TWOS>(sc, rec, with, x, (float)(place - s.span / 2) + 0.125f * g, (const uint2*)stage, lane);
    __syncwarp();
    place = place + 1 == s.span ? 0 : place + 1;
    if (tile + 1 < last) fetch_keys(tile + 1, place == 0);
    commit();
    wait<1>();
    __syncwarp();
    float weight[HT][4][2];
    weigh(s, sc, weight, rec + bytes - 256, tile, first_hidden, tile < last, o, mref, l, lv, lane);
    sum_values(o, rec + value_at, wv, lane, weight);
    __syncwarp();
    if (tile + 1 < last) fetch_values(tile + 1);
    commit();
  }
  wait<0>();
}

// grid (batch, kv heads, exact + splits), NW * 32 threads; the short programs of exact tokens come first
extern "C" __global__ void __launch_bounds__(NW * 32, CTAS)
decode_split(SHAPE_ARGUMENTS, const void* q, const u8* data, const int* widths, const int* offsets, const int* plane_list,
             const uint4* cores, const u32* starts, const uint4* rows, const u32* row_offsets, const float* pair_scale,
             const float* theta, const float4* tile_angles, const uint2* row_angles, const void* keys, const void* values,
             const float* slot_angles, const int* tokens, const int* tiles, const int* hidden, float* part, float* stat) {
  SHAPE;
  extern __shared__ __align__(128) u8 smem[];
  if (blockIdx.z < s.exact) { exact_part(s, blockIdx.z, q, keys, values, slot_angles, tokens, tiles, hidden, part, stat, smem); return; }
  const int h = blockIdx.y, b = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint4* matrix = (uint4*)smem;                          // [KS][2 JF][2][8] rows of 16 bytes
  uint4* wide = matrix + KS * JF * 32;
  uint2* rot = (uint2*)(wide + 2 * KS * JS * 32);
  int* planes = (int*)(rot + 4 * JF * 32);
  u32* start = (u32*)(planes + (KS + 1) / 2 * 4);
  u32* twice = start + 2 * JF * 4;
  float* turn = (float*)(twice + 2 * KS * 4);
  float* query = turn + D / 2;
  u8* stage = (u8*)(query + 8 * HT * ROW) + warp * (s.stage_bytes + HT * (KS * 512 + 128));
  const int threads = NW * 32;
  for (int i = threadIdx.x; i < KS * JF * 32; i += threads) matrix[i] = cores[(long long)h * KS * JF * 32 + i];
  for (int i = threadIdx.x; i < 2 * KS * JS * 32; i += threads) wide[i] = rows[(long long)h * 2 * KS * JS * 32 + i];
  for (int i = threadIdx.x; i < 4 * JF * 32; i += threads) rot[i] = row_angles[i / (JF * 32) * 2 * JF * 32 + i % (JF * 32)];
  for (int i = threadIdx.x; i < 2 * KS; i += threads) planes[i] = plane_list[(h * 2 * KS + i) * 2];
  for (int i = threadIdx.x; i < 8 * JF; i += threads) start[i % 4 * 2 * JF + i / 4] = starts[h * 8 * JF + i];
  for (int i = threadIdx.x; i < 8 * KS; i += threads) twice[i] = row_offsets[h * 8 * KS + i];
  for (int i = threadIdx.x; i < D / 2; i += threads) turn[i] = theta[i] * 64.f;
  for (int i = threadIdx.x; i < 4 * HT * D / 2; i += threads) {
    const int head = i / (D / 2), d = i % (D / 2);
    float lo = 0.f, hi = 0.f, c, n;
    if (head < G) {
      const long long from = ((long long)(b * s.heads + h) * G + head) * D + d;
      const float scale = s.scaling * pair_scale[h * (D / 2) + d];
      lo = element(q, from) * scale; hi = element(q, from + D / 2) * scale;
    }
    sincosf(theta[d], &n, &c);
    float* row = query + 2 * head * ROW + d;
    row[0] = lo; row[D / 2] = hi;
    row[ROW] = lo * c + hi * n; row[ROW + D / 2] = hi * c - lo * n;
  }
  unsigned long long wv = 0;
  int value_at = 0, twos = 0;
#pragma unroll
  for (int i = 0; i < NB; i++) { wv |= (unsigned long long)widths[h * 2 * NB + NB + i] << (4 * i); value_at += 128 * widths[h * 2 * NB + i]; }
#pragma unroll
  for (int i = 0; i < 2 * KS; i++) twos += plane_list[(h * 2 * KS + i) * 2 + 1] == 2;
  twos = __shfl_sync(~0u, twos, 0);  // the same in all lanes, which the compiler should know
  share_with_tensor_cores();
  __syncthreads();

  const int split = blockIdx.z - s.exact, count = tiles[b], first_hidden = hidden[b];
  const int from = (int)((long long)count * split / s.splits), length = (int)((long long)count * (split + 1) / s.splits) - from;
  const int bytes = offsets[h + 1] - offsets[h];
  const u8* base = data + (long long)b * s.max_tiles * s.tile_bytes + offsets[h];

  int sums[HT][NB][4];
  float o[HT][NB][4], mref[HT], l[HT], lv[HT];
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    mref[ht] = FLOOR; l[ht] = 0.f; lv[ht] = 0.f;
#pragma unroll
    for (int i = 0; i < NB; i++) { sums[ht][i][0] = 0; sums[ht][i][1] = 0; sums[ht][i][2] = 0; sums[ht][i][3] = 0; }
  }
  const Tables with = {wide, rot, (const int4*)planes, start, twice, turn, query, descriptor_of(address(matrix))};
#define WALK(n) if constexpr (n <= 2 * KS && (KINDS >> n & 1)) if (twos == n) \
    walk<n>(s, with, from, length, warp, lane, base, bytes, value_at, wv, tile_angles, first_hidden, stage, sums, mref, l, lv);
  WALK(0) WALK(1) WALK(2) WALK(3) WALK(4) WALK(5) WALK(6) WALK(7) WALK(8) WALK(9) WALK(10) WALK(11) WALK(12) WALK(13) WALK(14)
  WALK(15) WALK(16) WALK(17) WALK(18) WALK(19) WALK(20)
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int i = 0; i < NB; i++)
#pragma unroll
      for (int c = 0; c < 4; c += 2) o[ht][i][c] = fmaf((float)sums[ht][i][c], 256.f, (float)sums[ht][i][c + 1]);
  merge_warps(s, o, mref, l, lv, smem, part, stat, split);
}
