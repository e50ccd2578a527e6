// Decode attention for Hopper: the codes of every plane of key bits are 8-bit floats as they lie, and four warps with a tile each multiply
// their next 16 tokens with one decode matrix in shared memory (wgmma). What is shared with decode.cu is in the headers.
//
// PS steps of 32 channels, two planes each; JF fast eighths of rotary pairs; MT row tiles of 16 tokens held at once.

#define NB (D / 16)   // blocks of 16 channels
#define KS PS
#define J (D / 16)    // pairs of 8-column tiles: dims 8 j .. and D / 2 + 8 j ..
#define JS (J - JF)   // of them slow ones: absorbed into the query instead of reconstructed
#define HT ((G + 3) / 4)  // tiles of 4 query heads, each in an even column
#define ANGLE_BYTES (J * 64 > HT * JF * 128 ? J * 64 : HT * JF * 128)
#define RECORD_AT (ANGLE_BYTES + (JS > 0 ? J * 64 : 0))
#define CORES (JF * 512)  // bytes of the matrix a step

#include "device.cuh"
#include "wgmma.cuh"
#include "values.cuh"
#include "exact.cuh"
#include "absorb.cuh"
#include "merge.cuh"

// scores of one tile before token scales: sc[ht][m][0] is row g, [1] row g + 8, of head 4 ht + t
// planes [4 / MT][2 KS]: byte in the record, bits a code, mask, first shift of the rows of a part
__device__ __forceinline__ void key_scores(float (&sc)[HT][4][2], const u8* rec, const int4* planes, const Absorbed& x, float delta,
                                           unsigned long long matrix, const uint2* rot, const u32* start, const uint2* turned, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int part = 0; part < 4 / MT; part++) {
    u32 a[KS][MT][4];
#pragma unroll
    for (int i = 0; i < 2 * KS; i++) {
      const int4 plane = planes[part * 2 * KS + i];
      u32 word = *(const u32*)(rec + plane.x + 4 * lane * plane.y) >> plane.w;
#pragma unroll
      for (int r = 0; r < 2 * MT; r++) {
        a[i / 2][r / 2][(i & 1) * 2 + (r & 1)] = word & plane.z;
        word >>= plane.y;
      }
    }
    u32 k[MT][4 * JF];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
      for (int n = 0; n < 2 * JF; n++) k[m][2 * n] = k[m][2 * n + 1] = start[n * 4 + t];
    arrive();
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
      for (int i = 0; i < KS; i++) wgmma(k[m], a[i][m], matrix + i * (CORES / 16));
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
        u32 f[4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const uint2 c = rot[(((part * MT + m) * 2 + r) * JF + j) * 32 + lane];
          const u32 v = k[m][4 * j + r], w = k[m][4 * j + 2 + r];
          f[r] = fma2(neg2(w), c.y, mul2(v, c.x));
          f[2 + r] = fma2(w, c.x, mul2(v, c.y));
        }
#pragma unroll
        for (int ht = 0; ht < HT; ht++) {
          const uint2 q = g & 1 ? make_uint2(0u, 0u) : turned[((ht * JF + j) * 4 + g / 2) * 4 + t];
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
      for (int m = 0; m < MT; m++) { sc[ht][part * MT + m][0] = s[ht][m][0]; sc[ht][part * MT + m][1] = s[ht][m][2]; }
  }
}

