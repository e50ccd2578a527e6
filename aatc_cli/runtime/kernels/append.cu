// One new token into a layer's cache: when the ring is full its 64 oldest tokens are encoded, quantized and packed into the
// next tile first. docs/kernels.md draws the layout. Compiled at first use; needs no headers.
//
// D head_dim; a program has D threads and one side of one kv head of one sequence. Lengths are read on the device, so the
// same launch serves every step; most of the steps only copy a row.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define NB (D / 16)

__device__ __forceinline__ float from_half(u16 v) { float f; asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(v)); return f; }
__device__ __forceinline__ u16 to_half(float v) { u16 h; asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(v)); return h; }

#if QTYPE == 2
typedef u32 element;
__device__ __forceinline__ float number(element v) { return __uint_as_float(v); }
#elif QTYPE == 1
typedef u16 element;
__device__ __forceinline__ float number(element v) { return __uint_as_float((u32)v << 16); }
#else
typedef u16 element;
__device__ __forceinline__ float number(element v) { return from_half(v); }
#endif

__device__ __forceinline__ int packed_tiles(int tokens, int sinks, int ring) {
  const int excess = tokens - sinks - ring;
  return excess > 0 ? (excess + 63) / 64 : 0;
}

// code of one latent: nearest grid point, offset included, inside the code range
__device__ __forceinline__ float nearest(float z, float offset, float top) { return fminf(fmaxf(floorf(z + offset + 0.5f), 0.f), top); }

struct Channels {
  const float* encode;   // [D][D]: column c makes coded latent c
  const float* unit;     // [D] step at alpha 1, zero beyond the coded channels
  const float* offset;   // [D]
  const float* top;      // [D] largest code
  const float* spread;   // [D] what a latent is divided by before its token scale is looked for
  const float* weight;   // [D] price of squared error
};

// token scales [64] of latents [D][64]: the maximum, or the best of eight shares of the root mean square
__device__ void token_scales(float* alpha, const float* latent, const Channels& x, int coded, int search) {
  for (int n = threadIdx.x; n < 64; n += D) {
    float most = 0.f, square = 0.f;
    for (int c = 0; c < coded; c++) {
      const float z = latent[c * 64 + n] / x.spread[c];
      most = fmaxf(most, fabsf(z)); square += z * z;
    }
    float best = from_half(to_half(fminf(most, 65504.f)));
    if (search) {
      const float rms = sqrtf(square / (float)max(coded, 1));
      float least = __int_as_float(0x7F800000);
      for (int i = 0; i < 8; i++) {
        const float a = from_half(to_half(fminf(rms * (0.6f + 0.2f * i), 65504.f)));
        float error = 0.f;
        for (int c = 0; c < coded; c++) {
          const float h = latent[c * 64 + n], step = a * x.unit[c];
          const float u = nearest(step > 0.f ? h / step : 0.f, x.offset[c], x.top[c]);
          const float d = h - (u - x.offset[c]) * step;
          error += x.weight[c] * d * d;
        }
        if (error < least) { least = error; best = a; }
      }
    }
    alpha[n] = best;
  }
}

// the word of a plane that starts `left` bits up, for one lane: see core/tiles.py for the places
__device__ __forceinline__ u32 plane_word(const u8* codes, int block, int side, int plane, int left, int word) {
  const u32 mask = (1u << plane) - 1;
  u32 out = 0;
  for (int i = 0; i < 32 / plane; i++) {
    int token, channel, shift;
    if (side == 0) {
      const int share = 8 / plane, lane = word % 32, b = i / share, r = word / 32 * share + i % share;
      token = 8 * (lane / 4) + r; channel = 4 * (lane % 4) + b; shift = 8 * b + plane * (i % share);
    } else {
      const int lane = word / plane, each = 8 / plane, byte = i / each, in = i % each, upper = in & 1, even = in >> 1 & 1;
      const int later = plane == 1 ? in >> 2 : word % plane, step = 2 * later + even;
      token = 8 * (2 * (lane % 4) + byte / 2) + 2 * step + byte % 2; channel = lane / 4 + 8 * upper;
      shift = 8 * byte + 4 * even + 2 * upper + (plane == 1 ? later : 0);
    }
    out |= ((codes[token * D + 16 * block + channel] >> left) & mask) << shift;
  }
  return out;
}

