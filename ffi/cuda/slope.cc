// The handler of the gradient of the input of an activation, with its estimate packed along tokens.
#include "../call/packed24.h"

namespace s24 {
namespace cuda {
namespace {

// Operands: the key, what was saved (batch..., tokens, features), and the gradient of the result; see core/slope.h.
ffi::Error SlopeMvue(Device stream, int64_t relu, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer saved, ffi::AnyBuffer dy2,
                     ffi::Result<ffi::AnyBuffer> dy1, ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  constexpr const char* kName = "s24_slope_mvue";
  Check check(kName);
  SlopeArgs args{};
  args.dtype = check.dtype("saved", saved);
  args.slope = check.flag("relu", relu) ? Slope::kRelu : Slope::kSquaredRelu;
  const Dims shape = dims_of(saved), given = dims_of(dy2);
  if (!check.require(shape.size() >= 2 && given.size() >= 2, "saved and dy2 need two dimensions")) return check.error();
  args.rows = shape[shape.size() - 2], args.cols = shape.back();
  check.require(args.dtype != Dtype::kF32 && args.rows % kSavedTokens == 0 && args.rows <= kMostTiles * kSavedTokens &&
                    args.cols % 8 == 0,
                "needs 16-bit floats, tokens a multiple of " + std::to_string(kSavedTokens) + ", at most " +
                    std::to_string(kMostTiles) + " times as many, and features a multiple of 8, got saved " + text(shape));
  const Dims saved_lead = leading(shape, 2), dy2_lead = leading(given, 2);
  Dims all = check.broadcast("saved and dy2", saved_lead, dy2_lead);
  const Dims lead = all;
  for (const int64_t n : {args.rows, args.cols}) all.push_back(n);
  check.require(given[given.size() - 2] == args.rows && given.back() == args.cols,
                "dy2 has shape " + text(given) + ", saved has shape " + text(shape));
  check.shape("dy1", *dy1, all);
  check.require(dy2.element_type() == saved.element_type() && dy1->element_type() == saved.element_type(),
                "all arrays must have the dtype of saved");
  if (!check.ok()) return check.error();
  const Batch batch(lead, {saved_lead, dy2_lead}, lead.size());
  // Packing what dy1 holds: every operand has as many leading dimensions, vmap has seen to it.
  const PackCall pack = PackCall::mvue(kName, 1, exact, key, *dy1, *values, *metadata);
  if (pack.error.failure()) return pack.error;
  if (pack.batch.count() != batch.count())
    return ffi::Error::InvalidArgument(std::string(kName) + ": key needs the leading dimensions of the operands");
  const int64_t bytes = args.rows * args.cols * size_of(args.dtype);
  for (int64_t b = 0; b < batch.count(); ++b) {
    const PackArgs p = pack.at(b);
    args.saved = at_bytes(saved.untyped_data(), batch.index(0, b) * bytes);
    args.dy2 = at_bytes(dy2.untyped_data(), batch.index(1, b) * bytes);
    args.dy1 = p.dense;
    args.packed.op = p.op;
    args.packed.values[0] = p.values, args.packed.metadata[0] = p.metadata, args.packed.draws[0] = p.draws;
    cudaError_t e = run(args, stream);
    if (e == cudaSuccess) e = append_metadata(p, stream);
    if (e != cudaSuccess) return status(kName, e);
  }
  return ffi::Error::Success();
}

S24_TARGET("s24_slope_mvue", SlopeMvue, "relu", "exact");

}  // namespace
}  // namespace cuda
}  // namespace s24
