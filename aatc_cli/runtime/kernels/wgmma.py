"""The source of Hopper's warpgroup product for one number of columns: its register list depends on it."""

from __future__ import annotations

_FIXED = """\
// Warpgroup products on Hopper: four warps, 16 rows each from registers, times a matrix in shared memory, float16 sums.

__device__ __forceinline__ void arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void pending() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void share_with_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// holds registers where they are until here: products read and write them behind the compiler's back
template <int N> __device__ __forceinline__ void keep(u32 (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(r[i])::"memory");
}
// columns in lots of 8 rows of 16 bytes: the two halves of 32 channels are 128 bytes apart, the lots 256
__device__ __forceinline__ unsigned long long descriptor_of(u32 at) {
  return (unsigned long long)((at & 0x3FFFF) >> 4) | 8ull << 16 | 16ull << 32;
}
"""


def wgmma_source(lots: int) -> str:
    """CUDA of ``wgmma``: d [16 rows a warp, 16 ``lots`` columns], float16, (+)= a [16 rows, 32] ``matrix``, both e4m3.

    ADD 0 starts the sums at zero.
    """
    count = 4 * lots
    sums = ", ".join(f"%{i}" for i in range(count))
    codes = ", ".join(f"%{count + i}" for i in range(4))
    lines = [
        "template <int ADD> __device__ __forceinline__ void wgmma"
        f"(u32 (&d)[{count}], const u32 (&a)[4], unsigned long long matrix) {{"
    ]
    for add in (0, 1):
        outputs = ", ".join(f'"{"+" if add else "="}r"(d[{i}])' for i in range(count))
        lines.append(
            f"  {'else' if add else 'if constexpr (!ADD)'} asm volatile("
            f'"{{.reg .pred p; setp.ne.u32 p, {add}, 0; '
            f"wgmma.mma_async.sync.aligned.m64n{16 * lots}k32.f16.e4m3.e4m3 "
            f'{{{sums}}}, {{{codes}}}, %{count + 4}, p, 1, 1;}}"\n'
            f'    : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(matrix));'
        )
    return _FIXED + "\n".join([*lines, "}", ""])