// grid (2 sides, kv heads, batch), D threads
extern "C" __global__ void __launch_bounds__(D)
append(int heads, int slots, int sinks, int ring, int tile_bytes, int max_tiles, int search, const element* new_keys,
       const element* new_values, element* keys, element* values, u8* data, const int* widths, const int* offsets,
       const float* encode, const float* unit, const float* offset, const float* top, const float* spread, const float* weight,
       const int* tokens) {
  extern __shared__ __align__(16) u8 smem[];
  float* rows = (float*)smem;               // [D][64], then codes
  float* latent = rows + D * 64;            // [D][64]
  float* alpha = latent + D * 64;           // [64]
  const int side = blockIdx.x, h = blockIdx.y, b = blockIdx.z, d = threadIdx.x;
  element* cache = side ? values : keys;
  const int before = tokens[b] - 1, tile = packed_tiles(before, sinks, ring);
  const long long row0 = ((long long)b * slots * heads + h) * D + d;
  if (packed_tiles(before + 1, sinks, ring) > tile && tile < max_tiles) {
    const int at = (h * 2 + side) * D, at_block = (h * 2 + side) * NB;
    const Channels x = {encode + (long long)at * D, unit + at, offset + at, top + at, spread + at, weight + at};
    int coded = 0;
    for (int i = 0; i < NB; i++) coded += widths[at_block + i] > 0 ? 16 : 0;
    for (int n = 0; n < 64; n++) rows[d * 64 + n] = number(cache[row0 + (long long)(sinks + (64 * tile + n) % ring) * heads * D]);
    __syncthreads();
    float sum[64];
#pragma unroll
    for (int n = 0; n < 64; n++) sum[n] = 0.f;
    for (int k = 0; k < D; k++) {
      const float e = x.encode[(long long)k * D + d];
#pragma unroll
      for (int n = 0; n < 64; n++) sum[n] += rows[k * 64 + n] * e;
    }
#pragma unroll
    for (int n = 0; n < 64; n++) latent[d * 64 + n] = sum[n];
    __syncthreads();
    token_scales(alpha, latent, x, coded, search);
    __syncthreads();
    u8* codes = (u8*)rows;                  // [64][D]
    for (int n = 0; n < 64; n++) {
      const float step = alpha[n] * x.unit[d];
      codes[n * D + d] = step > 0.f ? (u8)nearest(latent[d * 64 + n] / step, x.offset[d], x.top[d]) : (u8)ceilf(x.offset[d]);
    }
    __syncthreads();
    u8* record = data + ((long long)b * max_tiles + tile) * tile_bytes + offsets[h];
    if (side) for (int i = 0; i < NB; i++) record += 128 * widths[h * 2 * NB + i];
    // keys: planes of two bits and then those of one; values: first planes, second ones, and so on
    for (int pass = 0; pass < (side ? 4 : 2); pass++)
      for (int i = 0; i < NB; i++) {
        const int width = widths[at_block + i];
        for (int rank = side ? pass : 0; rank < (side ? pass + 1 : 4); rank++) {
          const int plane = min(2, width - 2 * rank);
          if (plane <= 0 || (side == 0 && plane != 2 - pass)) continue;
          for (int word = d; word < 32 * plane; word += D)
            ((u32*)record)[word] = plane_word(codes, i, side, plane, width - 2 * rank - plane, word);
          record += 128 * plane;
        }
      }
    u16* scales = (u16*)(data + ((long long)b * max_tiles + tile) * tile_bytes + offsets[h + 1] - 256) + 64 * side;
    for (int n = d; n < 64; n += D) scales[n] = to_half(alpha[n]);
    __syncthreads();
  }
  const int slot = before < sinks ? before : sinks + (before - sinks) % ring;
  cache[row0 + (long long)slot * heads * D] = (side ? new_values : new_keys)[((long long)b * heads + h) * D + d];
}
