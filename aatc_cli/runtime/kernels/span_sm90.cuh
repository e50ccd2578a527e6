// Queries of a span of four tiles, made by the four warps of a group for all of them: turned back to the span, and those of slow pairs
// absorbed into the key matrix as 8-bit floats.
//
// A query column c = 2 head + r: of fast pairs r = 1 is the query turned back by a token, of slow pairs the slope by the angle of 64 tokens.

// buffers of a group: fast queries of three spans, slow ones of two, absorbed ones behind the columns of fast pairs
struct Span {
  uint2* fast;      // [3][HT][JF][32]
  uint2* slow;      // [2][HT][JS][32]
  u8* matrix;       // [KS][2 JF + 2 HT][2][8][16]: lots of 8 columns; of absorbed queries high parts and then low ones
};

// one lot of 8 pairs of `span` turned by cs: j counts fast lots first
__device__ __forceinline__ void turn_lot(const Span& x, int span, int j, float4 cs, const float* query, const float* theta, int lane) {
  const int g = lane / 4, t = lane % 4;
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

// rows of a block of channels times a query, in its scales and transposed: a column's channels 4 t .. 4 t + 3 in two registers
__device__ __forceinline__ void absorb_block(u32 (&h)[2], const uint4* rows, const u32 (&b)[JS + 1][2], float value, float slope, int lane) {
  float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int k = 0; k < JS; k++) { const uint4 w = rows[k * 32 + lane]; hmma(c, w.x, w.y, w.z, w.w, b[k][0], b[k][1]); }
  h[0] = transpose8(pack2(c[0] * value, c[1] * slope)); h[1] = transpose8(pack2(c[2] * value, c[3] * slope));
}
// the nearest e4m3 numbers, and sixteen times what they leave
__device__ __forceinline__ u32 part_of(u32 h, u32& rest) {
  const u32 near = to_e4m3(h);
  rest = mul2(add2(h, neg2(from_e4m3(near))), SIXTEEN);
  return near;
}

// planes `first`, first + 4 ... of the absorbed queries of `span`; plane 0 is the sum of the offsets
__device__ __forceinline__ void absorb_planes(const Span& x, int span, const uint4* rows, const int4* planes, const float (&scale)[HT][2],
                                              int first, int lane) {
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    u32 b[JS + 1][2], h[2], rest[2];
#pragma unroll
    for (int k = 0; k < JS; k++) {
      const uint2 q = x.slow[((span % 2 * HT + ht) * JS + k) * 32 + lane];
      b[k][0] = q.x; b[k][1] = q.y;
    }
    u8* to = x.matrix + first / 2 * CORES + (2 * JF + 2 * ht) * 256 + first % 2 * 128 + 4 * lane;
    int i = first;
    if (first == 0) {
      // all channels of this plane are alike: the first has the sum and the second what its two parts leave
      absorb_block(h, rows + J * JS * 32, b, scale[ht][0], scale[ht][1], lane);
      u32 left, least;
      const u32 high = part_of(h[0], rest[0]), low = part_of(rest[0], left);
      const u32 second = part_of(mul2(left, TINY), least), last = to_e4m3(least);
      const bool holds = lane % 4 == 0;
      *(u32*)to = holds ? (high & 0xFFu) | (second & 0xFF00u) : 0u;
      *(u32*)(to + 256) = holds ? (low & 0xFFu) | (last & 0xFF00u) : 0u;
      i = 4; to += 2 * CORES;
    }
#pragma unroll 1
    for (; i < 2 * KS; i += 4, to += 2 * CORES) {
      const int4 plane = planes[i];
      if (plane.y == 0) break;
      const float weight = __int_as_float(plane.w);
      absorb_block(h, rows + plane.z * (JS * 32), b, scale[ht][0] * weight, scale[ht][1] * weight, lane);
      const u32 high[2] = {part_of(h[0], rest[0]), part_of(h[1], rest[1])};
      *(u32*)to = __byte_perm(high[0], high[1], 0x5410);
      *(u32*)(to + 256) = __byte_perm(to_e4m3(rest[0]), to_e4m3(rest[1]), 0x5410);
    }
  }
}
