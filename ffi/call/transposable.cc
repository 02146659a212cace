// Operations on tiles of 4x4: transposable masks, and pruning along both axes.
#include "../core/transposable.h"

#include "handler.h"

namespace s24 {
namespace {

struct TileCall : Call {
  TileArgs args{};  // of all tiles: an array follows another
  using Call::Call;

  static TileCall of(const char* target, TileOp op, const ffi::AnyBuffer& w, const ffi::AnyBuffer& out) {
    TileCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("w", w);
    const Dims dims = dims_of(w);
    check.shape("the result", out, dims);
    if (op == TileOp::kTransposableMask)
      check.type("the result", out, ffi::DataType::PRED, "bool");
    else
      check.require(out.element_type() == w.element_type(), "the result must have the dtype of w");
    if (check.require(dims.size() >= 2, "w needs two dimensions, got shape " + text(dims)))
      check.require(dims[dims.size() - 2] % 4 == 0 && dims.back() % 4 == 0,
                    "both last dimensions of " + text(dims) + " must be multiples of 4");
    if (!check.ok()) return c.error = check.error(), c;
    c.args = {op, dtype, w.untyped_data(), out.untyped_data(), product(dims, 0, dims.size() - 1), dims.back()};
    return c;
  }

  static TileCall double_prune(const char* target, int64_t first, const ffi::AnyBuffer& w, const ffi::AnyBuffer& out) {
    Check check(target);
    TileCall c = of(target, check.flag("first", first) ? TileOp::kPruneRowsFirst : TileOp::kPruneColumnsFirst, w, out);
    if (!check.ok()) c.error = check.error();
    return c;
  }

  TileArgs at(int64_t) const { return args; }
};

ffi::Error TransposableMask(Device device, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return compute(device, TileCall::of("s24_transposable_mask", TileOp::kTransposableMask, w, *out));
}

ffi::Error DoublePrune(Device device, int64_t first, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return compute(device, TileCall::double_prune("s24_double_prune", first, w, *out));
}

S24_TARGET("s24_transposable_mask", TransposableMask);
S24_TARGET("s24_double_prune", DoublePrune, "first");

}  // namespace
}  // namespace s24
