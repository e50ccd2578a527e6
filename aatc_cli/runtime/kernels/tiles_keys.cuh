// Scores of sixteen tokens of a class: digits of keys as 8-bit floats times the rows of their digits.
//
// A byte below sixteen is an e4m3 number, itself times 2^-9, and its highest bit a sign: digits are stored as signs and magnitudes from their middle, so
// that sums begin at zero. runtime/fused_tiles/digits.py says where they lie.

// what is the same for all tiles of a program: its form, steps of its matrix, where in a record digits begin, where in a tile records do, their bytes
// and number
struct Class { int form, matrix, keys2, keys1, values4, values2, values1, start, size, blocks; };

// forms, of keys and of values: how many steps of 32 digits of 4, 2 and 1 bits there are, as one number. There is a walk for each pair of them
template <int... forms> struct Forms {
  static constexpr int count = sizeof...(forms);
  __device__ static constexpr int at(int place) {
    int found = 0, n = 0;
    ((found = n++ == place ? forms : found), ...);
    return found;
  }
};
typedef Forms<KEY_FORMS> KeyForms;
typedef Forms<VALUE_FORMS> ValueForms;
template <int form> struct Form {
  static constexpr int fours = form / 4096, twos = form / 64 % 64, ones = form % 64, steps = fours + twos + ones;
};
template <int n> struct At { static constexpr int place = n; };
// act for the forms at `place`, found by halves
template <int first, int count, class Act> __device__ __forceinline__ void by_place(int place, const Act& act) {
  if constexpr (count == 1) act(At<first>());
  else if (place < first + count / 2) by_place<first, count / 2>(place, act);
  else by_place<first + count / 2, count - count / 2>(place, act);
}

// tables in shared memory
struct Walk {
  u32 matrix;
  const uint2* queries;
  const uint4* turns;
  const float* scales;
  const u32* bias;
  u32 flips[2];
};
// queries of a pair of tiles: in registers, or a lane's own in shared memory
struct Turned {
  uint2 registers[PAIRED ? LOTS : 1];
  uint2* shared;
  __device__ __forceinline__ uint2 at(int ot, int n) const { return PAIRED ? registers[PAIRED ? n : 0] : shared[(ot * OPERANDS + n) * 32]; }
};
// the lot of operand n, and the query of score n of a lane
__device__ __forceinline__ int lot_of(int n) { return n < LOTS ? n : n - LOTS + FAST; }
__device__ __forceinline__ int head_of(int n, int t) { return PAIRED ? t : 8 * (n / 2) + 2 * t + n % 2; }

// a token scale of eight bits, as core/scales.py rounds it
__device__ __forceinline__ float token_scale(u32 code) { return code ? half_lo(pack2(ex2(((float)code - 128.f) * 0.0625f), 0.f)) : 0.f; }

// columns are queries and, of pairs that turn little, slopes by the angle of 64 tokens: with at most four queries in turn, else in operands of their own
__device__ __forceinline__ void fill_queries(uint2* queries, const Shape& s, const void* q, const float* pair_scale, const float* slopes) {
  for (int i = threadIdx.x; i < QUERIES; i += THREADS) {
    const int lane = i % 32, column = lane / 4, n = i / 32 % OPERANDS, j = lot_of(n), pair = 8 * j + 2 * (lane % 4);
    const int head = PAIRED ? column / 2 : i / (OPERANDS * 32) * 8 + column;
    uint2 found = make_uint2(0u, 0u);
    const bool slope = PAIRED ? column % 2 : n >= LOTS;
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
  for (int n = 0; n < OPERANDS; n++) {
    const uint2 turn = turns[4 * lot_of(n) + lane % 4];
#pragma unroll
    for (int ot = 0; ot < OT; ot++) {
      const uint2 x = w.queries[(ot * OPERANDS + n) * 32 + lane];
      const uint2 found = make_uint2(fma2(x.y, turn.y, mul2(x.x, turn.x)), fma2(neg2(x.x), turn.y, mul2(x.y, turn.x)));
      if (PAIRED) turned.registers[PAIRED ? n : 0] = found;
      else turned.shared[(ot * OPERANDS + n) * 32] = found;
    }
  }
}

// digits less their middle, times minus two, eight and 24: words under a mask with what is turned over, which stays in registers
__device__ __forceinline__ void four_bits(u32 (&a)[4], uint2 x, const u32 (&flips)[2]) {
  a[0] = masked(x.x, 0x8E8E8E8Eu, flips[1]); a[1] = masked(x.x << 7, 0x80808080u, masked(x.x >> 3, 0x0E0E0E0Eu, flips[1]));
  a[2] = masked(x.y, 0x8E8E8E8Eu, flips[1]); a[3] = masked(x.y << 7, 0x80808080u, masked(x.y >> 3, 0x0E0E0E0Eu, flips[1]));
}
__device__ __forceinline__ void narrow_bits(u32 (&a)[4], u32 w, u32 mask, const u32 (&flips)[2]) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = masked(w << i, mask, flips[0]);
}

