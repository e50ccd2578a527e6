// Sinks and window of one sequence and head, exact and in float32: a share of them makes one partial result, in model space.

struct Shape {
  int heads, classes, chunk, exact, slots, sinks, ring, tile_bytes, max_tiles, stage_bytes, first_lag, last_lag;
  float scaling;  // softmax scale * log2(e)
};
#define TILE_ARGUMENTS int heads, int classes_of_head, int chunk, int exact, int slots, int sinks, int ring, int tile_bytes, int max_tiles, \
                       int stage_bytes, int first_lag, int last_lag, float scaling
#define TILE_SHAPE const Shape s = {heads, classes_of_head, chunk, exact, slots, sinks, ring, tile_bytes, max_tiles, stage_bytes, \
                                    first_lag, last_lag, scaling}

// exact tokens of a sequence: the sinks, then those behind the packed ones
struct Exact {
  int sinks, packed, count;
  __device__ int token(const Shape& s, int n) const { return n < sinks ? n : s.sinks + packed + n - sinks; }
  __device__ int slot(const Shape& s, int n) const { return n < sinks ? n : s.sinks + (packed + n - sinks) % s.ring; }
};
__device__ __forceinline__ Exact exact_tokens(const Shape& s, int total, int tiles) {
  const int sinks = min(total, s.sinks), packed = 64 * tiles;
  return Exact{sinks, packed, sinks + max(total - s.sinks - packed, 0)};
}

// scores also go to exact_scores [B, H, slots, G], from which follows what the tokens of the window receive. What runs once is fetched once: loops are
// not unrolled but for rows that are on their way together
__device__ void exact_part(const Shape& s, int share, const void* q, const void* keys, const void* values, const float2* start_angles,
                           const float2* place_angles, const int* tokens, const int* tiles, float* part, float* stat, float* exact_scores, u8* smem) {
  const int h = blockIdx.y, b = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Exact x = exact_tokens(s, tokens[b], tiles[b]);
  const int begin = x.count * share / s.exact, count = x.count * (share + 1) / s.exact - begin;
  float* query = (float*)smem;              // [G][D]
  float* sums = query + G * D;              // [token groups][G][D]
  float* stats = sums + (2 * THREADS / D) * G * D;  // [G][2]: most of the scores, sum of weights
  float* score = stats + 2 * G;             // [count][G], then weights
  const auto row_of = [&](int n) { return ((long long)(b * s.slots + x.slot(s, begin + n)) * s.heads + h) * D; };
#pragma unroll 1
  for (int i = threadIdx.x; i < G * D; i += THREADS)
    query[i] = element(q, ((long long)(b * s.heads + h) * G) * D + i) * s.scaling;
  __syncthreads();
  // eight lanes share a token: four tokens a warp at once
#pragma unroll 1
  for (int i = warp * 4 + lane / 8; i < (count + 3) / 4 * 4; i += NW * 4) {
    float dot[G];
#pragma unroll
    for (int g = 0; g < G; g++) dot[g] = 0.f;
    if (i < count) {
      // angles count from 64 tokens before the first behind the sinks
      const int place = x.token(s, begin + i) - s.sinks + 64;
      const float2 *start = start_angles + place / 64 * (D / 2), *rest = place_angles + place % 64 * (D / 2);
#pragma unroll 1
      for (int c = lane % 8; c < D / 16; c += 8) {
        float lo[8], hi[8];
        eight(lo, keys, row_of(i) + 8 * c); eight(hi, keys, row_of(i) + D / 2 + 8 * c);
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const float2 m = start[8 * c + e], n = rest[8 * c + e];
          const float cosine = m.x * n.x - m.y * n.y, sine = m.y * n.x + m.x * n.y;
          const float l = lo[e] * cosine - hi[e] * sine;
          hi[e] = hi[e] * cosine + lo[e] * sine; lo[e] = l;
        }
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
          for (int e = 0; e < 8; e++) dot[g] += lo[e] * query[g * D + 8 * c + e] + hi[e] * query[g * D + D / 2 + 8 * c + e];
      }
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
#pragma unroll
      for (int o = 4; o; o >>= 1) dot[g] += __shfl_xor_sync(~0u, dot[g], o);
      if (i < count && lane % 8 == 0) {
        score[i * G + g] = dot[g];
        exact_scores[((long long)(b * s.heads + h) * s.slots + x.slot(s, begin + i)) * G + g] = dot[g];
      }
    }
  }
  __syncthreads();
  // a warp for every head: scores become weights
#pragma unroll 1
  for (int g = warp; g < G; g += NW) {
    float m = FLOOR, l = 0.f;
#pragma unroll 1
    for (int n = lane; n < count; n += 32) m = fmaxf(m, score[n * G + g]);
#pragma unroll
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
#pragma unroll 1
    for (int n = lane; n < count; n += 32) { const float p = ex2(score[n * G + g] - m); score[n * G + g] = p; l += p; }
#pragma unroll
    for (int o = 16; o; o >>= 1) l += __shfl_xor_sync(~0u, l, o);
    if (lane == 0) { stats[2 * g] = m; stats[2 * g + 1] = l; }
  }
  __syncthreads();
  // a thread has two dimensions and every group-th token, some of which are on their way together
  constexpr int groups = 2 * THREADS / D, together = 6;
  const int pair = threadIdx.x % (D / 2), mine = threadIdx.x / (D / 2);
  if (mine < groups) {
    float v0[G], v1[G];
#pragma unroll
    for (int g = 0; g < G; g++) { v0[g] = 0.f; v1[g] = 0.f; }
#pragma unroll 1
    for (int first = mine; first < count; first += together * groups) {
      Pair found[together];
#pragma unroll
      for (int n = 0; n < together; n++) found[n] = pair_at(values, row_of(min(first + n * groups, count - 1)) + 2 * pair);
#pragma unroll
      for (int n = 0; n < together; n++) {
        const int token = first + n * groups;
        if (token >= count) break;
#pragma unroll
        for (int g = 0; g < G; g++) { const float p = score[token * G + g]; v0[g] += p * low_of(found[n]); v1[g] += p * high_of(found[n]); }
      }
    }
#pragma unroll
    for (int g = 0; g < G; g++) { sums[(mine * G + g) * D + 2 * pair] = v0[g]; sums[(mine * G + g) * D + 2 * pair + 1] = v1[g]; }
  }
  __syncthreads();
  const long long out = ((long long)(b * s.heads + h) * gridDim.z + share) * G;
#pragma unroll 1
  for (int i = threadIdx.x; i < G * D; i += THREADS) {
    float v = 0.f;
#pragma unroll 4
    for (int n = 0; n < groups; n++) v += sums[n * G * D + i];
    part[out * D + i] = v;
  }
  if (threadIdx.x < 2 * G) stat[out * 2 + threadIdx.x] = stats[threadIdx.x];
}
