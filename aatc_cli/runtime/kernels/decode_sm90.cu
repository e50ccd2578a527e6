// Decode attention for Hopper: the codes of every plane of key bits are 8-bit floats as they lie, and four warps with a tile each multiply
// their next 16 tokens with one decode matrix in shared memory (wgmma). What is shared with decode.cu is in the headers.
//
// KS steps of 32 channels, two planes each; KINDS has bit n set where a head has n planes of two bits; JF fast eighths of rotary pairs. The four
// warps of a group walk four neighbouring tiles at a time, a span, and share what is made of the query for it.

#define NB (D / 16)   // blocks of 16 channels
#define KS PS
#define J (D / 16)    // pairs of 8-column tiles: dims 8 j .. and D / 2 + 8 j ..
#define JS (J - JF)   // of them slow ones: absorbed into the query instead of reconstructed
#define HT ((G + 3) / 4)  // tiles of 4 query heads, two columns each
#define LOTS ((J + 3) / 4)   // of them a warp's own to turn
#define CORES ((JF + (JS > 0 ? HT : 0)) * 512)  // bytes of the matrix a step
#define ROW (D + 8)       // floats from one query to the next, so that neighbours lie in other banks
#define BARRIERS (((2 * NW + NW / 4 + 1) * 8 + 127) / 128 * 128)  // bytes of barriers, in front of all other shared memory
#define GROUP_BYTES (KS * CORES + 3 * HT * JF * 256 + 2 * HT * JS * 256)
#define SIXTEEN 0x4C004C00u    // a pair of float16
#define TINY 0x1C001C00u       // 1 / 256

#include "device.cuh"
#include "shape.cuh"
#include "wgmma.cuh"
#include "transfer_sm90.cuh"
#include "span_sm90.cuh"
#include "keys_sm90.cuh"
#include "values.cuh"
#include "exact.cuh"
#include "merge.cuh"

// what a warp walks over: the tiles from + warp, from + warp + 4 ... of a group's `length`, and where they lie
struct Walk {
  int from, length, value_at, bytes, first_hidden;
  const u8* base;
  u8* stage;                  // a record
  u32 keys_here, values_here; // barriers of its two parts
  u32 read;                   // barrier of a group: its warps have read the matrix
};

// one lane: keys, or values and scales, of tile n on their way where that is the group's own
__device__ __forceinline__ void fetch(const Shape& s, const Walk& w, int n, bool values) {
  const int at = values ? w.value_at : 0, size = values ? w.bytes - w.value_at : w.value_at;
  if (n >= w.from + w.length) return;
  expect(values ? w.values_here : w.keys_here, size);
  if (size) bulk(address(w.stage + at), w.base + (long long)n * s.tile_bytes + at, size, values ? w.values_here : w.keys_here);
}

// the tiles of one group: running maximum, sums and summed latents of each head
template <int TWOS>
__device__ __forceinline__ void walk(const Shape& s, const Tables& with, const Span& x, const Walk& w, const uint4* rows, const float* query,
                                     const float* theta, const float4* tile_angles, float norm, unsigned long long counts, int warp, int lane,
                                     int (&o)[HT][NB][4], float (&mref)[HT], float (&l)[HT], float (&lv)[HT]) {
  const int g = lane / 4, t = lane % 4, group = warp / 4, mine = warp % 4, rounds = (w.length + 3) / 4;
  // lots of pairs are shared out among the four warps; those of slow ones are turned to the middle of the span
  float4 angle[LOTS];
  const auto look_up = [&](int span) {
    const float4* at = tile_angles + min(w.from + 4 * span, s.max_tiles - 1) * (J * 4) + t;
#pragma unroll
    for (int i = 0; i < LOTS; i++) { const int j = mine + 4 * i; if (j < J) angle[i] = at[j * 4 + (j < JF ? 0 : 2 * J * 4)]; }
  };
  const auto turn = [&](int span) {
#pragma unroll
    for (int i = 0; i < LOTS; i++) { const int j = mine + 4 * i; if (j < J) turn_lot(x, span, j, angle[i], query, theta, lane); }
  };
  look_up(0);
  float scale[HT][2];
  absorbed_scales(scale, query, theta, norm, lane);
  u32 select[HT][2];
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    // columns 2 t and 2 t + 1 of the absorbed product are value and slope of head 4 ht + t, high parts, and 8 more their low parts
    const float unit = (g & 1 ? 128.f : 512.f), value = unit / scale[ht][0], slope = unit / scale[ht][1];
    select[ht][0] = g / 2 == t ? pack2(value, slope) : 0u;
    select[ht][1] = g / 2 == t ? pack2(value * 0.0625f, slope * 0.0625f) : 0u;
  }
  const u32 far = pack2(1.f, (float)(mine - 2) + 0.125f * g + 0.0078125f);
  turn(0);
  if (rounds > 1) { look_up(1); turn(1); }
  sync_group(group);
  if (JS > 0) absorb_planes(x, 0, rows, with.planes, scale, mine, lane);
  for (int span = 0; span < rounds; span++) {
    share_with_tensor_cores();
    sync_group(group);
    const int tile = w.from + 4 * span + mine;
    const bool valid = tile < w.from + w.length;
    if (valid) arrived(w.keys_here, span & 1);
    look_up(span + 2);
    float sc[HT][4][2];
    key_scores<TWOS>(sc, w.stage, with, x.fast + span % 3 * HT * JF * 32, select, far, lane);
    __syncwarp();
    if (lane == 0) { arrive_at(w.read); fetch(s, w, tile + 4, false); }
    if (span + 1 < rounds) {
      turn(span + 2);
      if (JS > 0) {
        arrived(w.read, span & 1);
        absorb_planes(x, span + 1, rows, with.planes, scale, mine, lane);
      }
    }
    if (valid) arrived(w.values_here, span & 1);
    float weight[HT][4][2];
    weigh(s, sc, weight, w.stage + w.bytes - 256, tile, w.first_hidden, valid, o, mref, l, lv, lane);
    sum_values(o, w.stage + w.value_at, counts, lane, weight);
    __syncwarp();
    if (lane == 0) fetch(s, w, tile + 4, true);
  }
}

