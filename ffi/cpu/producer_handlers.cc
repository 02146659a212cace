// FFI handlers of masks and pruned arrays.
#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "shapes.h"

namespace s24 {
namespace {

constexpr int64_t kGrain = 4096;  // groups of one block: large against the cost of claiming it

ffi::Error run_map(Check& check, ffi::ThreadPool& pool, MapOp op, const ffi::AnyBuffer& x, int64_t trailing,
                   ffi::AnyBuffer& out) {
  const Dtype dtype = check.dtype("x", x);
  const Dims dims = dims_of(x);
  const GroupShape g = GroupShape::of(check, dims, trailing);
  check.shape("the result", out, dims);
  if (op == MapOp::kMask)
    check.type("the result", out, ffi::DataType::PRED, "bool");
  else
    check.require(out.element_type() == x.element_type(), "the result must have the dtype of x");
  if (!check.ok()) return check.error();
  const MapArgs args = {op, dtype, x.untyped_data(), out.untyped_data(),
                        Groups{product(g.lead, 0, g.lead.size()), g.len, g.inner_size()}, Key{0, 0}};
  parallel_for(pool, args.groups.count(), kGrain, [&](int64_t b, int64_t e) { kernels().map(args, b, e); });
  return ffi::Error::Success();
}

ffi::Error Mask(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  Check check("s24_mask");
  return run_map(check, pool, MapOp::kMask, x, trailing, *out);
}

ffi::Error Prune(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  Check check("s24_prune");
  return run_map(check, pool, MapOp::kPrune, x, trailing, *out);
}

ffi::Error Soft(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  Check check("s24_soft");
  return run_map(check, pool, MapOp::kSoft, x, trailing, *out);
}

// key (batch..., 2), x (batch..., shape): the group counter restarts for every batch element.
ffi::Error Mvue(ffi::ThreadPool pool, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> out) {
  Check check("s24_mvue");
  const Dtype dtype = check.dtype("x", x);
  check.type("key", key, ffi::DataType::U32, "uint32");
  check.require(out->element_type() == x.element_type(), "the result must have the dtype of x");
  const KeyedBatch keyed = KeyedBatch::of(check, key, x, trailing);
  check.shape("the result", *out, keyed.group.array(keyed.lead));
  if (!check.ok()) return check.error();
  const Groups groups = {keyed.batch.rest(), keyed.group.len, keyed.group.inner_size()};
  const int64_t bytes = groups.count() * 4 * size_of(dtype), units = groups.count();
  const auto* keys = static_cast<const uint32_t*>(key.untyped_data());
  parallel_for(pool, keyed.batch.count() * units, kGrain, [&](int64_t begin, int64_t end) {
    for_each_batch(begin, end, units, [&](int64_t b, int64_t unit0, int64_t unit1) {
      const uint32_t* k = keys + 2 * keyed.batch.index(0, b);
      const MapArgs args = {exact ? MapOp::kMvueExact : MapOp::kMvueSequential, dtype,
                            at_bytes(x.untyped_data(), keyed.batch.index(1, b) * bytes),
                            at_bytes(out->untyped_data(), b * bytes), groups, Key{k[0], k[1]}};
      kernels().map(args, unit0, unit1);
    });
  });
  return ffi::Error::Success();
}

ffi::Error run_tile(Check& check, ffi::ThreadPool& pool, TileOp op, const ffi::AnyBuffer& w, ffi::AnyBuffer& out) {
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
  const TileArgs args = {op, dtype, w.untyped_data(), out.untyped_data(), product(dims, 0, dims.size() - 1), cols};
  if (cols == 0) return ffi::Error::Success();
  const int64_t grain = ceil_div(kGrain, cols);  // rows of tiles
  parallel_for(pool, args.rows / 4, grain, [&](int64_t b, int64_t e) { kernels().tile(args, b, e); });
  return ffi::Error::Success();
}

ffi::Error TransposableMask(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  Check check("s24_transposable_mask");
  return run_tile(check, pool, TileOp::kTransposableMask, w, *out);
}

ffi::Error DoublePrune(ffi::ThreadPool pool, int64_t first, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  Check check("s24_double_prune");
  check.require(first == 0 || first == 1, "first must be 0 or 1, got " + std::to_string(first));
  return run_tile(check, pool, first == 0 ? TileOp::kPruneColumnsFirst : TileOp::kPruneRowsFirst, w, *out);
}

#define S24_MAP_BINDING \
  ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<int64_t>("trailing").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()

XLA_FFI_DEFINE_HANDLER(kMask, Mask, S24_MAP_BINDING);
XLA_FFI_DEFINE_HANDLER(kPrune, Prune, S24_MAP_BINDING);
XLA_FFI_DEFINE_HANDLER(kSoft, Soft, S24_MAP_BINDING);
XLA_FFI_DEFINE_HANDLER(kMvue, Mvue,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Attr<int64_t>("trailing")
                           .Attr<int64_t>("exact")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kTransposableMask, TransposableMask,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kDoublePrune, DoublePrune,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Attr<int64_t>("first")
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

}  // namespace

const Target kProducerTargets[] = {{"s24_mask", kMask},
                                   {"s24_prune", kPrune},
                                   {"s24_soft", kSoft},
                                   {"s24_mvue", kMvue},
                                   {"s24_transposable_mask", kTransposableMask},
                                   {"s24_double_prune", kDoublePrune},
                                   {nullptr, nullptr}};

}  // namespace s24
