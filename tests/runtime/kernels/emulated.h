// Enough of CUDA to run a kernel of up to four warpgroups a program on a CPU: lanes are fibers, and what they do together is a meeting of them.
// Programs run one after another. Half precision is _Float16; products add in float32 and, of warpgroups, round to half a step at a time.

#include <map>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

typedef unsigned int u32;
typedef unsigned char u8;
using std::max;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n)
#define FLOOR -1.0e4f
#define HIDDEN -3.0e38f

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
struct Dim { int x, y, z; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }

static const int LANES = 32 * NW, SHARED = 232448;
alignas(128) static u8 smem[SHARED];
static Dim blockIdx, gridDim;
struct Fiber { ucontext_t context; Dim tid; bool done; };
static Fiber fibers[LANES];
static ucontext_t scheduler;
static int current;
#define threadIdx (fibers[current].tid)

static void yield() { swapcontext(&fibers[current].context, &scheduler); }
struct Meeting { int waiting = 0, round = 0; };
static Meeting of_warp[LANES / 32], of_all;
static void meet(Meeting& m, int count) {
  const int round = m.round;
  if (++m.waiting == count) { m.waiting = 0; m.round++; return; }
  while (m.round == round) yield();
}
static void __syncwarp() { meet(of_warp[current / 32], 32); }
static void __syncthreads() { meet(of_all, LANES); }
static void __threadfence() {}

// what the lanes of a warp show each other
static u32 shown[LANES][8];
static u32* show(int place) { return shown[current / 32 * 32 + place]; }
static u32* mine() { return shown[current]; }
static float as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
static u32 as_bits(float f) { u32 v; memcpy(&v, &f, 4); return v; }
template <class T> static T exchange(T v, int from) {
  memcpy(mine(), &v, 4); __syncwarp();
  T found; memcpy(&found, show(from), 4); __syncwarp();
  return found;
}
template <class T> static T __shfl_xor_sync(u32, T v, int mask) { return exchange(v, current % 32 ^ mask); }
template <class T> static T __shfl_sync(u32, T v, int from) { return exchange(v, from); }
static bool __any_sync(u32, bool v) {
  mine()[0] = v; __syncwarp();
  bool found = false;
  for (int i = 0; i < 32; i++) found |= show(i)[0] != 0;
  __syncwarp();
  return found;
}
static int atomicAdd(int* at, int v) { const int old = *at; *at += v; return old; }
template <class T> static T __ldcg(const T* at) { return *at; }

