// Instructions and element types, for all decode kernels.

typedef unsigned int u32;
typedef unsigned char u8;
#define MAGIC_F 12582912.0f
#define FLOOR -1.0e4f
#define HIDDEN -3.0e38f

__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 d; asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 neg2(u32 a) { u32 d; asm("neg.f16x2 %0,%1;" : "=r"(d) : "r"(a)); return d; }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
__device__ __forceinline__ u32 add2(u32 a, u32 b) { u32 d; asm("add.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 max2(u32 a, u32 b) { u32 d; asm("max.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
__device__ __forceinline__ u32 pack2(float lo, float hi) { u32 d; asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(hi), "f"(lo)); return d; }
__device__ __forceinline__ float half_lo(u32 v) { float f; asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,l;}" : "=f"(f) : "r"(v)); return f; }
__device__ __forceinline__ float half_hi(u32 v) { float f; asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,h;}" : "=f"(f) : "r"(v)); return f; }
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 transpose8(u32 a) { u32 d; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(a)); return d; }

// bits under a mask, some of them turned over, in one instruction
__device__ __forceinline__ u32 masked(u32 a, u32 mask, u32 flip) {
  u32 d; asm("lop3.b32 %0,%1,%2,%3,0x6A;" : "=r"(d) : "r"(a), "r"(mask), "r"(flip)); return d;
}

// the lane, kept in a register
__device__ __forceinline__ int lane_of() { return __shfl_sync(~0u, threadIdx.x % 32, threadIdx.x % 32); }
// a number as it is here: what is made of it is not kept for the next turn of a loop
__device__ __forceinline__ int here(int a) { asm volatile("" : "+r"(a)); return a; }

__device__ __forceinline__ void hmma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void copy16(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from)); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }
__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// element e of a tensor in the model's dtype: 0 float16, 1 bfloat16, 2 float32
__device__ __forceinline__ float element(const void* p, long long e) {
#if QTYPE == 2
  return ((const float*)p)[e];
#elif QTYPE == 1
  return __uint_as_float(((u32)((const unsigned short*)p)[e]) << 16);
#else
  return half_lo((u32)((const unsigned short*)p)[e]);
#endif
}
__device__ __forceinline__ void store(void* p, long long e, float v) {
#if QTYPE == 2
  ((float*)p)[e] = v;
#elif QTYPE == 1
  unsigned short b; asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(b) : "f"(v)); ((unsigned short*)p)[e] = b;
#else
  ((unsigned short*)p)[e] = (unsigned short)(pack2(v, 0.f) & 0xFFFF);
#endif
}

// eight neighbouring elements of a row in the model's dtype
__device__ __forceinline__ void eight(float (&v)[8], const void* p, long long e) {
#if QTYPE == 2
  const float4 x = ((const float4*)p)[e / 4], y = ((const float4*)p)[e / 4 + 1];
  v[0] = x.x; v[1] = x.y; v[2] = x.z; v[3] = x.w; v[4] = y.x; v[5] = y.y; v[6] = y.z; v[7] = y.w;
#else
  const uint4 x = ((const uint4*)p)[e / 8]; const u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if QTYPE == 1
    v[2 * i] = __uint_as_float(w[i] << 16); v[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
#else
    v[2 * i] = half_lo(w[i]); v[2 * i + 1] = half_hi(w[i]);
#endif
  }
#endif
}

// two neighbouring elements of a row as they lie, of which the first is even
#if QTYPE == 2
typedef float2 Pair;
__device__ __forceinline__ float low_of(Pair v) { return v.x; }
__device__ __forceinline__ float high_of(Pair v) { return v.y; }
#else
typedef u32 Pair;
#if QTYPE == 1
__device__ __forceinline__ float low_of(Pair v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_of(Pair v) { return __uint_as_float(v & 0xFFFF0000u); }
#else
__device__ __forceinline__ float low_of(Pair v) { return half_lo(v); }
__device__ __forceinline__ float high_of(Pair v) { return half_hi(v); }
#endif
#endif
__device__ __forceinline__ Pair pair_at(const void* p, long long e) { return ((const Pair*)p)[e / 2]; }
