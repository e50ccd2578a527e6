// Latents of whole tiles to packed tiles: ranks tokens, looks for token scales, rounds, and gathers bits by a table.
//
// A program has one tile of one kv head; a warp of it 16 tokens of one class and side, one after another, a lane every
// 32nd of the channels that the class codes. What comes of it lies in shared memory as bytes: codes [64][2][E], token
// scales [2][64], places [64]. Every bit of the tile is the parity of some bits of one of those bytes, so in which order
// a tile holds them is a matter of the table alone.
//
// Nearest levels are found by cells: cell round(z * power of two) has at most one threshold, and `first` of its level
// below that is known. Where all levels are even, scales are tried in steps of the levels, by rounding downwards. Codes
// are those of the float32 twin, but for the order of sums and of products in what a scale is chosen by.
#include "device.cuh"
extern __shared__ __align__(128) u8 smem[];

#define LANE_CHANNELS ((E + 31) / 32)
#define CODES (128 * E)
#define LARGEST 3.402823466e38f
#define TINY 1.175494351e-38f
// what is added to a number to have it rounded in the last bits of a float32
#define WHOLE 8388608.0f
// the same where what is added to may be below zero
#define MIDDLE 12582912.0f

// facts of the channels that a class of a head codes, [8][E]: neighbouring lanes read neighbouring words
enum { SPREAD, CENTRE, PRICE, CELL, PLACE, FIRST, EVEN, HALF };
struct Channels {
  const u32* words;
  __device__ __forceinline__ float number(int fact, int i) const { return __uint_as_float(words[fact * E + i]); }
  __device__ __forceinline__ int whole(int fact, int i) const { return (int)words[fact * E + i]; }
};
// what a lane keeps of its channels from token to token; nothing of a channel that is not there. Of even levels price is
// that of a step, per_one are steps a unit, top the last level above zero, from MIDDLE on
struct Kept { float price[LANE_CHANNELS], per_one[LANE_CHANNELS], top[LANE_CHANNELS]; int first[LANE_CHANNELS]; };

// what a token scale is tried at, of the root mean square
__device__ const float FACTORS[8] = {0.6f, 0.8f, 1.0f, 1.2f, 1.4f, 1.6f, 1.8f, 2.0f};

__device__ __forceinline__ int cell_of(float z, float per_one, int last) {
  return (int)(__float_as_uint(fminf(fmaf(z, per_one, WHOLE), WHOLE + (float)last)) - 0x4B000000u);
}
__device__ __forceinline__ float largest_of_warp(float v) {
#pragma unroll
  for (int m = 16; m; m /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, m));
  return v;
}
__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int m = 16; m; m /= 2) v += __shfl_xor_sync(~0u, v, m);
  return v;
}
// of sums of eight things in every lane those of all lanes: lane l has thing l / 4
__device__ __forceinline__ float eight_sums(const float (&v)[8], int lane) {
  float four[4], two[2];
  const bool high = lane & 16, upper = lane & 8, odd = lane & 4;
#pragma unroll
  for (int i = 0; i < 4; i++) four[i] = (high ? v[i + 4] : v[i]) + __shfl_xor_sync(~0u, high ? v[i] : v[i + 4], 16);
#pragma unroll
  for (int i = 0; i < 2; i++) two[i] = (upper ? four[i + 2] : four[i]) + __shfl_xor_sync(~0u, upper ? four[i] : four[i + 2], 8);
  float one = (odd ? two[1] : two[0]) + __shfl_xor_sync(~0u, odd ? two[0] : two[1], 4);
  one += __shfl_xor_sync(~0u, one, 2);
  return one + __shfl_xor_sync(~0u, one, 1);
}

// places of the tokens by class, those of a class by place, into shared memory
__device__ __forceinline__ void rank_tokens(const float* received, const int* classes, u8* places) {
  float* r = (float*)smem;
  int* mine = (int*)(r + 64);
  const int i = threadIdx.x;
  if (i < 64) r[i] = received[i];
  __syncthreads();
  if (i < 64) {
    int rank = 0;
    for (int j = 0; j < 64; j++) rank += r[j] < r[i] || (r[j] == r[i] && j < i);
    mine[i] = classes[rank / 16];
  }
  __syncthreads();
  if (i < 64) {
    int slot = 0;
    while (classes[slot / 16] != mine[i]) slot += 16;
    for (int j = 0; j < i; j++) slot += mine[j] == mine[i];
    places[slot] = (u8)i;
  }
  __syncthreads();
}