static int lane_of() { return current % 32; }
static int here(int a) { return a; }
static u32 masked(u32 a, u32 mask, u32 flip) { return a & mask ^ flip; }
static float of_half(u32 bits) { unsigned short s = (unsigned short)bits; _Float16 h; memcpy(&h, &s, 2); return (float)h; }
static u32 to_half(float f) { _Float16 h = (_Float16)f; unsigned short s; memcpy(&s, &h, 2); return s; }
static float half_lo(u32 v) { return of_half(v & 0xFFFF); }
static float half_hi(u32 v) { return of_half(v >> 16); }
static u32 pack2(float lo, float hi) { return to_half(lo) | to_half(hi) << 16; }
static u32 mul2(u32 a, u32 b) { return pack2(half_lo(a) * half_lo(b), half_hi(a) * half_hi(b)); }
static u32 neg2(u32 a) { return a ^ 0x80008000u; }
static u32 fma2(u32 a, u32 b, u32 c) { return pack2(fmaf(half_lo(a), half_lo(b), half_lo(c)), fmaf(half_hi(a), half_hi(b), half_hi(c))); }
static float ex2(float x) { return exp2f(x); }
static u32 __byte_perm(u32 x, u32 y, u32 select) {
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    const u32 n = select >> 4 * i & 15u;
    if (n & 8u) { fprintf(stderr, "a selector with its sign bit\n"); abort(); }
    out |= ((n & 4u ? y : x) >> 8 * (n & 3u) & 255u) << 8 * i;
  }
  return out;
}
// 8 x 8 elements of 16 bits: lane (g, t) has row g, columns 2 t and 2 t + 1
static u32 transpose8(u32 a) {
  mine()[0] = a; __syncwarp();
  const int g = current % 32 / 4, t = current % 4;
  const auto at = [&](int row, int column) { return show(4 * row + column / 2)[0] >> 16 * (column % 2) & 0xFFFFu; };
  const u32 out = at(2 * t, g) | at(2 * t + 1, g) << 16;
  __syncwarp();
  return out;
}
// element (row, k) of the left operand that the lanes of a warp have shown in their first four words
static float left(int row, int k) {
  const u32 word = show(4 * (row % 8) + k % 8 / 2)[row / 8 + k / 8 * 2];
  return of_half(word >> 16 * (k % 2) & 0xFFFFu);
}
static void hmma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 all[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(mine(), all, sizeof all); __syncwarp();
  const int g = current % 32 / 4, t = current % 4;
  for (int e = 0; e < 4; e++) {
    const int row = g + e / 2 * 8, column = 2 * t + e % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; k++) sum += left(row, k) * of_half(show(4 * column + k % 8 / 2)[4 + k / 8] >> 16 * (k % 2) & 0xFFFFu);
    c[e] += sum;
  }
  __syncwarp();
}
static void arrive() {}
static void close_group() {}
template <int N> static void pending() {}
template <int N> static void keep(u32 (&)[N]) {}
static void share_with_tensor_cores() {}
static u32 address(const void* p) { return (u32)((const u8*)p - smem); }
static unsigned long long descriptor_of(u32 at) { return at >> 4; }
static float of_e4m3(u8 b) {
  const int exponent = b >> 3 & 15, mantissa = b & 7;
  if ((b & 127) == 127) { fprintf(stderr, "not a number\n"); abort(); }
  const float size = exponent ? ldexpf(8.f + mantissa, exponent - 10) : ldexpf((float)mantissa, -9);
  return b & 128 ? -size : size;
}
// d (+)= a matrix: 32 columns of 8-bit floats by as many rows; a lane shows rows g and g + 8, columns 4 t .. and 16 + 4 t ..
template <int ADD, int N> static void wgmma(u32 (&d)[N], const u32 (&a)[4], unsigned long long matrix) {
  memcpy(mine(), a, sizeof a); __syncwarp();
  const int g = current % 32 / 4, t = current % 4;
  float rows[2][32];
  for (int r = 0; r < 2; r++)
    for (int k = 0; k < 32; k++) rows[r][k] = of_e4m3(show(4 * g + k % 16 / 4)[r + k / 16 * 2] >> 8 * (k % 4) & 255u);
  for (int i = 0; i < N; i++) {
    float sum[2];
    for (int e = 0; e < 2; e++) {
      sum[e] = ADD ? of_half(d[i] >> 16 * e & 0xFFFFu) : 0.f;
      const u8* b = smem + 16 * (matrix & 0x3FFF) + i / 2 * 256 + (2 * t + e) * 16;
      for (int k = 0; k < 32; k++) if (rows[i % 2][k] != 0.f) sum[e] += rows[i % 2][k] * of_e4m3(b[k / 16 * 128 + k % 16]);
    }
    d[i] = pack2(sum[0], sum[1]);
  }
  __syncwarp();
}
struct Barrier { short phase, arrived; int bytes; };
static Barrier& barrier_at(u32 at) { return *(Barrier*)(smem + at); }
// barriers of a program as they should be: a program may write nothing else over them, from their making to its end
static std::map<u32, Barrier> made;
static int written_over;
static void settle(u32 at) { Barrier& b = barrier_at(at); if (b.arrived && !b.bytes) { b.phase++; b.arrived = 0; } made[at] = b; }
static void make_barrier(u32 at, int) { barrier_at(at) = {0, 0, 0}; settle(at); }
static void expect(u32 at, int size) { barrier_at(at).arrived = 1; barrier_at(at).bytes += size; settle(at); }
static void count_written_over() {
  for (const auto& [at, b] : made) written_over += memcmp(&b, smem + at, sizeof b) != 0;
  made.clear();
}
static void bulk(u32 to, const void* from, int size, u32 at) {
  if (to % 16 || (uintptr_t)from % 16 || size % 16 || to + size > SHARED) { fprintf(stderr, "a bulk copy of %d to %u\n", size, to); abort(); }
  memcpy(smem + to, from, size);
  barrier_at(at).bytes -= size; settle(at);
}
static void arrived(u32 at, int parity) { while ((barrier_at(at).phase & 1) == parity) yield(); }

static float element(const void* p, long long e) { return ((const float*)p)[e]; }
static void store(void* p, long long e, float v) { ((float*)p)[e] = v; }
static void eight(float (&v)[8], const void* p, long long e) { memcpy(v, (const float*)p + e, sizeof v); }
typedef float2 Pair;
static float low_of(Pair v) { return v.x; }
static float high_of(Pair v) { return v.y; }
static Pair pair_at(const void* p, long long e) { return ((const Pair*)p)[e / 2]; }

static void (*body)();
static void enter() { body(); fibers[current].done = true; yield(); }
// every program of the grid, its lanes in turn until all are done
static void run_grid(int x, int y, int z, void (*kernel)()) {
  static char* stacks = (char*)malloc((size_t)LANES << 17);
  body = kernel; gridDim = {x, y, z};
  for (int n = 0; n < x * y * z; n++) {
    blockIdx = {n % x, n / x % y, n / (x * y)};
    memset(smem, 0xFF, SHARED);
    for (int i = 0; i < LANES; i++) {
      getcontext(&fibers[i].context);
      fibers[i].context.uc_stack.ss_sp = stacks + ((size_t)i << 17); fibers[i].context.uc_stack.ss_size = 1 << 17;
      fibers[i].context.uc_link = &scheduler; fibers[i].tid = {i, 0, 0}; fibers[i].done = false;
      makecontext(&fibers[i].context, enter, 0);
    }
    for (bool left_over = true; left_over;) {
      left_over = false;
      for (current = 0; current < LANES; current++)
        if (!fibers[current].done) { swapcontext(&scheduler, &fibers[current].context); left_over |= !fibers[current].done; }
    }
    count_written_over();
  }
}
