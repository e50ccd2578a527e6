// Decode attention over tiles with classes, for Hopper: one query of every sequence over sinks, tiles and window.
//
// A program of NW warps has one class of one kv head of one sequence, and a stretch of `chunk` tiles. Its warps walk pairs of tiles, whose records
// come by bulk copies. Codes are digits of four, two or one bit: a mask makes them 8-bit floats of keys, 32 digits of sixteen tokens at a time, which
// meet the rows of their digits in shared memory (wgmma: 64 tokens of four warps at once). Rotary pairs that turn far in two tiles are turned by the
// places of their tokens, the others meet the query and its slope; values are summed by softmax weights, digit by digit, and put together at the end.
// Lengths and the pages of tiles are read on the device: programs beyond a sequence end at once, so that batches may be ragged.
//
// D head dim, G query heads of a kv head, FAST lots of pairs that turn far, KEY_FORMS and VALUE_FORMS how many steps of 4, 2 and 1 bits classes have, KM and
// VS the most steps of the matrix of keys and of values, BIAS where keys have one, PLACES tiles of a warp that there is shared memory for, or more of a
// smaller class, NEAR_TURNS whether there is for turns of places.

#define THREADS (NW * 32)
#define LOTS (D / 16)         // lots of 8 rotary pairs: columns 8 j .. and D / 2 + 8 j ..
#define OT ((G + 7) / 8)      // tiles of eight query heads
#define PAIRED (G <= 4)       // then queries and slopes share columns in turn, and in sums of values two blocks of sixteen digits
#define QT (PAIRED ? 1 : 2 * OT)     // scores of a lane for a token
#define OPERANDS (PAIRED ? LOTS : 2 * LOTS - FAST)  // of queries: a lot each and, of more than four, another for slopes
#define QUERIES (OT * OPERANDS * 32)
#define SETS (PAIRED ? 1 : 2 * OT)   // of sums a step of 32 digits
#define SLOT_ROW (32 * VS + 8)  // sums of digits, so that neighbouring heads lie in other banks
#define SPAN 2                // tiles that share a turned query
#define TOGETHER (RECORDS > 1 ? SPAN : 1)  // tiles that a warp goes through together
#define MOST 4                // tiles of a warp under way
#define STEP_BYTES (D * 32)   // of the key matrix: 32 digits
#define STEP (STEP_BYTES / 16)
#define MATRIX_FORM (16ull << 32)  // of its descriptor
#define TURN_ROW ((FAST + 1) / 2 * 4)  // of places: two lots together
#define TURNS (NEAR_TURNS ? 64 * SPAN * TURN_ROW : 0)  // in shared memory
#define BARRIERS (((MOST * NW + 2) * 8 + 127) / 128 * 128)  // bytes of barriers, of every warp and one of the tables, in front of all other shared memory
#define HEADER 48             // places, key scales and value scales of a record
#define MOVE 4.f              // powers of two above the reference of the weights before it is moved

#define INLINED __attribute__((always_inline))  // of lambdas: products that are under way may not cross a call

#include "device.cuh"
#include "wgmma_whole.cuh"
#include "transfer_sm90.cuh"
#include "tiles_exact.cuh"
#include "tiles_keys.cuh"
#include "tiles_values.cuh"
#include "tiles_merge.cuh"

