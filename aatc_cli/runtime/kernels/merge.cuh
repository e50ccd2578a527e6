// Partial results: of the warps of a program, then of the programs of a head.

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


// grid (kv heads, batch, G), 4 D threads: merges the splits, decodes the summed latents once, adds the exact parts
extern "C" __global__ void __launch_bounds__(4 * D)
decode_combine(SHAPE_ARGUMENTS, const float* part, const float* stat, const unsigned short* decode, const float* offset, void* out) {
  SHAPE;
  __shared__ float latent[4][D], near[4][D], total[4][2];
  const int h = blockIdx.x, b = blockIdx.y, g = blockIdx.z, d = threadIdx.x % D, quarter = threadIdx.x / D;
  const int parts = s.splits + s.exact;
  const long long row = (long long)(b * s.heads + h) * parts * G + g;
  // a thread decodes a quarter of the channels of one dimension: its matrix is fetched before anything else is known
  u32 matrix[D / 4];
#pragma unroll
  for (int c = 0; c < D / 4; c++) matrix[c] = decode[((long long)h * D + quarter * (D / 4) + c) * D + d];
  float top = FLOOR;
#pragma unroll 8
  for (int i = 0; i < parts; i++) top = fmaxf(top, stat[(row + i * G) * 3]);
  float sum = 0.f, sum_v = 0.f, far = 0.f, exact_v = 0.f;
#pragma unroll 4
  for (int i = quarter; i < parts; i += 4) {
    const long long at = row + i * G;
    const float f = ex2(stat[at * 3] - top), v = f * part[at * D + d];
    sum += f * stat[at * 3 + 1]; sum_v += f * stat[at * 3 + 2];
    if (i < s.splits) far += v; else exact_v += v;
  }
  latent[quarter][d] = far * VALUE_SCALE; near[quarter][d] = exact_v;
  if (d == 0) { total[quarter][0] = sum; total[quarter][1] = sum_v; }
  __syncthreads();
  if (quarter == 0) latent[0][d] = latent[0][d] + latent[1][d] + latent[2][d] + latent[3][d];
  __syncthreads();
  float value = near[quarter][d];
#pragma unroll
  for (int c = 0; c < D / 4; c++) value += latent[0][quarter * (D / 4) + c] * half_lo(matrix[c]);
  near[quarter][d] = value;
  __syncthreads();
  if (quarter) return;
  sum = total[0][0] + total[1][0] + total[2][0] + total[3][0];
  sum_v = total[0][1] + total[1][1] + total[2][1] + total[3][1];
  value = near[0][d] + near[1][d] + near[2][d] + near[3][d] - sum_v * offset[h * D + d];
  store(out, ((long long)(b * s.heads + h) * G + g) * D + d, value / sum);
}