// grid (batch, kv heads, splits, and programs of exact tokens before them), NW * 32 threads
extern "C" __global__ void __launch_bounds__(NW * 32, CTAS)
decode_split(SHAPE_ARGUMENTS, const void* q, const u8* data, const int* widths, const int* offsets, const int4* plane_list,
             const uint4* cores, const uint4* rows, const float* pair_scale, const float* norms,
             const float* theta, const float4* tile_angles, const uint2* span_angles, const void* keys, const void* values,
             const float* slot_angles, const int* tokens, const int* tiles, const int* hidden, const u32* decode, const float* value_offset,
             int* arrivals, float* part, float* stat, void* out) {
  SHAPE;
  // barriers, of warps [NW][2], of groups, and one of the tables, have memory of their own until the end
  extern __shared__ __align__(128) u8 smem[];
  unsigned long long* barriers = (unsigned long long*)smem;
  u8* const room = smem + BARRIERS;
  // sinks and window have short programs of their own, or are shared out among the programs that walk tiles
  const bool inside = gridDim.z == s.splits;
  if (!inside && blockIdx.z < s.exact) {
    exact_part(s, blockIdx.z, q, keys, values, slot_angles, tokens, tiles, hidden, part, stat, room);
    finish(s, part, stat, decode, value_offset, arrivals, out, room);
    return;
  }
  const int h = blockIdx.y, b = blockIdx.x, lane = threadIdx.x % 32, threads = NW * 32;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes, which the compiler should know
  u8* groups = room;                                     // [NW / 4][GROUP_BYTES]
  uint4* wide = (uint4*)(groups + NW / 4 * GROUP_BYTES); // [J + 1][JS][32], the last block the sum of the offsets
  uint2* rot = (uint2*)(wide + (J + 1) * JS * 32);       // [16][JF][32]
  int4* planes = (int4*)(rot + 16 * JF * 32);
  float* turn = (float*)(planes + 2 * KS);               // angle per 64 tokens
  float* query = turn + D / 2;                           // [4 HT][2][ROW], zero above G, each followed by itself turned back by a token
  u8* stages = (u8*)(query + 8 * HT * ROW);
  const int group = warp / 4, split = blockIdx.z - (inside ? 0 : s.exact), count = tiles[b];
  const int from = (int)((long long)count * split / s.splits), length = (int)((long long)count * (split + 1) / s.splits) - from;
  const int first = length * group / (NW / 4);
  int value_at = 0, twos = 0;
#pragma unroll
  for (int i = 0; i < NB; i++) value_at += 128 * widths[h * 2 * NB + i];
  const Walk w = {from + first, length * (group + 1) / (NW / 4) - first, value_at, offsets[h + 1] - offsets[h], hidden[b],
                  data + (long long)b * s.max_tiles * s.tile_bytes + offsets[h], stages + warp * s.stage_bytes, address(barriers + 2 * warp), address(barriers + 2 * warp + 1),
                  address(barriers + 2 * NW + group)};
  const u32 tables_here = address(barriers + 2 * NW + NW / 4);
  u8* own = groups + group * GROUP_BYTES;
  if (lane == 0) {
    make_barrier(w.keys_here, 1); make_barrier(w.values_here, 1);
    if (warp % 4 == 0) make_barrier(w.read, 4);
    if (threadIdx.x == 0) make_barrier(tables_here, 1);
    share_with_tensor_cores();
    if (threadIdx.x == 0) {
      expect(tables_here, NW / 4 * KS * JF * 512 + (J + 1) * JS * 512 + 16 * JF * 256 + KS * 32);
      for (int i = 0; i < NW / 4 * KS; i++)
        bulk(address(groups + i / KS * GROUP_BYTES + i % KS * CORES), cores + (long long)(h * KS + i % KS) * JF * 32, JF * 512, tables_here);
      if (JS > 0) bulk(address(wide), rows + (long long)h * (J + 1) * JS * 32, (J + 1) * JS * 512, tables_here);
      bulk(address(rot), span_angles, 16 * JF * 256, tables_here);
      bulk(address(planes), plane_list + h * 2 * KS, KS * 32, tables_here);
    }
  }
  if (inside) {
    exact_part(s, split, q, keys, values, slot_angles, tokens, tiles, hidden, part, stat, stages);
    __syncthreads();
  }
  if (lane == 0) { fetch(s, w, w.from + warp % 4, false); fetch(s, w, w.from + warp % 4, true); }
  // absorbed columns of planes that a head lacks stay zero
  for (int i = threadIdx.x % 128; JS > 0 && i < KS * HT * 32; i += 128)
    ((uint4*)(own + i / (HT * 32) * CORES + JF * 512))[i % (HT * 32)] = make_uint4(0u, 0u, 0u, 0u);
  for (int i = threadIdx.x; i < 4 * HT * D / 2; i += threads) {
    const int head = i / (D / 2), d = i % (D / 2);
    float lo = 0.f, hi = 0.f, c, n;
    if (head < G) {
      const long long place = ((long long)(b * s.heads + h) * G + head) * D + d;
      const float scale = s.scaling * pair_scale[h * (D / 2) + d];
      lo = element(q, place) * scale; hi = element(q, place + D / 2) * scale;
    }
    sincosf(theta[d], &n, &c);
    if (head == 0) turn[d] = theta[d] * 64.f;
    float* row = query + 2 * head * ROW + d;
    row[0] = lo; row[D / 2] = hi;
    row[ROW] = 0.25f * (lo * c + hi * n); row[ROW + D / 2] = 0.25f * (hi * c - lo * n);
  }
  const unsigned long long counts = value_counts(widths + h * 2 * NB + NB);
#pragma unroll
  for (int i = 0; i < 2 * KS; i++) twos += plane_list[h * 2 * KS + i].y == 2;
  twos = __shfl_sync(~0u, twos, 0);  // the same in all lanes, which the compiler should know
  share_with_tensor_cores();
  __syncthreads();
  arrived(tables_here, 0);
  const Span x = {(uint2*)(own + KS * CORES), (uint2*)(own + KS * CORES) + 3 * HT * JF * 32, own};
  const Tables with = {rot + warp % 4 * 4 * JF * 32, planes, descriptor_of(address(own))};

  int sums[HT][NB][4];
  float mref[HT], l[HT], lv[HT];
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    mref[ht] = FLOOR; l[ht] = 0.f; lv[ht] = 0.f;
#pragma unroll
    for (int i = 0; i < NB; i++) { sums[ht][i][0] = 0; sums[ht][i][1] = 0; sums[ht][i][2] = 0; sums[ht][i][3] = 0; }
  }
#define WALK(n) if constexpr (n <= 2 * KS && (KINDS >> n & 1)) if (twos == n) \
    walk<n>(s, with, x, w, wide, query, turn, tile_angles, norms[h], counts, warp, lane, sums, mref, l, lv);
  if (w.length > 0) {
    WALK(0) WALK(1) WALK(2) WALK(3) WALK(4) WALK(5) WALK(6) WALK(7) WALK(8) WALK(9) WALK(10) WALK(11) WALK(12) WALK(13) WALK(14)
    WALK(15) WALK(16) WALK(17) WALK(18) WALK(19) WALK(20)
  }
  merge_warps(s, sums, mref, l, lv, room, part, stat, split);
  finish(s, part, stat, decode, value_offset, arrivals, out, room);
}
