// Queries of a span of four tiles, made by the four warps of a group for all of them: turned back to the span, and those of slow pairs
// absorbed into the key matrix as 8-bit floats.
//
// A query column c = 2 head + r: of fast pairs r = 1 is the query turned back by a token, of slow pairs the slope by the angle of 64 tokens.

// buffers of a group: fast queries of three spans, slow ones of two, absorbed ones of two
struct Span {
  uint2* fast;      // [3][HT][JF][32]
  uint2* slow;      // [2][HT][JS][32]
  u8* absorbed;     // [2][KS][2 HT][2][8][16]: lots of 8 columns, high parts and then low ones, as the static matrix
};

// one lot of 8 pairs of `span` turned: j counts fast lots first
__device__ __forceinline__ void turn_lot(const Span& x, int span, int j, const float4* angles, const float* query, const float* theta, int lane) {
  const int g = lane / 4, t = lane % 4;
  const float4 cs = angles[(j < JF ? 0 : 2 * J * 4) + j * 4 + t];  // slow pairs: of the middle of the span
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    const float* q = query + (8 * ht + (j < JF ? g : g & 6)) * ROW + 8 * j + 2 * t;
    const float2 ql = *(const float2*)q, qh = *(const float2*)(q + D / 2);
    float l0 = ql.x * cs.x + qh.x * cs.z, l1 = ql.y * cs.y + qh.y * cs.w;
    float h0 = qh.x * cs.x - ql.x * cs.z, h1 = qh.y * cs.y - ql.y * cs.w;
    if (j >= JF && g & 1) {
      const float2 th = *(const float2*)(theta + 8 * j + 2 * t);
      const float a0 = th.x * h0, a1 = th.y * h1;
      h0 = -th.x * l0; h1 = -th.y * l1; l0 = a0; l1 = a1;
    }
    uint2* to = j < JF ? x.fast + ((span % 3 * HT + ht) * JF + j) * 32 : x.slow + ((span % 2 * HT + ht) * JS + j - JF) * 32;
    to[lane] = make_uint2(pack2(l0, l1), pack2(h0, h1));
  }
}

// powers of two that bring absorbed queries of head 4 ht + t, value and slope, into the range of e4m3 whatever the angle
__device__ __forceinline__ void absorbed_scales(float (&scale)[HT][2], const float* query, const float* theta, float norm, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    float square[2] = {0.f, 0.f};
    for (int d = 8 * JF + g; d < D / 2; d += 8) {
      const float* q = query + (8 * ht + 2 * t) * ROW + d;
      const float both = q[0] * q[0] + q[D / 2] * q[D / 2];
      square[0] += both; square[1] += both * theta[d] * theta[d];
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
      for (int n = 4; n < 32; n <<= 1) square[e] += __shfl_xor_sync(~0u, square[e], n);
      scale[ht][e] = exp2f(fminf(fmaxf(floorf(log2f(448.f / (norm * sqrtf(square[e]) + 1e-30f))), -5.f), 24.f));
    }
  }
}

// planes `first`, first + 4 ... of the absorbed queries of `span`; plane 0 is the sum of the offsets
__device__ __forceinline__ void absorb_planes(const Span& x, int span, const uint4* rows, const int4* planes, const float (&scale)[HT][2],
                                              int first, int lane) {
  u32 b[HT][JS + 1][2];
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int k = 0; k < JS; k++) {
      const uint2 q = x.slow[((span % 2 * HT + ht) * JS + k) * 32 + lane];
      b[ht][k][0] = q.x; b[ht][k][1] = q.y;
    }
#pragma unroll 1
  for (int i = first; i < 2 * KS; i += 4) {
    const int4 plane = planes[i];
    if (i > 0 && plane.y == 0) break;
    const float weight = (float)(1 << plane.w);
#pragma unroll
    for (int ht = 0; ht < HT; ht++) {
      float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int k = 0; k < JS; k++) { const uint4 w = rows[(plane.z * JS + k) * 32 + lane]; hmma(c, w.x, w.y, w.z, w.w, b[ht][k][0], b[ht][k][1]); }
      const float value = scale[ht][0] * weight, slope = scale[ht][1] * weight;
      const u32 h[2] = {transpose8(pack2(c[0] * value, c[1] * slope)), transpose8(pack2(c[2] * value, c[3] * slope))};
      u32 hi[2], lo[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        hi[e] = to_e4m3(h[e]);
        const u32 rest = add2(h[e], neg2(from_e4m3(hi[e])));
        lo[e] = to_e4m3(mul2(rest, SIXTEEN));
        if (i == 0) {
          // all channels of this plane are alike: the first has the sum and the second what its two parts leave
          const u32 left = fma2(from_e4m3(lo[e]), neg2(SIXTEENTH), rest), more = to_e4m3(left);
          const u32 least = to_e4m3(mul2(add2(left, neg2(from_e4m3(more))), SIXTEEN));
          const bool holds = lane % 4 == 0 && e == 0;
          hi[e] = holds ? (hi[e] & 0xFFu) | (more & 0xFF00u) : 0u;
          lo[e] = holds ? (lo[e] & 0xFFu) | (least & 0xFF00u) : 0u;
        }
      }
      u8* to = x.absorbed + ((span % 2 * KS + i / 2) * 2 * HT + 2 * ht) * 256 + i % 2 * 128;
      ((u32*)to)[lane] = hi[0] | hi[1] << 16;
      ((u32*)(to + 256))[lane] = lo[0] | lo[1] << 16;
    }
  }
}
