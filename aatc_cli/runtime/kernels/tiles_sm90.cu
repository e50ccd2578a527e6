// Decode attention over tiles with classes, for Hopper: one query of every sequence over sinks, tiles and window.
//
// A program of NW warps, four or eight, has one class of one kv head of one sequence, and a stretch of `chunk` tiles. Its warps walk neighbouring
// tiles, a tile each, whose records come by bulk copies; codes become float16 levels in registers, are multiplied with the class's matrix of keys
// in shared memory (wgmma: 64 tokens of four warps at once), rotated by the places of their tokens, met by queries that are turned back to the start
// of the tile, and the levels of values are summed by softmax weights. Lengths and the pages of tiles are read on the device: programs beyond a
// sequence end at once, so that batches may be ragged.
//
// D head dim, G query heads of a kv head, KS and VS most steps of 16 slots of keys and values, BIAS where keys have one, PLACES tiles of a warp
// that there is shared memory for.

#define THREADS (NW * 32)
#define HT ((G + 7) / 8)      // tiles of 8 query heads
#define LOTS (D / 16)         // lots of 8 rotary pairs: columns 8 j .. and D / 2 + 8 j ..
#define STEP_BYTES (D * 32)   // of the key matrix: sixteen slots
#define TURN_ROW (LOTS * 4 + 1)  // from one place to the next, so that neighbours lie in other banks
#define MOVE 4.f              // powers of two above the reference of the weights before it is moved

#include "device.cuh"
#include "wgmma16.cuh"
#include "transfer_sm90.cuh"
#include "tiles_codes.cuh"
#include "tiles_exact.cuh"
#include "tiles_merge.cuh"

// what is the same for all tiles of a program
struct Side { int wide, four, steps; u32 ones; };  // steps that are wide, wide or of four bits, and all; which have single bits
struct Class { int start, size, blocks; Side keys, values; };

static_assert(KS <= 24, "the products of so many steps are not written out");
__device__ __forceinline__ void multiply(u32 (&sum)[4 * LOTS], u32 (&a)[KS > 0 ? KS : 1][4], unsigned long long matrix, int steps) {
#define CHAIN(n) if constexpr (n <= KS) if (steps == n) { \
    arrive(); \
    wgmma<0>(sum, a[0], matrix); \
    _Pragma("unroll") for (int i = 1; i < n; i++) wgmma<1>(sum, a[i], matrix + i * (STEP_BYTES / 16)); \
    close_group(); pending<0>(); keep(sum); \
    _Pragma("unroll") for (int i = 0; i < n; i++) keep(a[i]); }
  CHAIN(1) CHAIN(2) CHAIN(3) CHAIN(4) CHAIN(5) CHAIN(6) CHAIN(7) CHAIN(8) CHAIN(9) CHAIN(10) CHAIN(11) CHAIN(12)
  CHAIN(13) CHAIN(14) CHAIN(15) CHAIN(16) CHAIN(17) CHAIN(18) CHAIN(19) CHAIN(20) CHAIN(21) CHAIN(22) CHAIN(23) CHAIN(24)
#undef CHAIN
}

// tables in shared memory, and what a warp holds of its heads 8 ht + 2 t and the one after
struct Walk {
  unsigned long long matrix;
  const uint2 *turns, *queries;
  const uint4 *key_descriptors, *value_descriptors;
  const uint2 *key_lanes, *value_lanes;
  const u8* levels;
  const u32* bias;
};
struct Sums { float o[HT][VS > 0 ? VS : 1][4], reference[HT][2], weight[HT][2]; };

