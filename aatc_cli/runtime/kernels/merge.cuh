// Partial results: of the warps of a program, then of the programs of a head, by the last of them.

// warps of this program; partial sums of latents, maxima and sums of weights go to part and stat
__device__ __forceinline__ void merge_warps(const Shape& s, const int (&o)[HT][NB][4], float (&mref)[HT], float (&l)[HT], float (&lv)[HT],
                                            u8* smem, float* part, float* stat, int split) {
  const int h = blockIdx.y, b = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, threads = NW * 32;
#pragma unroll
  for (int ht = 0; ht < HT; ht++)
#pragma unroll
    for (int n = 4; n < 32; n <<= 1) { l[ht] += __shfl_xor_sync(~0u, l[ht], n); lv[ht] += __shfl_xor_sync(~0u, lv[ht], n); }
  __syncthreads();
  float* sums = (float*)smem;                 // [NW][G][D]
  float* stats = sums + NW * G * D;           // [NW][4 HT][3]
#pragma unroll
  for (int ht = 0; ht < HT; ht++) {
    const int head = ht * 4 + t;
    if (g == 0) {
      float* to_stat = stats + (warp * 4 * HT + head) * 3;
      to_stat[0] = mref[ht]; to_stat[1] = l[ht]; to_stat[2] = lv[ht];
    }
    if (head < G) {
#pragma unroll
      for (int i = 0; i < NB; i++) {
        // upper and lower bytes of the weights have their own sums
        sums[(warp * G + head) * D + 16 * i + g] = fmaf((float)o[ht][i][0], 256.f, (float)o[ht][i][1]);
        sums[(warp * G + head) * D + 16 * i + g + 8] = fmaf((float)o[ht][i][2], 256.f, (float)o[ht][i][3]);
      }
    }
  }
  __syncthreads();
  const long long out = ((long long)(b * s.heads + h) * (s.splits + s.exact) + split) * G;
  for (int i = threadIdx.x; i < G * D; i += threads) {
    const int head = i / D;
    float top = FLOOR, total = 0.f, sum_l = 0.f, sum_v = 0.f;
#pragma unroll
    for (int w = 0; w < NW; w++) top = fmaxf(top, stats[(w * 4 * HT + head) * 3]);
#pragma unroll
    for (int w = 0; w < NW; w++) {
      const float* from_stat = stats + (w * 4 * HT + head) * 3;
      const float f = ex2(from_stat[0] - top);
      total += f * sums[w * G * D + i]; sum_l += f * from_stat[1]; sum_v += f * from_stat[2];
    }
    part[out * D + i] = total;
    if (i % D == 0) { stat[(out + head) * 3] = top; stat[(out + head) * 3 + 1] = sum_l; stat[(out + head) * 3 + 2] = sum_v; }
  }
}


// after the partial result of this program is in part and stat: the last program of a head merges them all, decodes the summed latents once
// and adds the exact parts. `arrivals` counts programs of a head and is zero again at the end
__device__ __forceinline__ void finish(const Shape& s, const float* part, const float* stat, const u32* decode, const float* offset, int* arrivals,
                                       void* out, u8* smem) {
  const int h = blockIdx.y, b = blockIdx.x, threads = NW * 32, parts = s.splits + s.exact;
  float* latent = (float*)smem;           // [G][D]
  float* near = latent + G * D;           // [G][D]
  float* value = near + G * D;            // [groups][G][D]
  float* share = value + NW * 64 * G;     // [parts][G] what a part's sums count
  float* total = share + parts * G;       // [G][2] sums of weights, of weights times value scales
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrivals + b * s.heads + h, 1) == gridDim.z - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const long long row = (long long)(b * s.heads + h) * parts * G;
  // a thread has two dimensions and every group-th channel, which are fetched before anything else is known
  constexpr int groups = NW * 64 / D, each = (D + groups - 1) / groups;
  const int pair = threadIdx.x % (D / 2), mine = threadIdx.x / (D / 2);
  u32 matrix[each];
#pragma unroll
  for (int n = 0; n < each; n++) {
    const int c = mine + n * groups;
    matrix[n] = mine < groups && c < D ? decode[((long long)h * D + c) * (D / 2) + pair] : 0u;
  }
  for (int g = threadIdx.x / 32; g < G; g += NW) {
    const int lane = threadIdx.x % 32;
    float top = FLOOR, sum = 0.f, sum_v = 0.f;
    for (int i = lane; i < parts; i += 32) {
      const float* from = stat + (row + i * G + g) * 3;
      const float reference = __ldcg(from), more = __ldcg(from + 1), more_v = __ldcg(from + 2);
      const float now = fmaxf(top, reference), old = ex2(top - now), f = ex2(reference - now);
      top = now; sum = old * sum + f * more; sum_v = old * sum_v + f * more_v;
      share[i * G + g] = reference;
    }
    float most = top;
#pragma unroll
    for (int n = 16; n; n >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, n));
    for (int i = lane; i < parts; i += 32) share[i * G + g] = ex2(share[i * G + g] - most);
    sum *= ex2(top - most); sum_v *= ex2(top - most);
#pragma unroll
    for (int n = 16; n; n >>= 1) { sum += __shfl_xor_sync(~0u, sum, n); sum_v += __shfl_xor_sync(~0u, sum_v, n); }
    if (lane == 0) { total[2 * g] = sum; total[2 * g + 1] = sum_v; }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += threads) {
    const int g = i / D;
    float far = 0.f, exact = 0.f;
#pragma unroll 8
    for (int n = 0; n < s.splits; n++) far += share[n * G + g] * __ldcg(part + (row + n * G) * D + i);
#pragma unroll 4
    for (int n = s.splits; n < parts; n++) exact += share[n * G + g] * __ldcg(part + (row + n * G) * D + i);
    latent[i] = far * VALUE_SCALE; near[i] = exact;
  }
  __syncthreads();
  if (mine < groups) {
    float v0[G], v1[G];
#pragma unroll
    for (int g = 0; g < G; g++) { v0[g] = 0.f; v1[g] = 0.f; }
#pragma unroll
    for (int n = 0; n < each; n++) {
      const float x = half_lo(matrix[n]), y = half_hi(matrix[n]);
      const int c = min(mine + n * groups, D - 1);
#pragma unroll
      for (int g = 0; g < G; g++) { v0[g] += latent[g * D + c] * x; v1[g] += latent[g * D + c] * y; }
    }
#pragma unroll
    for (int g = 0; g < G; g++) *(float2*)(value + (mine * G + g) * D + 2 * pair) = make_float2(v0[g], v1[g]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += threads) {
    const int g = i / D;
    float v = near[i] - total[2 * g + 1] * offset[h * D + i % D];
    for (int n = 0; n < groups; n++) v += value[n * G * D + i];
    store(out, (long long)(b * s.heads + h) * G * D + i, v / total[2 * g]);
  }
  if (threadIdx.x == 0) arrivals[b * s.heads + h] = 0;
}
