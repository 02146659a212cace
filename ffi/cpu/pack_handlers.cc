// FFI handlers of packing and unpacking.
#include <algorithm>

#include "calls.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"

namespace s24 {
namespace {

constexpr int64_t kLeastGroups = 4096, kMostGroups = 32768;  // of a task: a kernel fetches ahead only within it

ffi::Error run(ffi::ThreadPool& pool, const PackCall& c) {
  if (c.error.failure()) return c.error;
  if (c.rows != 0)
    return ffi::Error::InvalidArgument(std::string(c.target) + ": compressed matrices of cuSPARSELt are for CUDA");
  const int64_t units = pack_units(c.groups);
  if (units == 0) return ffi::Error::Success();
  const int64_t per_unit = c.groups.inner == 1 ? kPackGroups : kPackTileGroups * kPackTileLanes;
  const int64_t all = c.batch.count() * units;
  const int64_t grain =
      std::clamp(all / (8 * pool.num_threads()), ceil_div(kLeastGroups, per_unit), ceil_div(kMostGroups, per_unit));
  parallel_for(pool, all, grain, [&](int64_t begin, int64_t end) {
    for_each_batch(begin, end, units, [&](int64_t b, int64_t unit0, int64_t unit1) {
      PackArgs args = c.at(b);
      if (const uint32_t* key = c.key(b)) args.key = {key[0], key[1]};
      kernels().pack(args, unit0, unit1);
    });
  });
  return ffi::Error::Success();
}

ffi::Error Pack(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                ffi::Result<ffi::AnyBuffer> metadata) {
  return run(pool, PackCall::plain("s24_pack", PackOp::kPlain, trailing, x, *values, *metadata));
}

ffi::Error SquaredReluPack(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                           ffi::Result<ffi::AnyBuffer> metadata) {
  return run(pool, PackCall::plain("s24_squared_relu_pack", PackOp::kSquaredRelu, trailing, x, *values, *metadata));
}

ffi::Error PackMasked(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                      ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run(pool, PackCall::masked("s24_pack_masked", trailing, x, mask, *values, *metadata));
}

ffi::Error MvuePack(ffi::ThreadPool pool, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                    ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run(pool, PackCall::mvue("s24_mvue_pack", trailing, exact, key, x, *values, *metadata));
}

ffi::Error Gather(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> values) {
  return run(pool, PackCall::gather("s24_gather", trailing, x, metadata, *values));
}

ffi::Error Unpack(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer values, ffi::AnyBuffer metadata,
                  ffi::Result<ffi::AnyBuffer> dense) {
  return run(pool, PackCall::unpack("s24_unpack", trailing, values, metadata, *dense));
}

#define S24_PACK_BINDING ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<int64_t>("trailing")

XLA_FFI_DEFINE_HANDLER(kPack, Pack, S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kSquaredReluPack, SquaredReluPack,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kPackMasked, PackMasked,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kMvuePack, MvuePack,
                       S24_PACK_BINDING.Attr<int64_t>("exact")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kGather, Gather,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kUnpack, Unpack,
                       S24_PACK_BINDING.Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

}  // namespace

const Target kPackTargets[] = {{"s24_pack", kPack},
                               {"s24_squared_relu_pack", kSquaredReluPack},
                               {"s24_pack_masked", kPackMasked},
                               {"s24_mvue_pack", kMvuePack},
                               {"s24_gather", kGather},
                               {"s24_unpack", kUnpack},
                               {nullptr, nullptr}};

}  // namespace s24
