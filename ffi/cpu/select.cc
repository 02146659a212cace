// FFI handlers of masks and pruned arrays.
#include "../call/groupwise.h"
#include "../call/transposable.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"

namespace s24 {
namespace {

constexpr int64_t kGrain = 4096;  // groups of one block: large against the cost of claiming it

ffi::Error run(ffi::ThreadPool& pool, const GroupwiseCall& c) {
  if (c.error.failure()) return c.error;
  const int64_t units = c.first.groups.count();
  parallel_for(pool, c.batch.count() * units, kGrain, [&](int64_t begin, int64_t end) {
    for_each_batch(begin, end, units, [&](int64_t b, int64_t unit0, int64_t unit1) {
      GroupwiseArgs args = c.at(b);
      if (const uint32_t* key = c.key(b)) args.key = {key[0], key[1]};
      kernels().map(args, unit0, unit1);
    });
  });
  return ffi::Error::Success();
}

ffi::Error Mask(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, GroupwiseCall::plain("s24_mask", GroupwiseOp::kMask, trailing, x, *out));
}

ffi::Error Prune(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, GroupwiseCall::plain("s24_prune", GroupwiseOp::kPrune, trailing, x, *out));
}

ffi::Error Soft(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, GroupwiseCall::plain("s24_soft", GroupwiseOp::kSoft, trailing, x, *out));
}

ffi::Error Mvue(ffi::ThreadPool pool, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, GroupwiseCall::mvue("s24_mvue", trailing, exact, key, x, *out));
}

ffi::Error run(ffi::ThreadPool& pool, const TileCall& c) {
  if (c.error.failure()) return c.error;
  if (c.args.cols == 0) return ffi::Error::Success();
  const int64_t grain = ceil_div(kGrain, c.args.cols);  // rows of tiles
  parallel_for(pool, c.args.rows / 4, grain, [&](int64_t b, int64_t e) { kernels().tile(c.args, b, e); });
  return ffi::Error::Success();
}

ffi::Error TransposableMask(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, TileCall::of("s24_transposable_mask", TileOp::kTransposableMask, w, *out));
}

ffi::Error DoublePrune(ffi::ThreadPool pool, int64_t first, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, TileCall::double_prune("s24_double_prune", first, w, *out));
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
