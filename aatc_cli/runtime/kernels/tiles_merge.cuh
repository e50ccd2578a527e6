// Partial results: of the warps of a program, then of the programs of a head, by the last of them.

// a program that has nothing to add
__device__ __forceinline__ void empty_part(const Shape& s, int place, float* stat) {
  const long long out = ((long long)(blockIdx.x * s.heads + blockIdx.y) * gridDim.z + place) * G;
  for (int g = threadIdx.x; g < G; g += THREADS) { stat[(out + g) * 2] = FLOOR; stat[(out + g) * 2 + 1] = 0.f; }
}

// sums of the warps of this program, put together by channel: to part and stat. A channel has up to four digits, each in a slot that counts for
// its weight, and its offset
__device__ __forceinline__ void merge_warps(const Shape& s, Sums& x, const int4* digit_slots, const float4* digit_weights, const float* offsets,
                                            u8* smem, float* part, float* stat, int place) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // what a thread's first channel is made of is on its way while warps come together
  int4 at = digit_slots[threadIdx.x % D];
  float4 of = digit_weights[threadIdx.x % D];
  float offset = offsets[threadIdx.x % D];
#pragma unroll
  for (int qt = 0; qt < QT; qt++)
#pragma unroll
    for (int n = 4; n < 32; n <<= 1) { x.weight[qt] += __shfl_xor_sync(~0u, x.weight[qt], n); x.mass[qt] += __shfl_xor_sync(~0u, x.mass[qt], n); }
  __syncthreads();
  float* sums = (float*)smem;                 // [NW][G][SLOT_ROW]
  float* stats = sums + NW * G * SLOT_ROW;    // [NW][G][3]: reference, then what sums count for, weight, mass
  float* masses = stats + NW * G * 3;         // [G]
#pragma unroll
  for (int qt = 0; qt < QT; qt++) {
    const int head = head_of(qt, t);
    if (head >= G) continue;
    if (g == 0) {
      float* to = stats + (warp * G + head) * 3;
      to[0] = x.reference[qt]; to[1] = x.weight[qt]; to[2] = x.mass[qt];
    }
    float* to = sums + (warp * G + head) * SLOT_ROW + g;
#pragma unroll
    for (int i = 0; i < VS; i++)
#pragma unroll
      for (int block = 0; block < 2; block++) {
        const float* o = x.o[i][PAIRED ? 0 : qt / 2 * 2 + block];
        const int column = PAIRED ? block : qt % 2;
        to[32 * i + 16 * block] = o[column]; to[32 * i + 16 * block + 8] = o[2 + column];
      }
  }
  __syncthreads();
  const long long out = ((long long)(blockIdx.x * s.heads + blockIdx.y) * gridDim.z + place) * G;
  // a warp for every head, a lane for every warp
  for (int head = warp; head < G; head += NW) {
    float* mine = stats + (min(lane, NW - 1) * G + head) * 3;
    const float reference = lane < NW ? mine[0] : FLOOR;
    float top = reference;
#pragma unroll
    for (int n = 16; n; n >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, n));
    const float f = lane < NW ? ex2(reference - top) : 0.f;
    float sum = f * mine[1], mass = f * mine[2];
#pragma unroll
    for (int n = 16; n; n >>= 1) { sum += __shfl_xor_sync(~0u, sum, n); mass += __shfl_xor_sync(~0u, mass, n); }
    __syncwarp();
    if (lane < NW) mine[0] = f;
    if (lane == 0) { masses[head] = mass; stat[(out + head) * 2] = top; stat[(out + head) * 2 + 1] = sum; }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += THREADS) {
    const int head = i / D, channel = i % D;
    if (THREADS % D && i >= THREADS) { at = digit_slots[channel]; of = digit_weights[channel]; offset = offsets[channel]; }
    float total = 0.f;
    const auto digit = [&](int slot, float counts) {
      if (counts == 0.f) return;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < NW; w++) sum += stats[(w * G + head) * 3] * sums[(w * G + head) * SLOT_ROW + slot];
      total += counts * sum;
    };
    if (VS > 0) { digit(at.x, of.x); digit(at.y, of.y); digit(at.z, of.z); digit(at.w, of.w); }
    part[out * D + i] = total - offset * masses[head];
  }
}

#define AT_ONCE 16  // partial results that are on their way together
// what the last program of a head reads and writes
struct Last {
  const float *part, *stat;
  const u32* decode;          // [H, D channels, D / 2] pairs of dimensions
  const float* value_bias;    // [H, D]
  int* arrivals;              // programs of a head that are done; zero again at the end
  const float* exact_scores;
  float* received;            // [B, H, slots]
  const int *tokens, *tiles;
  void* out;
};

// what the query pays the tokens of the window at the distances that count, of which a thread's first is read before sums are known
struct Paid {
  Exact tokens;
  int total;
  float score[G], before;

  __device__ __forceinline__ bool counts(const Shape& s, int n) const {
    const int lag = total - 1 - tokens.token(s, n);
    return n < tokens.count && lag >= s.first_lag && lag <= s.last_lag;
  }
  __device__ __forceinline__ long long at(const Shape& s, int n) const {
    return (long long)(blockIdx.x * s.heads + blockIdx.y) * s.slots + tokens.slot(s, n);
  }
  __device__ __forceinline__ void read(const Shape& s, const Last& x, int n) {
    if (!counts(s, n)) return;
#pragma unroll
    for (int g = 0; g < G; g++) score[g] = __ldcg(x.exact_scores + at(s, n) * G + g);
    before = x.received[at(s, n)];
  }
  // top and total [G] are those of all tokens
  __device__ __forceinline__ void pay(const Shape& s, const Last& x, const float* top, const float* whole) {
    const int first = tokens.sinks + threadIdx.x;
    for (int n = first; n < tokens.count; n += THREADS) {
      if (n > first) read(s, x, n);
      if (!counts(s, n)) continue;
      float paid = 0.f;
#pragma unroll
      for (int g = 0; g < G; g++) { const float share = ex2(score[g] - top[g]) / whole[g]; paid += share * share; }
      x.received[at(s, n)] = before + paid;
    }
  }
};

