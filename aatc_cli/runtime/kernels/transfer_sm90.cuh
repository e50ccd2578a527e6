// Bulk copies to shared memory and the barriers that tell of them; a barrier of four warps; 8-bit floats.

__device__ __forceinline__ void make_barrier(u32 at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive_at(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// one lane: the barrier is passed when so many bytes, which may be none, have come
__device__ __forceinline__ void expect(u32 barrier, int size) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size) : "memory");
}
// one lane: `size` bytes from global to shared memory
__device__ __forceinline__ void bulk(u32 to, const void* from, int size, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(size),
               "r"(barrier) : "memory");
}
// waits for the phase of this parity: the first of a barrier has 0, the next 1
__device__ __forceinline__ void arrived(u32 barrier, int parity) {
  asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again;}" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void sync_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }
// pairs of float16 to pairs of e4m3 in the low half of a word, and back
__device__ __forceinline__ u32 to_e4m3(u32 a) {
  unsigned short d; asm("cvt.rn.satfinite.e4m3x2.f16x2 %0,%1;" : "=h"(d) : "r"(a)); return d;
}
__device__ __forceinline__ u32 from_e4m3(u32 a) { u32 d; asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(d) : "h"((unsigned short)a)); return d; }
