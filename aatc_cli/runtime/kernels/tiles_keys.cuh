// Scores of sixteen tokens of a class: digits of keys as 8-bit floats times the rows of their digits.
//
// A byte below sixteen is an e4m3 number, itself times 2^-9. runtime/fused_tiles/digits.py says where digits lie: a lane's word of two bits has four
// channels of tokens g and g + 8, of which those of the upper half of a step count four times, and their rows a quarter.

// what is the same for all tiles of a program: steps of 32 digits by bits, where in a record digits begin, bytes and number of records in a tile
struct Class { int k4, k2, k1, keys2, v4, v2, v1, values4, keys1, values2, values1, start, size, blocks; };

// tables in shared memory
struct Walk {
  u32 matrix;
  const uint2* queries;
  const uint4 *turns, *start;
  const float* scales;
  const u32* bias;
};
// queries of a pair of tiles: in registers, or a lane's own in shared memory
struct Turned {
  uint2 registers[QT == 1 ? LOTS : 1];
  uint2* shared;
  __device__ __forceinline__ uint2 at(int qt, int j) const { return QT == 1 ? registers[QT == 1 ? j : 0] : shared[(qt * LOTS + j) * 32]; }
};

// a token scale of eight bits, as core/scales.py rounds it
__device__ __forceinline__ float token_scale(u32 code) { return code ? half_lo(pack2(ex2(((float)code - 128.f) * 0.0625f), 0.f)) : 0.f; }

// columns 2 i and 2 i + 1 are query 4 qt + i and, of pairs that turn little, its slope by the angle of 64 tokens
__device__ __forceinline__ void fill_queries(uint2* queries, const Shape& s, const void* q, const float* pair_scale, const float* slopes) {
  for (int i = threadIdx.x; i < QT * LOTS * 32; i += THREADS) {
    const int lane = i % 32, j = i / 32 % LOTS, head = i / (LOTS * 32) * 4 + lane / 8, pair = 8 * j + 2 * (lane % 4);
    uint2 found = make_uint2(0u, 0u);
    const bool slope = lane / 4 % 2;
    if (head < G && !(slope && j < FAST)) {
      const long long at = ((long long)(blockIdx.x * s.heads + blockIdx.y) * G + head) * D + pair;
      float s0 = s.scaling * pair_scale[pair], s1 = s.scaling * pair_scale[pair + 1];
      if (slope) { s0 *= slopes[pair]; s1 *= slopes[pair + 1]; }
      const float l0 = element(q, at) * s0, l1 = element(q, at + 1) * s1, h0 = element(q, at + D / 2) * s0, h1 = element(q, at + D / 2 + 1) * s1;
      found = slope ? make_uint2(pack2(h0, h1), pack2(-l0, -l1)) : make_uint2(pack2(l0, l1), pack2(h0, h1));
    }
    queries[i] = found;
  }
}
// turned back to the start of a pair of tiles, or to its middle where pairs turn little
__device__ __forceinline__ void turn_queries(Turned& turned, const Walk& w, const uint2* turns, int lane) {
#pragma unroll
  for (int j = 0; j < LOTS; j++) {
    const uint2 turn = turns[4 * j + lane % 4];
#pragma unroll
    for (int qt = 0; qt < QT; qt++) {
      const uint2 x = w.queries[(qt * LOTS + j) * 32 + lane];
      const uint2 found = make_uint2(fma2(x.y, turn.y, mul2(x.x, turn.x)), fma2(neg2(x.x), turn.y, mul2(x.y, turn.x)));
      if (QT == 1) turned.registers[QT == 1 ? j : 0] = found;
      else turned.shared[(qt * LOTS + j) * 32] = found;
    }
  }
}

__device__ __forceinline__ void four_bits(u32 (&a)[4], u32 v, u32 w) {
  a[0] = v & 0x0F0F0F0Fu; a[1] = v >> 4 & 0x0F0F0F0Fu; a[2] = w & 0x0F0F0F0Fu; a[3] = w >> 4 & 0x0F0F0F0Fu;
}
__device__ __forceinline__ void two_bits(u32 (&a)[4], u32 w) {
  const u32 v = w >> 4;
  a[0] = w & 0x03030303u; a[1] = v & 0x03030303u; a[2] = w & 0x0C0C0C0Cu; a[3] = v & 0x0C0C0C0Cu;
}
__device__ __forceinline__ void one_bit(u32 (&a)[4], u32 w) {
  const u32 v = w >> 2;
  a[0] = w & 0x01010101u; a[1] = v & 0x01010101u; a[2] = w & 0x02020202u; a[3] = v & 0x02020202u;
}

