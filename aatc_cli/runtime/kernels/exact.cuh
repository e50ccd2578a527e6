// a share of the exact tokens (sinks and window) of one sequence and head: its partial lies in model space
__device__ void exact_part(const Shape& s, int share, const void* q, const void* keys, const void* values, const float* angles,
                           const int* tokens, const int* tiles, const int* hidden, float* part, float* stat, u8* smem) {
  const int h = blockIdx.y, b = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = NW * 32;
  const int total = tokens[b], packed = 64 * tiles[b], first = hidden[b];
  const int sinks = min(total, s.sinks), recent = max(total - s.sinks - packed, 0), all = sinks + recent;
  const int begin = all * share / s.exact, count = all * (share + 1) / s.exact - begin;
  float* query = (float*)smem;              // [G][D]
  float* sums = query + G * D;              // [token groups][G][D]
  int* slot_of = (int*)(sums + (2 * NW * 32 / (D / 2) + 1) * G * D);  // [count]
  float* score = (float*)(slot_of + s.slots);                         // [count][G]
  for (int i = threadIdx.x; i < G * D; i += threads)
    query[i] = element(q, ((long long)(b * s.heads + h) * G) * D + i) * s.scaling;
  for (int i = threadIdx.x; i < count; i += threads) {
    const int n = begin + i;
    slot_of[i] = n < sinks ? n : s.sinks + (packed + n - sinks) % s.ring;
  }
  __syncthreads();
  // eight lanes share a token: four tokens a warp at once
  for (int i = warp * 4 + lane / 8; i < (count + 3) / 4 * 4; i += NW * 4) {
    float dot[G];
#pragma unroll
    for (int g = 0; g < G; g++) dot[g] = 0.f;
    if (i < count) {
      const int slot = slot_of[i];
      const long long row = ((long long)(b * s.slots + slot) * s.heads + h) * D;
#pragma unroll
      for (int c = lane % 8; c < D / 16; c += 8) {
        float x[8], y[8];
        eight(x, keys, row + 8 * c); eight(y, keys, row + D / 2 + 8 * c);
        const float4* turn = (const float4*)(angles + (slot * (D / 2) + 8 * c) * 2);
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          const float4 a = turn[e / 2];
          const float l0 = x[e] * a.x - y[e] * a.y, h0 = y[e] * a.x + x[e] * a.y;
          const float l1 = x[e + 1] * a.z - y[e + 1] * a.w, h1 = y[e + 1] * a.z + x[e + 1] * a.w;
#pragma unroll
          for (int g = 0; g < G; g++) {
            const float2 ql = *(const float2*)(query + g * D + 8 * c + e), qh = *(const float2*)(query + g * D + D / 2 + 8 * c + e);
            dot[g] += l0 * ql.x + l1 * ql.y + h0 * qh.x + h1 * qh.y;
          }
        }
      }
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
#pragma unroll
      for (int o = 4; o; o >>= 1) dot[g] += __shfl_xor_sync(~0u, dot[g], o);
      const int n = begin + i, token = n < sinks ? n : s.sinks + packed + n - sinks;
      if (i < count && lane % 8 == 0) score[i * G + g] = token < first ? HIDDEN : dot[g];
    }
  }
  __syncthreads();
  float top[G], sum[G];
#pragma unroll
  for (int g = 0; g < G; g++) {
    float m = FLOOR;
    for (int n = lane; n < count; n += 32) m = fmaxf(m, score[n * G + g]);
#pragma unroll
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    float l = 0.f;
    for (int n = lane; n < count; n += 32) l += ex2(score[n * G + g] - m);
#pragma unroll
    for (int o = 16; o; o >>= 1) l += __shfl_xor_sync(~0u, l, o);
    top[g] = m; sum[g] = l;
  }
  // a thread has two dimensions and every group-th token
  const int groups = threads / (D / 2), pair = threadIdx.x % (D / 2), mine = threadIdx.x / (D / 2);
  if (mine < groups) {
    float v0[G], v1[G];
#pragma unroll
    for (int g = 0; g < G; g++) { v0[g] = 0.f; v1[g] = 0.f; }
#pragma unroll 8
    for (int n = mine; n < count; n += groups) {
      const long long e = ((long long)(b * s.slots + slot_of[n]) * s.heads + h) * D + 2 * pair;
      const float x = element(values, e), y = element(values, e + 1);
#pragma unroll
      for (int g = 0; g < G; g++) { const float p = ex2(score[n * G + g] - top[g]); v0[g] += p * x; v1[g] += p * y; }
    }
#pragma unroll
    for (int g = 0; g < G; g++) { sums[(mine * G + g) * D + 2 * pair] = v0[g]; sums[(mine * G + g) * D + 2 * pair + 1] = v1[g]; }
  }
  __syncthreads();
  const long long out = ((long long)(b * s.heads + h) * (s.splits + s.exact) + s.splits + share) * G;
  for (int i = threadIdx.x; i < G * D; i += threads) {
    float v = 0.f;
    for (int n = 0; n < groups; n++) v += sums[n * G * D + i];
    part[out * D + i] = v;
  }
  if (threadIdx.x == 0) {
#pragma unroll
    for (int g = 0; g < G; g++) { stat[(out + g) * 3] = top[g]; stat[(out + g) * 3 + 1] = sum[g]; stat[(out + g) * 3 + 2] = 0.f; }
  }
}