// places of tokens g and g + 8 in a pair of tiles
struct Near { int place0, place1; };
__device__ __forceinline__ Near near_of(const u8* rec, int first, int lane) { return Near{first + rec[lane / 4], first + rec[lane / 4 + 8]}; }

// words of step i of a form, of one bit those of the next step too; two lanes share those of an odd last step
template <int form> __device__ __forceinline__ uint2 key_words(const u8* rec, const Class& c, int lane, int i) {
  const int t = lane % 4, mine = 8 * t + lane / 4;
  constexpr int fours = Form<form>::fours, narrow = fours + Form<form>::twos;
  if (i < fours) return *(const uint2*)(rec + HEADER + 8 * mine + 256 * i);
  if (i < narrow) return make_uint2(*(const u32*)(rec + here(c.keys2) + 4 * mine + 128 * (i - fours)), 0u);
  const u8* ones = rec + here(c.keys1) + 64 * (i - narrow);
  if (i + 1 < Form<form>::steps) return make_uint2(*(const u32*)(ones + 4 * mine), 0u);
  return make_uint2(*(const u32*)(ones + 4 * (8 * (t / 2) + lane / 4)) << 4 * (t % 2), 0u);
}
// products of all steps of a form of some records, two under way at a time and words of two steps read ahead; what is done `beside` comes in as many
// parts
template <int form, class Beside>
__device__ __forceinline__ void multiply(u32 (&sum)[RECORDS][4 * LOTS], const u8* const (&rec)[RECORDS], const Walk& w, const Class& c, int lane,
                                         const Beside& beside) {
  constexpr int fours = Form<form>::fours, narrow = fours + Form<form>::twos, steps = Form<form>::steps;
  uint2 words[RECORDS][3];
  u32 operands[2][4];
  const auto own_words = [&](int i) { return i < steps && (i < narrow || (i - narrow) % 2 == 0); };  // of two steps of one bit the first has them
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int r = 0; r < RECORDS; r++) if (own_words(i)) words[r][i] = key_words<form>(rec[r], c, lane, i);
#pragma unroll
  for (int i = 0; i < steps; i++)
#pragma unroll
    for (int r = 0; r < RECORDS; r++) {
      u32 (&a)[4] = operands[(i * RECORDS + r) % 2];
      if (i * RECORDS + r > 1) { pending<1>(); keep(a); }
      const uint2 x = words[r][own_words(i) ? i % 3 : (i + 2) % 3];
      if (i < fours) four_bits(a, x, w.flips); else if (i < narrow) narrow_bits(a, x.x, 0x88888888u, w.flips);
      else narrow_bits(a, own_words(i) ? x.x : x.x << 4, 0x80808080u, w.flips);
      arrive();
      const unsigned long long rows = MATRIX_FORM | (w.matrix + (i < fours ? i : fours + i) * STEP);
      if (i == 0) wgmma<0>(sum[r], a, rows); else wgmma<1>(sum[r], a, rows);
      // rows of digits of four bits are sums of two
      if (i < fours) wgmma<1>(sum[r], a, MATRIX_FORM | (w.matrix + (fours + i) * STEP));
      close_group();
      if (own_words(i + 2)) words[r][(i + 2) % 3] = key_words<form>(rec[r], c, lane, i + 2);
      beside(i * RECORDS + r, steps * RECORDS);
    }
  if (steps == 0) beside(0, 1);
  pending<0>();
  if (steps > 0) keep(operands[0]);
  if (steps * RECORDS > 1) keep(operands[1]);
