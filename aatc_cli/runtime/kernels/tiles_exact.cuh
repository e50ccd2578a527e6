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

// scores also go to exact_scores [B, H, slots, G], from which follows what the tokens of the window receive. All rows that a thread reads are asked for
// before any of them is used
#define KEYS_AHEAD 3     // rounds of keys, NW * 4 tokens each
#define VALUES_AHEAD 20  // values of a thread
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
  // a thread has two dimensions of values and every group-th token
  constexpr int groups = 2 * THREADS / D;
  const int pair = threadIdx.x % (D / 2), mine = threadIdx.x / (D / 2);
  Pair ahead[VALUES_AHEAD];
#pragma unroll
  for (int n = 0; n < VALUES_AHEAD; n++) if (mine < groups && mine + n * groups < count) ahead[n] = pair_at(values, row_of(mine + n * groups) + 2 * pair);
  for (int i = threadIdx.x; i < G * D; i += THREADS)
    query[i] = element(q, ((long long)(b * s.heads + h) * G) * D + i) * s.scaling;
  __syncthreads();
  // eight lanes share a token: four tokens a warp at once, in rounds of which some are under way together
  for (int first = warp * 4 + lane / 8; first < (count + 3) / 4 * 4; first += KEYS_AHEAD * NW * 4) {
    float dot[KEYS_AHEAD][G];
#pragma unroll
    for (int r = 0; r < KEYS_AHEAD; r++)
#pragma unroll
      for (int g = 0; g < G; g++) dot[r][g] = 0.f;
    for (int c = lane % 8; c < D / 16; c += 8) {
      float lo[KEYS_AHEAD][8], hi[KEYS_AHEAD][8];
#pragma unroll
      for (int r = 0; r < KEYS_AHEAD; r++) {
        const int i = first + r * NW * 4;
        if (i < count) { eight(lo[r], keys, row_of(i) + 8 * c); eight(hi[r], keys, row_of(i) + D / 2 + 8 * c); }
      }
#pragma unroll
      for (int r = 0; r < KEYS_AHEAD; r++) {
        const int i = first + r * NW * 4;
        if (i >= count) continue;
        // angles count from 64 tokens before the first behind the sinks
        const int place = x.token(s, begin + i) - s.sinks + 64;
        const float2 *start = start_angles + place / 64 * (D / 2), *rest = place_angles + place % 64 * (D / 2);
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const float2 m = start[8 * c + e], n = rest[8 * c + e];
          const float cosine = m.x * n.x - m.y * n.y, sine = m.y * n.x + m.x * n.y;
          const float l = lo[r][e] * cosine - hi[r][e] * sine, u = hi[r][e] * cosine + lo[r][e] * sine;
#pragma unroll
          for (int g = 0; g < G; g++) dot[r][g] += l * query[g * D + 8 * c + e] + u * query[g * D + D / 2 + 8 * c + e];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < KEYS_AHEAD; r++) {
      const int i = first + r * NW * 4;
      if (i - lane / 8 >= count) break;  // no token of the warp
#pragma unroll
      for (int g = 0; g < G; g++) {
#pragma unroll
        for (int o = 4; o; o >>= 1) dot[r][g] += __shfl_xor_sync(~0u, dot[r][g], o);
        if (i < count && lane % 8 == 0) {
          score[i * G + g] = dot[r][g];
          exact_scores[((long long)(b * s.heads + h) * s.slots + x.slot(s, begin + i)) * G + g] = dot[r][g];
        }
      }
    }
  }
  __syncthreads();
  // a warp for every head: scores become weights
  for (int g = warp; g < G; g += NW) {
    float m = FLOOR, l = 0.f;
    for (int n = lane; n < count; n += 32) m = fmaxf(m, score[n * G + g]);
#pragma unroll
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    for (int n = lane; n < count; n += 32) { const float p = ex2(score[n * G + g] - m); score[n * G + g] = p; l += p; }
#pragma unroll
    for (int o = 16; o; o >>= 1) l += __shfl_xor_sync(~0u, l, o);
    if (lane == 0) { stats[2 * g] = m; stats[2 * g + 1] = l; }
  }
  __syncthreads();
  if (mine < groups) {
    float v0[G], v1[G];
#pragma unroll
    for (int g = 0; g < G; g++) { v0[g] = 0.f; v1[g] = 0.f; }
    const auto add = [&](int n, Pair of_token) INLINED {
#pragma unroll
      for (int g = 0; g < G; g++) { const float p = score[n * G + g]; v0[g] += p * low_of(of_token); v1[g] += p * high_of(of_token); }
    };
#pragma unroll
    for (int n = 0; n < VALUES_AHEAD; n++) if (mine + n * groups < count) add(mine + n * groups, ahead[n]);
    for (int n = mine + VALUES_AHEAD * groups; n < count; n += groups) add(n, pair_at(values, row_of(n) + 2 * pair));
#pragma unroll
    for (int g = 0; g < G; g++) { sums[(mine * G + g) * D + 2 * pair] = v0[g]; sums[(mine * G + g) * D + 2 * pair + 1] = v1[g]; }
  }
  __syncthreads();
  const long long out = ((long long)(b * s.heads + h) * gridDim.z + share) * G;
  for (int i = threadIdx.x; i < G * D; i += THREADS) {
    float v = 0.f;
    for (int n = 0; n < groups; n++) v += sums[n * G * D + i];
    part[out * D + i] = v;
  }
  for (int i = threadIdx.x; i < 2 * G; i += THREADS) stat[out * 2 + i] = stats[i];
}