// after the partial result of this program is in part and stat: the last program of a head merges them all, decodes the summed latents once and
// adds the exact parts, which come first
__device__ __forceinline__ void finish(const Shape& s, const Last& x, u8* smem) {
  const int h = blockIdx.y, b = blockIdx.x, parts = gridDim.z;
  constexpr int groups = 2 * THREADS / D;
  float* latent = (float*)smem;           // [G][D]
  float* near = latent + G * D;           // [G][D]
  float* value = near + G * D;            // [groups][G][D]
  float* top = value + groups * G * D;    // [G]
  float* total = top + G;                 // [G] sums of weights
  float* packed = total + G;              // [G] of those of tiles
  float* share = packed + G;              // [parts][G] what a part's sums count
  __shared__ int is_last;
  // what the program has written before the barrier is seen by who sees that it has arrived, and the other way round
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(x.arrivals + b * s.heads + h, 1) == parts - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  Paid paid = {exact_tokens(s, x.tokens[b], x.tiles[b]), x.tokens[b]};
  paid.read(s, x, paid.tokens.sinks + threadIdx.x);
  const long long row = (long long)(b * s.heads + h) * parts * G;
  // a thread has two dimensions and every group-th channel, the first of which are fetched before anything else is known
  constexpr int each = (D + groups - 1) / groups, ahead = each < 16 ? each : 16;
  const int pair = threadIdx.x % (D / 2), mine = threadIdx.x / (D / 2);
  u32 matrix[ahead];
#pragma unroll
  for (int n = 0; n < ahead; n++) {
    const int c = mine + n * groups;
    matrix[n] = mine < groups && c < D ? x.decode[((long long)h * D + c) * (D / 2) + pair] : 0u;
  }
  for (int g = threadIdx.x / 32; g < G; g += NW) {
    const int lane = threadIdx.x % 32;
    const auto of_part = [&](int i) { return i < parts ? __ldcg((const float2*)x.stat + row + i * G + g) : float2{FLOOR, 0.f}; };
    // one read where there are no more parts than lanes
    const float2 first = of_part(lane);
    float most = first.x, sum = 0.f, far = 0.f;
    for (int i = lane + 32; i < parts; i += 32) most = fmaxf(most, of_part(i).x);
#pragma unroll
    for (int n = 16; n; n >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, n));
    for (int i = lane; i < parts; i += 32) {
      const float2 part = i == lane ? first : of_part(i);
      const float f = part.y > 0.f ? ex2(part.x - most) : 0.f;
      share[i * G + g] = f; sum += f * part.y; far += i < s.exact ? 0.f : f * part.y;
    }
#pragma unroll
    for (int n = 16; n; n >>= 1) { sum += __shfl_xor_sync(~0u, sum, n); far += __shfl_xor_sync(~0u, far, n); }
    if (lane == 0) { top[g] = most; total[g] = sum; packed[g] = far; }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += THREADS) {
    const int g = i / D;
    float far = 0.f, exact = 0.f;
    // some parts at once, those that count for nothing too: what they hold may be anything
    for (int from = 0; from < parts; from += AT_ONCE) {
      float v[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++) v[n] = __ldcg(x.part + (row + min(from + n, parts - 1) * G) * D + i);
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++) {
        const float f = from + n < parts ? share[(from + n) * G + g] : 0.f, counts = f > 0.f ? f * v[n] : 0.f;
        if (from + n < s.exact) exact += counts; else far += counts;
      }
    }
    latent[i] = far; near[i] = exact;
  }
  __syncthreads();
  if (mine < groups) {
    float v0[G], v1[G];
#pragma unroll
    for (int g = 0; g < G; g++) { v0[g] = 0.f; v1[g] = 0.f; }
    const auto add = [&](int c, u32 m) {
      const float lo = half_lo(m), hi = half_hi(m);
#pragma unroll
      for (int g = 0; g < G; g++) { v0[g] += latent[g * D + c] * lo; v1[g] += latent[g * D + c] * hi; }
    };
#pragma unroll
    for (int n = 0; n < ahead; n++) add(min(mine + n * groups, D - 1), matrix[n]);
#pragma unroll 8
    for (int c = mine + ahead * groups; c < D; c += groups) add(c, x.decode[((long long)h * D + c) * (D / 2) + pair]);
#pragma unroll
    for (int g = 0; g < G; g++) { value[(mine * G + g) * D + 2 * pair] = v0[g]; value[(mine * G + g) * D + 2 * pair + 1] = v1[g]; }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += THREADS) {
    const int g = i / D;
    float v = near[i] + packed[g] * x.value_bias[h * D + i % D];
    for (int n = 0; n < groups; n++) v += value[n * G * D + i];
    // a sequence without tokens attends to nothing
    store(x.out, (long long)(b * s.heads + h) * G * D + i, total[g] == 0.f ? 0.f : v / total[g]);
  }
  paid.pay(s, x, top, total);
  if (threadIdx.x == 0) x.arrivals[b * s.heads + h] = 0;
}