// scores of sixteen tokens: sc[ht][0], [1] of token g, [2], [3] of token g + 8
__device__ __forceinline__ void scores_of(float (&sc)[HT][4], const u32 (&sum)[4 * LOTS], const Walk& w, const u8* rec,
                                          const uint2 (&turned)[HT][LOTS], int lane) {
  const int g = lane / 4, t = lane % 4;
  float odd[HT][4];  // of every second lot: a chain of half the length
  const uint2 *turn0 = w.turns + rec[g] * TURN_ROW + t, *turn1 = w.turns + rec[g + 8] * TURN_ROW + t;
  const float scale0 = token_scale(rec[16 + g]), scale1 = token_scale(rec[24 + g]);
#if BIAS
  const u32 each0 = pack2(scale0, scale0), each1 = pack2(scale1, scale1);
#endif
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int e = 0; e < 4; e++) { sc[ht][e] = 0.f; odd[ht][e] = 0.f; }
#pragma unroll
  for (int j = 0; j < LOTS; j++) {
    u32 low0 = sum[4 * j], low1 = sum[4 * j + 1], high0 = sum[4 * j + 2], high1 = sum[4 * j + 3];
#if BIAS
    const u32 b0 = w.bias[4 * j + t], b1 = w.bias[D / 4 + 4 * j + t];
    low0 = fma2(low0, each0, b0); low1 = fma2(low1, each1, b0); high0 = fma2(high0, each0, b1); high1 = fma2(high1, each1, b1);
#endif
    const uint2 c0 = turn0[4 * j], c1 = turn1[4 * j];
    const u32 f0 = fma2(neg2(high0), c0.y, mul2(low0, c0.x)), f2 = fma2(high0, c0.x, mul2(low0, c0.y));
    const u32 f1 = fma2(neg2(high1), c1.y, mul2(low1, c1.x)), f3 = fma2(high1, c1.x, mul2(low1, c1.y));
#pragma unroll
    for (int ht = 0; ht < HT; ht++) hmma(j % 2 ? odd[ht] : sc[ht], f0, f1, f2, f3, turned[ht][j].x, turned[ht][j].y);
  }
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int e = 0; e < 4; e++) sc[ht][e] += odd[ht][e];
#if !BIAS
#pragma unroll
  for (int ht = 0; ht < HT; ht++) { sc[ht][0] *= scale0; sc[ht][1] *= scale0; sc[ht][2] *= scale1; sc[ht][3] *= scale1; }
#endif
}

// scores become softmax weights times value scales, as operands; the reference of the weights moves only where one would be large
__device__ __forceinline__ void weigh(u32 (&b)[HT][2], const float (&sc)[HT][4], Sums& s, const u8* rec, int lane) {
  const int g = lane / 4;
  bool large = false;
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int e = 0; e < 2; e++) large |= fmaxf(sc[ht][e], sc[ht][2 + e]) > s.reference[ht][e] + MOVE;
  if (__any_sync(~0u, large)) {
#pragma unroll
    for (int ht = 0; ht < HT; ht++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float top = fmaxf(s.reference[ht][e], fmaxf(sc[ht][e], sc[ht][2 + e]));
#pragma unroll
        for (int n = 4; n < 32; n <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, n));
        const float f = ex2(s.reference[ht][e] - top);
        s.reference[ht][e] = top; s.weight[ht][e] *= f;
#pragma unroll
        for (int i = 0; i < VS; i++) { s.o[ht][i][e] *= f; s.o[ht][i][2 + e] *= f; }
      }
  }
  const float scale0 = token_scale(rec[32 + g]), scale1 = token_scale(rec[40 + g]);
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    float p[4];
#pragma unroll
    for (int e = 0; e < 4; e++) p[e] = ex2(sc[ht][e] - s.reference[ht][e % 2]);
    s.weight[ht][0] += p[0] + p[2]; s.weight[ht][1] += p[1] + p[3];
    b[ht][0] = transpose8(pack2(p[0] * scale0, p[1] * scale0)); b[ht][1] = transpose8(pack2(p[2] * scale1, p[3] * scale1));
  }
}

// steps i and, if there is one, i + 1; where they are of two kinds, one after the other
template <bool of_keys>
__device__ __forceinline__ void one_step(u32 (&a)[4], int i, const Side& c, const Walk& w, const u8* rec, int lane) {
  const uint2* lanes = (of_keys ? w.key_lanes : w.value_lanes) + 32 * i;
  if (i < c.wide) {
    if (of_keys) wide_keys(a, rec, w.key_descriptors + 4 * i, w.levels, lane);
    else wide_values(a, rec, w.value_descriptors + 8 * i, w.levels, lane);
  } else if (i < c.four) small_step<0>(a, rec, lanes, w.levels, lane);
  else small_step<2>(a, rec, lanes, w.levels, lane);
}
template <bool of_keys>
__device__ __forceinline__ void two_steps(u32 (&a)[4], u32 (&next)[4], bool both, int i, const Side& c, const Walk& w, const u8* rec, int lane) {
  const uint2* lanes = (of_keys ? w.key_lanes : w.value_lanes) + 32 * i;
  if (i >= c.four) {
    if (c.ones >> i & 3u) {
      small_step<2>(a, rec, lanes, w.levels, lane);
      if (both) small_step<2>(next, rec, lanes + 32, w.levels, lane);
    } else {
      small_step<1>(a, rec, lanes, w.levels, lane);
      if (both) small_step<1>(next, rec, lanes + 32, w.levels, lane);
    }
  } else {
    one_step<of_keys>(a, i, c, w, rec, lane);
    if (both) one_step<of_keys>(next, i + 1, c, w, rec, lane);
  }
}

