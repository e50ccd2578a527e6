// The launch's numbers of the kernels that read tiles without classes.

struct Shape {
  int heads, splits, exact, span, slots, sinks, ring, tile_bytes, max_tiles, stage_bytes, halves;
  float scaling;  // softmax scale * log2(e)
};
#define SHAPE_ARGUMENTS int heads, int splits, int exact, int span, int slots, int sinks, int ring, int tile_bytes, int max_tiles, \
                        int stage_bytes, int halves, float scaling
#define SHAPE const Shape s = {heads, splits, exact, span, slots, sinks, ring, tile_bytes, max_tiles, stage_bytes, halves, scaling}