// grid (batch, kv heads, chunks of tiles by class and then shares of exact tokens), 32 NW threads
extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_tiles(TILE_ARGUMENTS, const void* q, const u8* pool, const int* pages, const int* classes, const uint4* matrices,
             const int4* digit_slots, const float4* digit_weights, const float* offsets, const float* pair_scale, const u32* key_bias,
             const uint4* place_turns, const uint2* start_turns, const float* slopes, const float2* start_angles, const float2* place_angles,
             const void* keys, const void* values, const int* tokens, const int* tiles, const u32* decode, const float* value_bias, int* arrivals,
             float* part, float* stat, float* exact_scores, float* received, void* out) {
  TILE_SHAPE;
  // barriers have memory of their own until the end: where others write to it what a barrier was comes back at times, in place of what was written
  extern __shared__ __align__(128) u8 smem[];
  u8* const room = smem + BARRIERS;
  const int h = blockIdx.y, b = blockIdx.x, lane = lane_of();
  const Last last = {part, stat, decode, value_bias, arrivals, exact_scores, received, tokens, tiles, out};
  // programs of exact tokens are short and come last
  const int walking = gridDim.z - s.exact;
  if (blockIdx.z >= walking) exact_part(s, blockIdx.z - walking, q, keys, values, start_angles, place_angles, tokens, tiles, part, stat, exact_scores, room);
  else do {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes, which the compiler should know
    const int piece = blockIdx.z, k = piece % s.classes, from = piece / s.classes * s.chunk, which = h * s.classes + k;
    // pairs of tiles are the warps' in turn, of which a program has an even number; the pages of the first are read before anything is known of them
    const auto tile_of = [&](int n) { return from + SPAN * warp + n / SPAN * (SPAN * NW) + n % SPAN; };
    const int page_there = pages[b * s.max_tiles + min(tile_of(lane % MOST), s.max_tiles - 1)];
    const int facts = classes[16 * which + lane % 16], to = min(tiles[b], from + s.chunk);
    const auto fact = [&](int i) { return __shfl_sync(~0u, facts, i); };  // which are in uniform registers
    const Class c = {fact(0), fact(1), fact(2), fact(3), fact(4), fact(5), fact(6), fact(7), fact(8), fact(9)};
    if (from >= to || !c.size) {
      empty_part(s, s.exact + piece, stat);
      break;
    }
    uint4* near_turns = (uint4*)(room + KM * STEP_BYTES);  // [64 SPAN][TURN_ROW] where there is room for them
    uint2* queries = (uint2*)(near_turns + TURNS);         // [OT][OPERANDS][32]
    float* scales = (float*)(queries + QUERIES);           // [256]
    u32* bias = (u32*)(scales + 256);                      // [D / 2]
    unsigned long long* barriers = (unsigned long long*)smem;  // [NW][MOST], and one of the tables
    uint2* own = (uint2*)(bias + D / 2);                   // [NW][OT][OPERANDS][32] where they are not in registers
    u8* stages = (u8*)(own + (PAIRED ? 0 : NW * QUERIES));
    const u32 tables_here = address(barriers + MOST * NW), mine = address(barriers + MOST * warp);
    // two turns, and the records of as many tiles as there is room for
    const int bytes = c.blocks * c.size, places = min(MOST, PLACES * s.stage_bytes / bytes);
    u8* stage = stages + warp * (2 * LOTS * 32 + PLACES * s.stage_bytes);
    const auto in_pair = [](int tile) { return (int)((u32)tile % SPAN); };
    const auto behind = [&](int tile) { return in_pair(tile) == SPAN - 1 ? tile + SPAN * NW - (SPAN - 1) : tile + 1; };
    const auto turn_at = [&](int tile) { return (u32)tile / (SPAN * NW) % 2 * (LOTS * 32); };
    const auto page_of = [&](int tile) { return tile < to ? pages[b * s.max_tiles + tile] : -1; };
    // one lane: a tile of the warp on its way, its records of the class and, with the first of a pair, the turn of the pair
    const auto fetch = [&](int tile, int place, int page) {
      const u32 there = address(stage), barrier = mine + 8 * place;
      const bool first = in_pair(tile) == 0;
      expect(barrier, (first ? LOTS * 32 : 0) + bytes);
      if (first) bulk(there + turn_at(tile), start_turns + (u32)tile / SPAN * (LOTS * 4), LOTS * 32, barrier);
      bulk(there + 2 * LOTS * 32 + place * bytes, pool + c.start + (long long)page * s.tile_bytes, bytes, barrier);
    };
    if (lane == 0) {
      for (int n = 0; n < MOST; n++) make_barrier(mine + 8 * n, 1);
      if (threadIdx.x == 0) make_barrier(tables_here, 1);
      share_with_tensor_cores();
      if (threadIdx.x == 0) {
        const int size = c.matrix * STEP_BYTES;
        expect(tables_here, size + TURNS * 16);
        if (size) bulk(address(room), matrices + (long long)which * KM * STEP, size, tables_here);
        if (TURNS) bulk(address(near_turns), place_turns, TURNS * 16, tables_here);
      }
    }
    for (int n = 0; n < places; n++) {
      const int page = __shfl_sync(~0u, page_there, n);
      if (lane == 0 && tile_of(n) < to) fetch(tile_of(n), n, page);
    }
    int tile = tile_of(0), ahead = tile_of(places);
    fill_queries(queries, s, q, pair_scale + which * (D / 2), slopes);
    for (int i = threadIdx.x; i < 256; i += THREADS) scales[i] = token_scale(i);
    for (int i = threadIdx.x; BIAS && i < D / 2; i += THREADS) bias[i] = key_bias[which * (D / 2) + i];
    __syncthreads();
    arrived(tables_here, 0);
    const Walk w = {(u32)descriptor_of(address(room)), queries, TURNS ? near_turns : place_turns, scales, bias, {(u32)here(0x0C0C0C0C), (u32)here(0x0F0F0F0F)}};
    Sums sums;
    clear(sums);
    by_place<0, KeyForms::count>(c.form, [&](auto which_form) INLINED {
      constexpr int keys = KeyForms::at(decltype(which_form)::place), values = ValueForms::at(decltype(which_form)::place);
      Turned turned;
      turned.shared = own + warp * QUERIES + lane;
      // values are multiplied beside the products of the next keys, or at once where those of several records would need too many registers
      Values<values> found[RECORDS];
      if (RECORDS == 1) found[0].clear();
      // four warps multiply together as long as the first of them has a tile
      for (int place = 0, phase = 0; tile - SPAN * (warp % 4) < to;) {
        int at[TOGETHER], coming[TOGETHER], page[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; n++) {
          at[n] = place; coming[n] = ahead; page[n] = page_of(ahead); ahead = behind(ahead);
          if (tile + n < to) arrived(mine + 8 * place, phase);
          if (++place == places) { place = 0; phase ^= 1; }
        }
        if (in_pair(tile) == 0) turn_queries(turned, w, (const uint2*)(stage + turn_at(tile)), lane);
        for (int n = 0; n < TOGETHER * c.blocks; n += RECORDS) {
          const u8* rec[RECORDS];
          Near near[RECORDS];
          bool valid[RECORDS];
#pragma unroll
          for (int r = 0; r < RECORDS; r++) {
            const int second = TOGETHER > 1 && n + r >= c.blocks;
            rec[r] = stage + 2 * LOTS * 32 + (second ? at[TOGETHER - 1] : at[0]) * bytes + (n + r - second * c.blocks) * c.size;
            valid[r] = tile + second < to;
            near[r] = near_of(rec[r], (in_pair(tile) + second) * 64, lane);
          }
          u32 sum[RECORDS][4 * LOTS];
          multiply<keys>(sum, rec, w, c, lane, [&](int share, int shares) INLINED { if (RECORDS == 1) found[0].take(sums, share, shares); });
          if (!valid[0]) { found[0].weigh_nothing(); continue; }
          float sc[RECORDS][QT][2];
#pragma unroll
          for (int r = 0; r < RECORDS; r++) {
            scores_of(sc[r], sum[r], w, near[r], rec[r], turned, lane);
#pragma unroll
            for (int qt = 0; qt < QT; qt++) if (!valid[r]) { sc[r][qt][0] = HIDDEN; sc[r][qt][1] = HIDDEN; }
          }
          move_reference<Form<values>::steps>(sc, sums);
#pragma unroll
          for (int r = 0; r < RECORDS; r++) { found[r].read(c, rec[r], lane); weigh(found[r].weights, sc[r], sums, w, rec[r], lane); }
#pragma unroll
          for (int r = 0; r < RECORDS; r++) if (RECORDS > 1) found[r].take(sums, 0, 1);
        }
        // all of these tiles has been read
        __syncwarp();
#pragma unroll
        for (int n = 0; n < TOGETHER; n++) if (lane == 0 && page[n] >= 0) fetch(coming[n], at[n], page[n]);
        tile = TOGETHER > 1 ? tile + SPAN * NW : behind(tile);
      }
      if (RECORDS == 1) found[0].take(sums, 0, 1);
    });
    merge_warps(s, sums, digit_slots + which * D, digit_weights + which * D, offsets + which * D, room, part, stat, s.exact + piece);
  } while (false);
  finish(s, last, room);
}