// sixteen tokens of a warp's tile; what is not valid is multiplied with the others and forgotten
__device__ __forceinline__ void take_block(Sums& s, const Walk& w, const Class& c, const u8* rec, const uint2 (&turned)[HT][LOTS], bool valid, int lane) {
  u32 sum[4 * LOTS];
  if (KS > 0 && c.keys.steps) {
    u32 a[KS > 0 ? KS : 1][4];
    // two steps between branches, so that the loads of one hide those of the other
#pragma unroll
    for (int i = 0; i < KS; i += 2) {
      if (i >= c.keys.steps || !valid) break;
      two_steps<true>(a[i], a[i + 1 < KS ? i + 1 : i], i + 1 < KS, i, c.keys, w, rec, lane);
    }
    multiply(sum, a, w.matrix, c.keys.steps);
  } else {
#pragma unroll
    for (int i = 0; i < 4 * LOTS; i++) sum[i] = 0u;
  }
  if (!valid) return;
  float sc[HT][4];
  scores_of(sc, sum, w, rec, turned, lane);
  u32 b[HT][2];
  weigh(b, sc, s, rec, lane);
#pragma unroll
  for (int i = 0; i < VS; i += 2) {
    if (i >= c.values.steps) break;
    u32 a[2][4];
    two_steps<false>(a[0], a[1], i + 1 < VS, i, c.values, w, rec, lane);
#pragma unroll
    for (int n = 0; n < 2 && i + n < VS; n++)
#pragma unroll
      for (int ht = 0; ht < HT; ht++) hmma(s.o[ht][i + n], a[n][0], a[n][1], a[n][2], a[n][3], b[ht][0], b[ht][1]);
  }
}