struct Levels { const float2* cells; const u8* before; };

// codes and the scale of one token's side; ``row`` are its latents
template <bool STEPS> __device__ __forceinline__ void code_row(const float* row, Channels mine, const Kept& kept, int count, Levels levels, const u8* scale_codes,
                                         const float* scales, u8* codes, u8* scale) {
  const int lane = threadIdx.x % 32;
  float unit[LANE_CHANNELS], share[LANE_CHANNELS], peak = TINY, sum = 0.f;
#pragma unroll
  for (int j = 0; j < LANE_CHANNELS; j++) {
    unit[j] = 0.f;
    if (32 * j + lane < count) {
      const int i = 32 * j + lane;
      const float latent = row[mine.whole(PLACE, i)] - mine.number(CENTRE, i);
      unit[j] = fminf(fmaxf(latent / mine.number(SPREAD, i), -LARGEST), LARGEST);
    }
    peak = fmaxf(peak, fabsf(unit[j]));
  }
  peak = largest_of_warp(peak);
#pragma unroll
  for (int j = 0; j < LANE_CHANNELS; j++) {
    share[j] = fabsf(unit[j] / peak);
    sum = fmaf(share[j], share[j], sum);
  }
  const float rms = peak * sqrtf(sum_of_warp(sum) / (float)max(count, 1));
  const int code = scale_codes[pack2(fminf(rms * FACTORS[lane / 4], 65504.f), 0.f) & 0x7FFF];
  const float alpha = scales[code];
  const float size = alpha / peak, inverse = alpha > 0.f ? peak / alpha : peak;
  float errors[8], held_by[LANE_CHANNELS];
#pragma unroll
  for (int j = 0; j < LANE_CHANNELS; j++) held_by[j] = STEPS ? share[j] * kept.per_one[j] : share[j];
#pragma unroll
  for (int c = 0; c < 8; c++) {
    const float times = __shfl_sync(~0u, inverse, 4 * c), held = __shfl_sync(~0u, size, 4 * c);
    errors[c] = 0.f;
#pragma unroll
    for (int j = 0; j < LANE_CHANNELS; j++) {
      if (32 * j < count) {
        float level;
        if (STEPS) {
          level = fminf(__fmaf_rd(held_by[j], times, MIDDLE), kept.top[j]) - MIDDLE + 0.5f;
        } else {
          const float z = share[j] * times;
          const float2 cell = levels.cells[(kept.first[j] & 0xFFFF) + cell_of(z, kept.per_one[j], kept.first[j] >> 16)];
          level = z > cell.x ? 2.f * cell.x - cell.y : cell.y;
        }
        const float off = fmaf(level, held, -held_by[j]);
        errors[c] = fmaf(kept.price[j] * off, off, errors[c]);
      }
    }
  }
  float least = eight_sums(errors, lane);
  int best = lane / 4;
#pragma unroll
  for (int m = 16; m > 2; m /= 2) {
    const float other = __shfl_xor_sync(~0u, least, m);
    const int place = __shfl_xor_sync(~0u, best, m);
    const bool better = other < least || (other == least && place < best);
    least = better ? other : least; best = better ? place : best;
  }
  const float chosen = __shfl_sync(~0u, alpha, 4 * best);
  const int found = __shfl_sync(~0u, code, 4 * best);
  if (!lane) *scale = (u8)found;
#pragma unroll
  for (int j = 0; j < LANE_CHANNELS; j++) {
    if (32 * j + lane < count) {
      const int i = 32 * j + lane, half = mine.whole(HALF, i);
      const float z = unit[j] / (chosen > 0.f ? chosen : 1.f), magnitude = fabsf(z), even = mine.number(EVEN, i);
      int index;
      if (even > 0.f) {
        index = (int)fminf(fmaxf(floorf(z * even) + (float)half, 0.f), (float)(2 * half - 1));
      } else {
        const int cell = (kept.first[j] & 0xFFFF) + cell_of(magnitude, kept.per_one[j], kept.first[j] >> 16);
        const float edge = levels.cells[cell].x;
        const int below = levels.before[cell] + (z > 0.f ? magnitude > edge : magnitude >= edge);
        index = z > 0.f ? half + below : half - 1 - below;
      }
      codes[mine.whole(PLACE, i)] = (u8)index;
    }
  }
}

