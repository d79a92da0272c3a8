// The table of this path. Included once per path, last; QUIRE_PATH_NAME is its name.
static constexpr Backend kTable = {
    QUIRE_PATH_NAME,
    AppendKV,
    AttentionScratchBytes,
    Attention,
    MergeAttention,
    PackedLinearBytes,
    PackLinear,
    LinearScratchBytes,
    Linear,
    RmsNorm,
    GatedMul,
    SoftCap,
    GatherRows,
    ArgMax,
    Exp2Scaled,
    &kRecurrence,
};