// grid (batch, kv heads, shares of exact tokens and then chunks of tiles by class), 32 NW threads
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
attend_tiles(TILE_ARGUMENTS, const void* q, const u8* pool, const int* pages, const int* classes, const uint4* key_descriptors,
             const uint4* value_descriptors, const uint2* key_lanes, const uint2* value_lanes, const u8* levels, const uint4* matrices,
             const int* channels, const float* pair_scale, const u32* key_bias, const uint2* place_turns, const uint2* start_turns,
             const float2* start_angles, const float2* place_angles, const void* keys, const void* values, const int* tokens, const int* tiles,
             const u32* decode, const float* value_bias, int* arrivals, float* part, float* stat, float* exact_scores, float* received, void* out) {
  TILE_SHAPE;
  extern __shared__ __align__(128) u8 smem[];
  const int h = blockIdx.y, b = blockIdx.x, lane = threadIdx.x % 32, t = lane % 4;
  const Last last = {part, stat, decode, value_bias, arrivals, exact_scores, received, tokens, tiles, out};
  if (blockIdx.z < s.exact) {
    exact_part(s, blockIdx.z, q, keys, values, start_angles, place_angles, tokens, tiles, part, stat, exact_scores, smem);
    finish(s, last, smem);
    return;
  }
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes, which the compiler should know
  const int piece = blockIdx.z - s.exact, k = piece % s.classes, from = piece / s.classes * s.chunk, which = h * s.classes + k;
  const int to = min(tiles[b], from + s.chunk);
  const int* f = classes + 16 * which;
  const Class c = {f[0], f[1], f[2], {f[3], f[4], f[5], (u32)f[9]}, {f[6], f[7], f[8], (u32)f[10]}};
  if (from >= to || !c.size) {
    empty_part(s, s.exact + piece, stat);
    finish(s, last, smem);
    return;
  }
  uint2* turns = (uint2*)(smem + KS * STEP_BYTES);       // [64][TURN_ROW]
  uint2* queries = turns + 64 * TURN_ROW;                // [HT][LOTS][32]
  uint4* of_keys = (uint4*)(queries + HT * LOTS * 32);   // [KS][4]
  uint4* of_values = of_keys + KS * 4;                   // [VS][8]
  uint2* lanes_of_keys = (uint2*)(of_values + VS * 8);   // [KS][32]
  uint2* lanes_of_values = lanes_of_keys + KS * 32;      // [VS][32]
  u8* tables = (u8*)(lanes_of_values + VS * 32);         // levels
  u32* bias = (u32*)(tables + s.level_bytes);            // [D / 2]
  unsigned long long* barriers = (unsigned long long*)(bias + D / 2);  // [NW][2], and one of the tables; then one for alignment
  u8* stages = (u8*)(barriers + 2 * NW + 2);
  const u32 tables_here = address(barriers + 2 * NW), mine = address(barriers + 2 * warp);
  const int bytes = c.blocks * c.size, stage_size = s.stage_bytes + LOTS * 32;
  u8* stage = stages + warp * PLACES * stage_size;
  // one lane: the turn of tile n's start and its records of the class on their way to a place of this warp
  const auto fetch = [&](int n, int place) {
    if (n >= to) return;
    const u32 there = address(stage + place * stage_size);
    expect(mine + 8 * place, LOTS * 32 + bytes);
    bulk(there, start_turns + (long long)n * (LOTS * 4), LOTS * 32, mine + 8 * place);
    bulk(there + LOTS * 32, pool + (long long)pages[b * s.max_tiles + n] * s.tile_bytes + c.start, bytes, mine + 8 * place);
  };
  if (lane == 0) {
    make_barrier(mine, 1); make_barrier(mine + 8, 1);
    if (threadIdx.x == 0) make_barrier(tables_here, 1);
    share_with_tensor_cores();
    for (int i = 0; i < PLACES; i++) fetch(from + warp + i * NW, i);
    if (threadIdx.x == 0) {
      expect(tables_here, c.keys.steps * STEP_BYTES + KS * 320 + VS * 384 + 64 * TURN_ROW * 8 + s.level_bytes);
      if (c.keys.steps) bulk(address(smem), matrices + (long long)which * KS * (STEP_BYTES / 16), c.keys.steps * STEP_BYTES, tables_here);
      if (KS > 0) {
        bulk(address(of_keys), key_descriptors + which * KS * 4, KS * 64, tables_here);
        bulk(address(lanes_of_keys), key_lanes + which * KS * 32, KS * 256, tables_here);
      }
      if (VS > 0) {
        bulk(address(of_values), value_descriptors + which * VS * 8, VS * 128, tables_here);
        bulk(address(lanes_of_values), value_lanes + which * VS * 32, VS * 256, tables_here);
      }
      bulk(address(turns), place_turns, 64 * TURN_ROW * 8, tables_here);
      bulk(address(tables), levels, s.level_bytes, tables_here);
    }
  }
  for (int i = threadIdx.x; i < HT * LOTS * 32; i += THREADS) {
    const int head = i / (LOTS * 32) * 8 + i % 32 / 4, pair = i / 32 % LOTS * 8 + i % 4 * 2;
    uint2 found = make_uint2(0u, 0u);
    if (head < G) {
      const long long at = ((long long)(b * s.heads + h) * G + head) * D + pair;
      const float s0 = s.scaling * pair_scale[which * (D / 2) + pair], s1 = s.scaling * pair_scale[which * (D / 2) + pair + 1];
      found = make_uint2(pack2(element(q, at) * s0, element(q, at + 1) * s1), pack2(element(q, at + D / 2) * s0, element(q, at + D / 2 + 1) * s1));
    }
    queries[i] = found;
  }
  for (int i = threadIdx.x; BIAS && i < D / 2; i += THREADS) bias[i] = key_bias[which * (D / 2) + i];
  __syncthreads();
  arrived(tables_here, 0);
  const Walk w = {descriptor_of(address(smem)), turns, queries, of_keys, of_values, lanes_of_keys, lanes_of_values, tables, bias};
  Sums sums;
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    sums.reference[ht][0] = FLOOR; sums.reference[ht][1] = FLOOR; sums.weight[ht][0] = 0.f; sums.weight[ht][1] = 0.f;
#pragma unroll
    for (int i = 0; i < VS; i++) { sums.o[ht][i][0] = 0.f; sums.o[ht][i][1] = 0.f; sums.o[ht][i][2] = 0.f; sums.o[ht][i][3] = 0.f; }
  }
  int round = 0;
  for (int base = from; base < to; base += NW, round++) {
    const int tile = base + warp, place = round % PLACES;
    const bool valid = tile < to;
    const u8* here = stage + place * stage_size;
    if (valid) arrived(mine + 8 * place, round / PLACES & 1);
    uint2 turned[HT][LOTS];
    const uint2* start = (const uint2*)here + t;
#pragma unroll
    for (int j = 0; j < LOTS; j++) {
      const uint2 turn = start[4 * j];
#pragma unroll
      for (int ht = 0; ht < HT; ht++) {
        const uint2 x = queries[(ht * LOTS + j) * 32 + lane];
        turned[ht][j] = make_uint2(fma2(x.y, turn.y, mul2(x.x, turn.x)), fma2(neg2(x.x), turn.y, mul2(x.y, turn.x)));
      }
    }
    for (int i = 0; i < c.blocks; i++) take_block(sums, w, c, here + LOTS * 32 + i * c.size, turned, valid, lane);
    __syncwarp();
    if (lane == 0) fetch(tile + PLACES * NW, place);
  }
  merge_warps(s, sums.o, sums.reference, sums.weight, channels + which * VS * 16, c.values.steps, smem, part, stat, s.exact + piece);
  finish(s, last, smem);
}