// the words of a tile that hold what is of this head
__device__ __forceinline__ void gather(const u8* bytes, const uint4* sources, const int* places, int count, int most, u32* out) {
  for (int w = threadIdx.x; w < count; w += 256) {
    u32 word = 0;
#pragma unroll
    for (int q = 0; q < 8; q++) {
      const uint4 s = sources[q * most + w];
      const u32 each[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 parity = __popc(bytes[each[i] & 0xFFFFu] & (each[i] >> 16)) + (each[i] >> 24);
        word |= (parity & 1u) << (4 * q + i);
      }
    }
    out[places[w]] = word;
  }
}

extern "C" __global__ void __launch_bounds__(256)
encode_tiles(const int classes, const int orders, const int words, const int most, const int cell_count,
             const int of_token, const int of_head, const float* keys, const float* values, const float* received, const int* class_of, const int* counts,
             const u32* channels, const float2* cells, const u8* before, const u8* scale_codes, const float* scales,
             const uint4* sources, const int* places, const int* word_counts, u32* out) {
  const long long tile = blockIdx.x;
  const int head = blockIdx.y, warp = threadIdx.x / 32;
  u8* bytes = smem;
  float2* own_cells = (float2*)(smem + CODES + 192);
  u8* own_before = (u8*)(own_cells + cell_count);
  for (int i = threadIdx.x; i < cell_count; i += 256) { own_cells[i] = cells[i]; own_before[i] = before[i]; }
  rank_tokens(received + (tile * orders + (orders > 1 ? head : 0)) * 64, class_of, bytes + CODES + 128);

  const int block = warp / 2, side = warp % 2, row_class = (head * classes + class_of[block]) * 2 + side;
  const int count = counts[row_class];
  const float* latents = side ? values : keys;
  const Channels mine{channels + (long long)row_class * 8 * E};
  Kept kept;
  bool uneven = false;
#pragma unroll
  for (int j = 0; j < LANE_CHANNELS; j++) {
    const int i = 32 * j + (int)threadIdx.x % 32;
    uneven |= i < count && !(mine.number(EVEN, i) > 0.f);
  }
  const bool even = !__any_sync(~0u, uneven);
#pragma unroll
  for (int j = 0; j < LANE_CHANNELS; j++) {
    const int i = 32 * j + (int)threadIdx.x % 32;
    const bool there = i < count;
    const float price = there ? mine.number(PRICE, i) : 0.f, steps = there ? mine.number(EVEN, i) : 0.f;
    kept.price[j] = even && there ? price / steps / steps : price;
    kept.per_one[j] = even ? steps : there ? mine.number(CELL, i) : 0.f;
    kept.top[j] = MIDDLE + (there ? (float)mine.whole(HALF, i) - 1.f : 0.f);
    kept.first[j] = there ? mine.whole(FIRST, i) : 0;
  }
  for (int i = 0; i < 16; i++) {
    const int slot = 16 * block + i;
    const float* row = latents + (tile * 64 + bytes[CODES + 128 + slot]) * of_token + (long long)head * of_head;
    const Levels levels{own_cells, own_before};
    u8* codes = bytes + (2 * slot + side) * E;
    u8* scale = bytes + CODES + 64 * side + slot;
    if (even) code_row<true>(row, mine, kept, count, levels, scale_codes, scales, codes, scale);
    else code_row<false>(row, mine, kept, count, levels, scale_codes, scales, codes, scale);
  }
  __syncthreads();
  gather(bytes, sources + (long long)head * 8 * most, places + head * most, word_counts[head], most, out + tile * words);
}
