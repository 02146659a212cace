// FFI handlers of masks and pruned arrays.
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error run_map(const char* target, cudaStream_t stream, MapOp op, const ffi::AnyBuffer& x, int64_t trailing,
                   ffi::AnyBuffer& out) {
  Check check(target);
  const Dtype dtype = check.dtype("x", x);
  const Dims dims = dims_of(x);
  const GroupShape g = GroupShape::of(check, dims, trailing);
  check.shape("the result", out, dims);
  if (op == MapOp::kMask)
    check.type("the result", out, ffi::DataType::PRED, "bool");
  else
    check.require(out.element_type() == x.element_type(), "the result must have the dtype of x");
  if (!check.ok()) return check.error();
  const Groups groups = {product(g.lead, 0, g.lead.size()), g.len, g.inner_size()};
  return status(target, launch_map(MapArgs{op, dtype, x.untyped_data(), out.untyped_data(), groups, Key{0, 0}}, nullptr,
                                   stream));
}

ffi::Error Mask(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run_map("s24_mask", stream, MapOp::kMask, x, trailing, *out);
}

ffi::Error Prune(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run_map("s24_prune", stream, MapOp::kPrune, x, trailing, *out);
}

ffi::Error Soft(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run_map("s24_soft", stream, MapOp::kSoft, x, trailing, *out);
}

// key (batch..., 2), x (batch..., shape): the group counter restarts for every batch element.
ffi::Error Mvue(cudaStream_t stream, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> out) {
  Check check("s24_mvue");
  const Dtype dtype = check.dtype("x", x);
  check.type("key", key, ffi::DataType::U32, "uint32");
  check.require(out->element_type() == x.element_type(), "the result must have the dtype of x");
  const KeyedBatch keyed = KeyedBatch::of(check, key, x, trailing);
  check.shape("the result", *out, keyed.group.array(keyed.lead));
  if (!check.ok()) return check.error();
  const Groups groups = {keyed.batch.rest(), keyed.group.len, keyed.group.inner_size()};
  const int64_t bytes = groups.count() * 4 * size_of(dtype);
  const auto* keys = static_cast<const uint32_t*>(key.untyped_data());
  for (int64_t b = 0; b < keyed.batch.count(); ++b) {
    const MapArgs args = {exact ? MapOp::kMvueExact : MapOp::kMvueSequential, dtype,
                          at_bytes(x.untyped_data(), keyed.batch.index(1, b) * bytes),
                          at_bytes(out->untyped_data(), b * bytes), groups, Key{0, 0}};
    const cudaError_t e = launch_map(args, keys + 2 * keyed.batch.index(0, b), stream);
    if (e != cudaSuccess) return status("s24_mvue", e);
  }
  return ffi::Error::Success();
}

ffi::Error run_tile(const char* target, cudaStream_t stream, TileOp op, const ffi::AnyBuffer& w, ffi::AnyBuffer& out) {
  Check check(target);
  const Dtype dtype = check.dtype("w", w);
  const Dims dims = dims_of(w);
  check.shape("the result", out, dims);
  if (op == TileOp::kTransposableMask)
    check.type("the result", out, ffi::DataType::PRED, "bool");
  else
    check.require(out.element_type() == w.element_type(), "the result must have the dtype of w");
  check.require(dims.size() >= 2, "w needs two dimensions, got shape " + text(dims));
  if (!check.ok()) return check.error();
  const int64_t rows = dims[dims.size() - 2], cols = dims.back();
  check.require(rows % 4 == 0 && cols % 4 == 0, "both last dimensions of " + text(dims) + " must be multiples of 4");
  if (!check.ok()) return check.error();
  return status(target, launch_tile(TileArgs{op, dtype, w.untyped_data(), out.untyped_data(),
                                             product(dims, 0, dims.size() - 1), cols},
                                    stream));
}

ffi::Error TransposableMask(cudaStream_t stream, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return run_tile("s24_transposable_mask", stream, TileOp::kTransposableMask, w, *out);
}

ffi::Error DoublePrune(cudaStream_t stream, int64_t first, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return run_tile("s24_double_prune", stream, first == 0 ? TileOp::kPruneColumnsFirst : TileOp::kPruneRowsFirst, w, *out);
}

#define S24_MAP_BINDING ffi::Ffi::Bind().Ctx<Stream>().Attr<int64_t>("trailing").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
#define S24_GRAPH {ffi::Traits::kCmdBufferCompatible}

XLA_FFI_DEFINE_HANDLER(kMask, Mask, S24_MAP_BINDING, S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kPrune, Prune, S24_MAP_BINDING, S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kSoft, Soft, S24_MAP_BINDING, S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kMvue, Mvue,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Attr<int64_t>("trailing")
                           .Attr<int64_t>("exact")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kTransposableMask, TransposableMask,
                       ffi::Ffi::Bind().Ctx<Stream>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(), S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kDoublePrune, DoublePrune,
                       ffi::Ffi::Bind().Ctx<Stream>().Attr<int64_t>("first").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);

}  // namespace

const Target kProducerTargets[] = {{"s24_mask", kMask, nullptr},
                                   {"s24_prune", kPrune, nullptr},
                                   {"s24_soft", kSoft, nullptr},
                                   {"s24_mvue", kMvue, nullptr},
                                   {"s24_transposable_mask", kTransposableMask, nullptr},
                                   {"s24_double_prune", kDoublePrune, nullptr},
                                   {nullptr, nullptr, nullptr}};

}  // namespace cuda
}  // namespace s24
