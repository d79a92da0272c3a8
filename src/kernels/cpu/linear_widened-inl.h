// Linear layers whose weights are codes that become numbers: 8-bit floating point, and quantised
// weights of rows that stay numbers. Included by linear-inl.h.
//
// A part of a block of inputs is widened into a panel that stays in L1, and meets all rows of the
// task there. So the chains are those of weights stored in the type that the codes stand for; from
// one part to the next they lie in memory, whole.

// Inputs [begin, begin + count) of a block of outputs. `streams`: they come from memory.
template <class Panel>
static void WidenCodes(const PackedLinear& w, int64_t output_block, int64_t begin, int64_t count,
                       bool streams, typename Panel::Element* panel) {
  if (w.blocks) return WidenBlocks<Panel>(w, output_block, begin, count, streams, panel);
  WidenFloat8<Panel>(w, output_block, begin, count, panel);
}

static void WidenPart(const LinearArgs& args, int64_t output_block, int64_t begin, int64_t count,
                      bool streams, float* panel) {
#if defined(QUIRE_SIMD_BF16) || defined(QUIRE_SIMD_TILES)
  if (WidensToPairs(args)) {
    auto* const pairs = reinterpret_cast<uint16_t*>(panel);
    return WidenCodes<PairPanel>(args.w, output_block, begin, count, streams, pairs);
  }
#endif
  WidenCodes<SinglePanel>(args.w, output_block, begin, count, streams, panel);
}

// RunTiles by panels.
static void RunPanels(const LinearPlan& plan, const RowBlock& rows, int64_t output_block,
                      int64_t input_block, const char* next, float* panel, float* sums) {
  const LinearArgs& args = *plan.args;
  const int64_t inputs = InputsOfBlock(plan, input_block);
  const char* const packed = PackedAt(plan, output_block, input_block);
  float* const chains = panel + kPartFloats;
  const bool once = rows.tiles() == 1;
  Tile tile{};
  tile.w = panel;
  tile.sum_stride = kGroupBlocks * kOutputBlock;
  for (int64_t begin = 0; begin < inputs; begin += kPartInputs) {
    const int64_t left = inputs - begin;
    tile.inputs = left < kPartInputs ? left : kPartInputs;
    tile.begins = begin == 0;
    tile.ends = left <= kPartInputs;
    // In the tile unit's order sums go on from part to part as they do from block to block.
    tile.first = input_block == 0 && (tile.begins || !InTileOrder(args));
    WidenPart(args, output_block, input_block * plan.input_block + begin, tile.inputs, once, panel);
    const int64_t bytes = tile.inputs * kOutputBlock;
    const int64_t steps = CeilDivide(tile.inputs, WidensToPairs(args) ? 2 : 1);
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const int64_t row = FirstRowOfTile(plan, t);
      const int64_t count = FirstRowOfTile(plan, t + 1) - row;
      tile.x = plan.x + (input_block * args.row_count + row) * kRowFloats +
               (plan.pairs ? begin / 2 : begin);
      tile.sums = sums + (row - rows.first_row) * tile.sum_stride;
      tile.chains = chains + (row - rows.first_row) * kOutputBlock;
      if (args.w.blocks) {  // the widening asks for what it reads
        tile.ahead = reinterpret_cast<const char*>(panel);
      } else if (once) {
        tile.ahead = packed + begin * kOutputBlock + kStreamAhead;
        tile.ahead_step = CeilDivide(bytes, steps);
      } else {
        tile.ahead = next + begin * kOutputBlock + bytes * (t - rows.begin) / rows.tiles();
        tile.ahead_step = CeilDivide(bytes, rows.tiles() * steps);
      }
      plan.direct[count - 1](tile);
    }
  }
}

static void RunWidened(const LinearPlan& plan, const RowBlock& rows, int64_t output_block,
                       int64_t input_block, const char* next, float* panel, float* sums) {
  if (!plan.args->w.blocks && rows.tiles() == 1 && !WidensToPairs(*plan.args)) {
    return RunFloat8Tile(plan, rows, output_block, input_block, panel, sums);
  }
  RunPanels(plan, rows, output_block, input_block, next, panel, sums);
}