#pragma unroll
  for (int r = 0; r < RECORDS; r++) {
#pragma unroll
    for (int i = 0; i < 4 * LOTS; i++) if (steps == 0) sum[r][i] = 0u;
    keep(sum[r]);
  }
}
// the turns of a place: two lots lie together, which of neighbouring places are in turn in either half of the banks
__device__ __forceinline__ int turn_of(int place) { return place * TURN_ROW + (TURN_ROW % 8 ? 0 : 4 * (place % 2)); }
__device__ __forceinline__ int lots_of(int turn, int j) { return TURN_ROW % 8 ? turn + 4 * (j / 2) : (j / 2 % 2 ? turn ^ 4 : turn) + 8 * (j / 4); }
// scores of tokens g and g + 8
__device__ __forceinline__ void scores_of(float (&score)[QT][2], const u32 (&sum)[4 * LOTS], const Walk& w, const Near& near, const u8* rec, const Turned& turned,
                                          int lane) {
  const int g = lane / 4, t = lane % 4, place0 = near.place0, place1 = near.place1;
  const int turn0 = turn_of(place0) + t, turn1 = turn_of(place1) + t;
  uint4 c0, c1;
  const float scale0 = w.scales[rec[16 + g]], scale1 = w.scales[rec[24 + g]];
#if BIAS
  const u32 each0 = pack2(scale0, scale0), each1 = pack2(scale1, scale1);
#endif
  float sc[OT][2][4], slope[OT][4];  // of even and of odd lots: chains of half the length
#pragma unroll
  for (int ot = 0; ot < OT; ot++)
#pragma unroll
    for (int e = 0; e < 4; e++) { sc[ot][0][e] = 0.f; sc[ot][1][e] = 0.f; slope[ot][e] = 0.f; }
#pragma unroll
  for (int j = 0; j < LOTS; j++) {
    u32 f[4] = {sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]};
#if BIAS
    const u32 b0 = w.bias[4 * j + t], b1 = w.bias[D / 4 + 4 * j + t];
    f[0] = fma2(f[0], each0, b0); f[1] = fma2(f[1], each1, b0); f[2] = fma2(f[2], each0, b1); f[3] = fma2(f[3], each1, b1);
#endif
    if (j < FAST) {
      if (j % 2 == 0) { c0 = w.turns[lots_of(turn0, j)]; c1 = w.turns[lots_of(turn1, j)]; }
      const u32 cos0 = j % 2 ? c0.z : c0.x, sin0 = j % 2 ? c0.w : c0.y, cos1 = j % 2 ? c1.z : c1.x, sin1 = j % 2 ? c1.w : c1.y;
      const u32 low0 = f[0], low1 = f[1];
      f[0] = fma2(neg2(f[2]), sin0, mul2(low0, cos0)); f[2] = fma2(f[2], cos0, mul2(low0, sin0));
      f[1] = fma2(neg2(f[3]), sin1, mul2(low1, cos1)); f[3] = fma2(f[3], cos1, mul2(low1, sin1));
    }
#pragma unroll
    for (int ot = 0; ot < OT; ot++) {
      const uint2 x = turned.at(ot, j);
      hmma(sc[ot][j % 2], f[0], f[1], f[2], f[3], x.x, x.y);
      if (PAIRED || j < FAST) continue;
      const uint2 y = turned.at(ot, LOTS + j - FAST);
      hmma(slope[ot], f[0], f[1], f[2], f[3], y.x, y.y);
    }
  }
  const float far0 = (float)near.place0 * 0.015625f - 1.f, far1 = (float)near.place1 * 0.015625f - 1.f;
#pragma unroll
  for (int qt = 0; qt < QT; qt++) {
    const float (&a)[4] = sc[qt / 2][0], (&b)[4] = sc[qt / 2][1];
    const int e = qt % 2;
    score[qt][0] = fmaf(far0, PAIRED ? a[1] + b[1] : slope[qt / 2][e], a[e] + b[e]);
    score[qt][1] = fmaf(far1, PAIRED ? a[3] + b[3] : slope[qt / 2][2 + e], a[2 + e] + b[2 + e]);
#if !BIAS
    score[qt][0] *= scale0; score[qt][1] *= scale1;
#endif
  }
}
