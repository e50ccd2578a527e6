// Values of sixteen tokens of a class: digits times softmax weights, summed digit by digit.
//
// A field of digits in the low byte of a half is, read as float16, itself times 2^-24: products take it as it lies under a mask. Rows of a product
// are digits, whose sums are put together with what each counts at the end (tiles_merge.cuh).

// of the queries of a lane: the reference of the weights, their sum, and that with value scales; sums of digits by steps
#define WEIGHTS (PAIRED ? 2 : OT)   // operands of weights
struct Sums { float o[VS > 0 ? VS : 1][SETS][4], reference[QT], weight[QT], mass[QT]; };

__device__ __forceinline__ void clear(Sums& s) {
#pragma unroll
  for (int qt = 0; qt < QT; qt++) { s.reference[qt] = FLOOR; s.weight[qt] = 0.f; s.mass[qt] = 0.f; }
#pragma unroll
  for (int i = 0; i < VS; i++)
#pragma unroll
    for (int n = 0; n < SETS; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s.o[i][n][e] = 0.f;
}

// the reference of the weights moves only where one would be large
template <int steps> __device__ __forceinline__ void move_reference(const float (&sc)[RECORDS][QT][2], Sums& s) {
  bool large = false;
  float most[QT];
#pragma unroll
  for (int qt = 0; qt < QT; qt++) {
    most[qt] = fmaxf(sc[0][qt][0], sc[0][qt][1]);
#pragma unroll
    for (int r = 1; r < RECORDS; r++) most[qt] = fmaxf(most[qt], fmaxf(sc[r][qt][0], sc[r][qt][1]));
    large |= most[qt] > s.reference[qt] + MOVE;
  }
  if (!__any_sync(~0u, large)) return;
  float f[QT];
#pragma unroll
  for (int qt = 0; qt < QT; qt++) {
    float top = fmaxf(s.reference[qt], most[qt]);
#pragma unroll
    for (int n = 4; n < 32; n <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, n));
    f[qt] = ex2(s.reference[qt] - top);
    s.reference[qt] = top; s.weight[qt] *= f[qt]; s.mass[qt] *= f[qt];
  }
#pragma unroll
  for (int i = 0; i < steps; i++)
#pragma unroll
    for (int n = 0; n < SETS; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s.o[i][n][e] *= f[PAIRED ? 0 : n / 2 * 2 + e % 2];
}
// scores become softmax weights times value scales, as operands
__device__ __forceinline__ void weigh(u32 (&b)[WEIGHTS][2], const float (&sc)[QT][2], Sums& s, const Walk& w, const u8* rec, int lane) {
  const float scale0 = w.scales[rec[32 + lane / 4]], scale1 = w.scales[rec[40 + lane / 4]];
  float p0[QT], p1[QT];
#pragma unroll
  for (int qt = 0; qt < QT; qt++) {
    const float e0 = ex2(sc[qt][0] - s.reference[qt]), e1 = ex2(sc[qt][1] - s.reference[qt]);
    p0[qt] = e0 * scale0; p1[qt] = e1 * scale1;
    s.weight[qt] += e0 + e1; s.mass[qt] += p0[qt] + p1[qt];
  }
#if PAIRED
  // of the first block of a step in even columns and of the second in odd ones
  const u32 x0 = transpose8(pack2(p0[0], p0[0])), x1 = transpose8(pack2(p1[0], p1[0]));
  const bool odd = lane / 4 % 2;
  b[0][0] = odd ? 0u : x0; b[0][1] = odd ? 0u : x1; b[1][0] = odd ? x0 : 0u; b[1][1] = odd ? x1 : 0u;
#else
#pragma unroll
  for (int ot = 0; ot < OT; ot++) {
    b[ot][0] = transpose8(pack2(p0[2 * ot], p0[2 * ot + 1])); b[ot][1] = transpose8(pack2(p1[2 * ot], p1[2 * ot + 1]));
  }
#endif
}

// sixteen digits, the `block` of a step: rows under `mask` and `above` of w are tokens 2 t and 2 t + 1, of v those 8 further on
__device__ __forceinline__ void take_digits(float (&o)[SETS][4], int block, u32 w, u32 v, u32 mask, u32 above, const u32 (&b)[WEIGHTS][2]) {
  const u32 a0 = w & mask, a1 = w & above, a2 = v & mask, a3 = v & above;
#pragma unroll
  for (int ot = 0; ot < OT; ot++) {
    const int of = PAIRED ? block : ot;
    hmma(o[PAIRED ? 0 : 2 * ot + block], a0, a1, a2, a3, b[of][0], b[of][1]);
  }
}
// values of sixteen tokens of a form: words as they lie and weights, with which they are multiplied beside the products of the next keys. A word of one
// bit is of two steps, and of an odd last step of two lanes
template <int form> struct Values {
  static constexpr int fours = Form<form>::fours, twos = Form<form>::twos, ones = Form<form>::ones, steps = Form<form>::steps;
  static constexpr int count = 2 * fours + twos + (ones + 1) / 2;
  u32 words[count > 0 ? count : 1], weights[WEIGHTS][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < count; i++) words[i] = 0u;
    weigh_nothing();
  }
  __device__ __forceinline__ void weigh_nothing() {
#pragma unroll
    for (int i = 0; i < WEIGHTS; i++) { weights[i][0] = 0u; weights[i][1] = 0u; }
  }
  __device__ __forceinline__ void read(const Class& c, const u8* rec, int lane) {
    const u8* at = rec + 4 * lane;
#pragma unroll
    for (int i = 0; i < 2 * fours; i++) words[i] = *(const u32*)(at + here(c.values4) + 128 * i);
#pragma unroll
    for (int i = 0; i < twos; i++) words[2 * fours + i] = *(const u32*)(at + here(c.values2) + 128 * i);
#pragma unroll
    for (int i = 0; i < ones / 2; i++) words[2 * fours + twos + i] = *(const u32*)(at + here(c.values1) + 128 * i);
    if (ones % 2) {
      const int g = lane / 4, shared = 4 * (g / 2) + lane % 4;
      words[count - 1] = *(const u32*)(rec + here(c.values1) + 64 * (ones - 1) + 4 * shared) >> 4 * (g % 2);
    }
  }
  // a share of the products: a block of every step before the other, so that none waits for the one before
  __device__ __forceinline__ void take(Sums& s, int share, int shares) const {
#pragma unroll
    for (int n = 0; n < 2 * steps; n++) {
      if (n < 2 * steps * share / shares || n >= 2 * steps * (share + 1) / shares) continue;
      const int block = n >= steps, i = n - block * steps, of_one = i - fours - twos;
      const u32 x = words[i < fours ? 2 * i + block : i < fours + twos ? fours + i : 2 * fours + twos + of_one / 2];
      const u32 mask = i < fours ? 0x000F000Fu : i < fours + twos ? 0x00030003u << 4 * block : 0x00010001u << (2 * block + 4 * (of_one % 2));
      take_digits(s.o[i], block, x, x >> 8, mask, mask << (i < fours ? 4 : i < fours + twos ? 2 : 1), weights);
    }
  }
};