// grid (batch, kv heads, exact + splits), NW * 32 threads; the short programs of exact tokens come first
extern "C" __global__ void __launch_bounds__(NW * 32, CTAS)
decode_split(SHAPE_ARGUMENTS, const void* q, const u8* data, const int* widths, const int* offsets, const int2* plane_list,
             const uint4* cores, const u32* starts, const uint4* rows, const u32* row_offsets, const float* pair_scale,
             const float* theta, const float4* tile_angles, const uint2* row_angles, const void* keys, const void* values,
             const float* slot_angles, const int* tokens, const int* tiles, const int* hidden, float* part, float* stat) {
  SHAPE;
  extern __shared__ __align__(128) u8 smem[];
  if (blockIdx.z < s.exact) { exact_part(s, blockIdx.z, q, keys, values, slot_angles, tokens, tiles, hidden, part, stat, smem); return; }
  const int h = blockIdx.y, b = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  uint4* matrix = (uint4*)smem;                          // [KS][2 JF][2][8] rows of 16 bytes
  uint4* wide = matrix + KS * JF * 32;                   // [2 KS][JS][32] float16 key rows of the slow pairs
  uint2* rot = (uint2*)(wide + 2 * KS * JS * 32);        // [4 m][2 h][JF][32] cos and sin of the tile's tokens
  int4* planes = (int4*)(rot + 8 * JF * 32);             // [4 / MT][2 KS]
  u32* start = (u32*)(planes + 4 / MT * 2 * KS);         // [2 JF][4] accumulator starts
  u32* twice = start + 2 * JF * 4;                       // [2 KS][4] offsets as codes
  float* turn = (float*)(twice + 2 * KS * 4);            // [D / 2] angle per 64 tokens
  float* query = turn + D / 2;                           // [4 HT][D] scaled queries, zero above G
  u8* stage = (u8*)(query + 4 * HT * D) + warp * (s.stage_bytes + HT * (KS * 512 + 128));
  const int threads = NW * 32;
  for (int i = threadIdx.x; i < KS * JF * 32; i += threads) matrix[i] = cores[(long long)h * KS * JF * 32 + i];
  for (int i = threadIdx.x; i < 2 * KS * JS * 32; i += threads) wide[i] = rows[(long long)h * 2 * KS * JS * 32 + i];
  for (int i = threadIdx.x; i < 8 * JF * 32; i += threads) rot[i] = row_angles[i];
  for (int i = threadIdx.x; i < 4 / MT * 2 * KS; i += threads) {
    const int2 plane = plane_list[h * 2 * KS + i % (2 * KS)];
    const int row = i / (2 * KS) * 2 * MT, two = plane.y == 2;
    planes[i] = make_int4(plane.x + (two && row >= 4 ? 4 : 0), plane.y, plane.y == 0 ? 0 : two ? 0x03030303 : 0x01010101, two ? 2 * (row & 3) : row);
  }
  for (int i = threadIdx.x; i < 8 * JF; i += threads) start[i] = starts[h * 8 * JF + i];
  for (int i = threadIdx.x; i < 8 * KS; i += threads) twice[i] = row_offsets[h * 8 * KS + i];
  for (int i = threadIdx.x; i < D / 2; i += threads) turn[i] = theta[i] * 64.f;
  for (int i = threadIdx.x; i < 4 * HT * D; i += threads) {
    const int head = i / D, d = i % D;
    query[i] = head < G ? element(q, ((long long)(b * s.heads + h) * G + head) * D + d) * s.scaling *
                              pair_scale[h * (D / 2) + d % (D / 2)] : 0.f;
  }
  unsigned long long wv = 0;
  int value_at = 0;
#pragma unroll
  for (int i = 0; i < NB; i++) { wv |= (unsigned long long)widths[h * 2 * NB + NB + i] << (4 * i); value_at += 128 * widths[h * 2 * NB + i]; }
  share_with_tensor_cores();
  __syncthreads();

  const int split = blockIdx.z - s.exact, count = tiles[b], first_hidden = hidden[b];
  const int from = (int)((long long)count * split / s.splits), length = (int)((long long)count * (split + 1) / s.splits) - from;
  const int bytes = offsets[h + 1] - offsets[h];
  const u8* base = data + (long long)b * s.max_tiles * s.tile_bytes + offsets[h];

  float o[HT][NB][4], mref[HT], l[HT], lv[HT];
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    mref[ht] = FLOOR; l[ht] = 0.f; lv[ht] = 0.f;
#pragma unroll
    for (int i = 0; i < NB; i++) { o[ht][i][0] = 0.f; o[ht][i][1] = 0.f; o[ht][i][2] = 0.f; o[ht][i][3] = 0.f; }
  }
  Absorbed x;
  x.parts = (uint4*)(stage + s.stage_bytes); x.start = (int4*)(x.parts + HT * KS * 32);
  // keys of the next tile are under way while values are summed, and values while keys are: each has its place once
  const auto fetch_keys = [&](int n, bool absorbs) {
    for (int i = lane; i < J * 4; i += 32) {
      copy16(address(stage + 16 * i), tile_angles + (long long)n * J * 4 + i);
      if (JS > 0 && absorbs) copy16(address(stage + ANGLE_BYTES + 16 * i), tile_angles + (long long)(n + s.span - 1) * J * 4 + i);
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
  const unsigned long long descriptor = descriptor_of(address(matrix));
  for (int round = 0, place = 0; round < rounds; round++, tile++) {
    wait<1>();
    __syncwarp();
    if (JS > 0 && place == 0) absorb<KS>(x, wide, twice, query, turn, (const float4*)(stage + ANGLE_BYTES), s.halves, lane);
    turn_queries((float4*)stage, query, lane);
    float sc[HT][4][2];
    key_scores(sc, rec, planes, x, (float)(place - s.span + 1) + 0.125f * g, descriptor, rot, start, (const uint2*)stage, lane);
    __syncwarp();
    place = place + 1 == s.span ? 0 : place + 1;
    if (tile + 1 < last) fetch_keys(tile + 1, place == 0);
    commit();
    wait<1>();
    __syncwarp();
    u32 p[HT][4][2];
    weigh(s, sc, p, rec + bytes - 256, tile, first_hidden, tile < last, o, mref, l, lv, lane);
    const u8* at = rec + value_at;
#pragma unroll
    for (int i = 0; i < NB; i++) {
      const int width = (int)(wv >> (4 * i)) & 15;
      value_block(o, i, at, width, lane, p);
    }
    __syncwarp();
    if (tile + 1 < last) fetch_values(tile + 1);
    commit();
  }
  wait<0>();
  merge_warps(s, o, mref, l, lv, smem, part, stat, split);
}