// steps of digits of one size, two products under way at a time, and the last of them meanwhile what is `then`. Rows of digits of four bits are sums of two
template <int bits, int n, class Then>
__device__ __forceinline__ void multiply_steps(u32 (&sum)[4 * LOTS], const u8* at, u32 matrix, const Then& then) {
  u32 a[4], b[4];
  const auto give = [&](u32 (&x)[4], int i) {
    arrive();
    wgmma<1>(sum, x, MATRIX_FORM | (matrix + i * (STEP_BYTES / 16)));
    if (bits == 4) wgmma<1>(sum, x, MATRIX_FORM | (matrix + (K4 + i) * (STEP_BYTES / 16)));
    close_group();
  };
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    u32 w[4];
    if (bits == 4) {
      const uint2 first = *(const uint2*)(at + 256 * i), second = i + 1 < n ? *(const uint2*)(at + 256 * (i + 1)) : first;
      w[0] = first.x; w[1] = first.y; w[2] = second.x; w[3] = second.y;
    } else if (bits == 2) { w[0] = *(const u32*)(at + 128 * i); w[1] = i + 1 < n ? *(const u32*)(at + 128 * (i + 1)) : 0u; }
    else w[0] = *(const u32*)(at + 64 * i);
    if (i > 0) { pending<1>(); keep(a); }
    if (bits == 4) four_bits(a, w[0], w[1]); else if (bits == 2) two_bits(a, w[0]); else one_bit(a, w[0]);
    give(a, i);
    if (i + 1 == n) break;
    if (i > 0) { pending<1>(); keep(b); }
    if (bits == 4) four_bits(b, w[2], w[3]); else if (bits == 2) two_bits(b, w[1]); else one_bit(b, w[0] >> 4);
    give(b, i + 1);
  }
  then();
  pending<0>(); keep(a);
  if (n > 1) keep(b);
}
// minus the sums of the offsets
__device__ __forceinline__ void start_sums(u32 (&sum)[4 * LOTS], const Walk& w, int lane) {
#pragma unroll
  for (int j = 0; j < LOTS; j++) {
    const uint4 from = w.start[4 * j + lane % 4];
    sum[4 * j] = from.x; sum[4 * j + 1] = from.y; sum[4 * j + 2] = from.z; sum[4 * j + 3] = from.w;
  }
}

// scores of tokens g and g + 8 for head 4 qt + t
__device__ __forceinline__ void scores_of(float (&score)[QT][2], const u32 (&sum)[4 * LOTS], const Walk& w, const u8* rec, const Turned& turned,
                                          int first, int lane) {
  const int g = lane / 4, t = lane % 4, place0 = first + rec[g], place1 = first + rec[g + 8];
  // two lots lie together, and of neighbouring places in turn in either half of the banks
  const uint4 *turn0 = w.turns + place0 * TURN_ROW + t, *turn1 = w.turns + place1 * TURN_ROW + t;
  const int swap0 = TURN_ROW % 8 ? 0 : place0 % 2, swap1 = TURN_ROW % 8 ? 0 : place1 % 2;
  uint4 c0, c1;
  const float scale0 = w.scales[rec[16 + g]], scale1 = w.scales[rec[24 + g]];
#if BIAS
  const u32 each0 = pack2(scale0, scale0), each1 = pack2(scale1, scale1);
#endif
  float sc[QT][2][4];  // of even and of odd lots: chains of half the length
#pragma unroll
  for (int qt = 0; qt < QT; qt++)
#pragma unroll
    for (int e = 0; e < 4; e++) { sc[qt][0][e] = 0.f; sc[qt][1][e] = 0.f; }
#pragma unroll
  for (int j = 0; j < LOTS; j++) {
    u32 f[4] = {sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]};
#if BIAS
    const u32 b0 = w.bias[4 * j + t], b1 = w.bias[D / 4 + 4 * j + t];
    f[0] = fma2(f[0], each0, b0); f[1] = fma2(f[1], each1, b0); f[2] = fma2(f[2], each0, b1); f[3] = fma2(f[3], each1, b1);
#endif
    if (j < FAST) {
      if (j % 2 == 0) { c0 = turn0[4 * (j / 2 ^ swap0)]; c1 = turn1[4 * (j / 2 ^ swap1)]; }
      const u32 cos0 = j % 2 ? c0.z : c0.x, sin0 = j % 2 ? c0.w : c0.y, cos1 = j % 2 ? c1.z : c1.x, sin1 = j % 2 ? c1.w : c1.y;
      const u32 low0 = f[0], low1 = f[1];
      f[0] = fma2(neg2(f[2]), sin0, mul2(low0, cos0)); f[2] = fma2(f[2], cos0, mul2(low0, sin0));
      f[1] = fma2(neg2(f[3]), sin1, mul2(low1, cos1)); f[3] = fma2(f[3], cos1, mul2(low1, sin1));
    }
#pragma unroll
    for (int qt = 0; qt < QT; qt++) { const uint2 x = turned.at(qt, j); hmma(sc[qt][j % 2], f[0], f[1], f[2], f[3], x.x, x.y); }
  }
  const float far0 = (float)place0 * 0.015625f - 1.f, far1 = (float)place1 * 0.015625f - 1.f;
#pragma unroll
  for (int qt = 0; qt < QT; qt++) {
    score[qt][0] = fmaf(far0, sc[qt][0][1] + sc[qt][1][1], sc[qt][0][0] + sc[qt][1][0]);
    score[qt][1] = fmaf(far1, sc[qt][0][3] + sc[qt][1][3], sc[qt][0][2] + sc[qt][1][2]);
#if !BIAS
    score[qt][0] *= scale0; score[qt][1] *= scale1;
#endif
  }
}
