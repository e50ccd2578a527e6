// Codes of a record as operands: sixteen slots of sixteen tokens at a time, a lane's two rows of four columns.
//
// runtime/fused_tiles/slots.py says where they lie. An entity (of keys a quad of slots, of values a pair of channels) has up to four parts; a
// descriptor tells a lane where they are in the record, or that there is none, and where the levels are.

// uint4 of a descriptor: offsets of the parts of 4 and 2 bits, of 1 bit and the second of 4, then of up to four tables of levels
#define NO_PART 0xFFFFu

struct Parts { u32 four, more, two, one; };

// the lane's words of an entity of a wide step; `lane` counts the lanes that share it
__device__ __forceinline__ Parts wide_parts(const u8* rec, const uint4& d, int lane) {
  Parts p;
  const u32 four = d.x & 0xFFFFu, two = d.x >> 16, one = d.y & 0xFFFFu, more = d.y >> 16;
  p.four = four == NO_PART ? 0u : *(const u32*)(rec + four + 4 * lane);
  p.more = more == NO_PART ? 0u : *(const u32*)(rec + more + 4 * lane);
  p.two = two == NO_PART ? 0u : *(const unsigned short*)(rec + two + 2 * lane);
  p.one = one == NO_PART ? 0u : rec[one + lane];
  return p;
}

// four levels of one row: a table of eight float16, low bytes and then high ones, under four selectors
__device__ __forceinline__ void four_levels(u32& first, u32& second, const uint4& table, u32 select) {
  const u32 low = __byte_perm(table.x, table.y, select), high = __byte_perm(table.z, table.w, select);
  first = __byte_perm(low, high, 0x5140); second = __byte_perm(low, high, 0x7362);
}
// codes of at most three bits, whose single bits are there where `ones`: a[0], a[2] of row 0 and a[1], a[3] of row 1
template <bool ones>
__device__ __forceinline__ void narrow_levels(u32 (&a)[4], const u8* rec, const uint2& d, const uint4& table0, const uint4& table1) {
  const u32 two = *(const unsigned short*)(rec + (d.x & 0xFFFFu));
  u32 select = (two | two << 14) & 0x33333333u;
  if (ones) {
    u32 bits = rec[d.x >> 16];
    bits = (bits | bits << 12) & 0x000F000Fu;
    bits = (bits | bits << 6) & 0x03030303u;
    select |= (bits << 2 | bits << 5) & 0x44444444u;
  }
  four_levels(a[0], a[2], table0, select & 0xFFFFu);
  four_levels(a[1], a[3], table1, select >> 16);
}
// what is stored at four bits: a magnitude and a sign, which goes to the upper bit of the high byte
__device__ __forceinline__ void signed_levels(u32& first, u32& second, const uint4& table, u32 select, u32 sign) {
  const u32 low = __byte_perm(table.x, table.y, select);
  const u32 high = __byte_perm(table.z, table.w, select) ^ __byte_perm(0x00008000u, 0u, sign);
  first = __byte_perm(low, high, 0x5140); second = __byte_perm(low, high, 0x7362);
}
__device__ __forceinline__ void four_bit_levels(u32 (&a)[4], const u8* rec, const uint2& d, const uint4& table0, const uint4& table1) {
  const u32 four = *(const u32*)(rec + (d.x & 0xFFFFu)), select = four & 0x77777777u, sign = four >> 3 & 0x11111111u;
  signed_levels(a[0], a[2], table0, select & 0xFFFFu, sign & 0xFFFFu);
  signed_levels(a[1], a[3], table1, select >> 16, sign >> 16);
}
// any codes, each looked up in a table of its own: `by_row` tables of rows, or of columns
template <bool by_row>
__device__ __forceinline__ void wide_levels(u32 (&a)[4], const Parts& p, const u8* levels, const uint4& d) {
  const u32 table[4] = {d.z & 0xFFFFu, d.z >> 16, d.w & 0xFFFFu, d.w >> 16};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    u32 found[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = 16 * r + 4 * i;
      const u32 index = (p.four >> at & 15u) | (p.more >> at & 15u) << 4 | (p.two >> (4 * i + 2 * r) & 3u) << 4 | (p.one >> (4 * r + i) & 1u) << 6;
      found[i] = *(const unsigned short*)(levels + table[by_row ? r : i] + 2 * index);
    }
    a[r] = found[0] | found[1] << 16; a[2 + r] = found[2] | found[3] << 16;
  }
}

// a step of keys: rows are tokens g and g + 8, columns the slots of quad t
__device__ __forceinline__ void wide_keys(u32 (&a)[4], const u8* rec, const uint4* descriptors, const u8* levels, int lane) {
  const uint4 d = descriptors[lane % 4];
  wide_levels<false>(a, wide_parts(rec, d, lane / 4), levels, d);
}
// a step of values: rows are the channels of pair g, columns tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9
__device__ __forceinline__ void wide_values(u32 (&a)[4], const u8* rec, const uint4* descriptors, const u8* levels, int lane) {
  const uint4 d = descriptors[lane / 4];
  wide_levels<true>(a, wide_parts(rec, d, lane % 4), levels, d);
}
// a step of either that is not wide: `lanes` has a word pair for every lane; kind 0 of four bits, 1 narrow, 2 narrow with single bits
template <int kind>
__device__ __forceinline__ void small_step(u32 (&a)[4], const u8* rec, const uint2* lanes, const u8* levels, int lane) {
  const uint2 d = lanes[lane];
  const uint4 table0 = *(const uint4*)(levels + (d.y & 0xFFFFu)), table1 = *(const uint4*)(levels + (d.y >> 16));
  if (kind == 0) four_bit_levels(a, rec, d, table0, table1);
  else narrow_levels<kind == 2>(a, rec, d, table0, table1);
}
// a token scale of eight bits, as core/scales.py rounds it
__device__ __forceinline__ float token_scale(u32 code) { return code ? half_lo(pack2(ex2(((float)code - 128.f) * 0.0625f), 0.f)) : 0.f; }
