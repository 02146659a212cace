// FFI handlers of V:N:M arrays.
#include <algorithm>
#include <cstring>

#include "../call/matmul_vnm.h"
#include "../call/packed_vnm.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "scratch.h"
#include "sampled_call.h"

namespace s24 {
namespace {

constexpr int64_t kMostUnits = 32;  // of a task: several strips, of which each is fetched while its predecessor is packed

ffi::Error run(ffi::ThreadPool& pool, const VnmCall& c) {
  if (c.error.failure()) return c.error;
  const int64_t units = vnm_units(c.shared);
  if (units == 0) return ffi::Error::Success();
  const int64_t all = c.batch.count() * units;
  const int64_t grain = std::clamp<int64_t>(all / (8 * pool.num_threads()), 1, kMostUnits);
  parallel_for(pool, all, grain, [&](int64_t begin, int64_t end) {
    for_each_batch(begin, end, units,
                   [&](int64_t b, int64_t unit0, int64_t unit1) { kernels().vnm(c.at(b), unit0, unit1); });
  });
  return ffi::Error::Success();
}

ffi::Error VnmMask(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, int64_t exact, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> mask) {
  return run(pool, VnmCall::select("s24_vnm_mask", trailing, v, m, exact, x, *mask));
}

ffi::Error VnmPack(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, int64_t exact, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata,
                   ffi::Result<ffi::AnyBuffer> columns) {
  return run(pool, VnmCall::pack("s24_vnm_pack", trailing, v, m, exact, x, {*values, *metadata, *columns}));
}

ffi::Error VnmPackMasked(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer x,
                         ffi::AnyBuffer mask, ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata,
                         ffi::Result<ffi::AnyBuffer> columns) {
  return run(pool, VnmCall::pack_masked("s24_vnm_pack_masked", trailing, v, m, x, mask, {*values, *metadata, *columns}));
}

ffi::Error VnmGather(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer x,
                     ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> values) {
  return run(pool, VnmCall::gather("s24_vnm_gather", trailing, v, m, x, {*values, metadata, columns}));
}

ffi::Error VnmUnpack(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer values,
                     ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> dense) {
  return run(pool, VnmCall::unpack("s24_vnm_unpack", trailing, v, m, {values, metadata, columns}, *dense));
}

ffi::Error VnmMatmul(ffi::ThreadPool pool, int64_t v, int64_t m, int64_t dense_k_last, int64_t out_packed_last,
                     ffi::AnyBuffer values, ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::AnyBuffer dense,
                     ffi::Result<ffi::AnyBuffer> out) {
  const VnmMatmulCall c = VnmMatmulCall::of("s24_vnm_matmul", v, m, dense_k_last, out_packed_last,
                                      {values, metadata, columns}, dense, *out);
  if (c.error.failure()) return c.error;
  if (c.empty()) return ffi::Error::Success();
  const MatmulArgs& p = c.args.product;
  if (p.depth == 0) {
    std::memset(p.out, 0, size_t(c.batch.count() * c.out_bytes()));
    return ffi::Error::Success();
  }
  // Many rows share a panel; few enough that every thread has work. The result does not depend on them.
  int64_t height = (p.depth > kVnmMatmulDepth ? kVnmMatmulRows / 2 : kVnmMatmulRows) / v * v;
  const int64_t col_blocks = ceil_div(p.cols, kVnmMatmulCols);
  while (height > v && c.batch.count() * col_blocks * ceil_div(p.rows, height) < 4 * pool.num_threads())
    height = ceil_div(height / v, 2) * v;
  const int64_t row_blocks = ceil_div(p.rows, height), tasks = row_blocks * col_blocks;
  return parallel_for_with_scratch(c.target, pool, c.batch.count() * tasks, [&](int64_t begin, int64_t end, void* scratch) {
    for_each_batch(begin, end, tasks, [&](int64_t b, int64_t task0, int64_t task1) {
      const VnmMatmulArgs one = c.at(b);
      for (int64_t t = task0; t < task1; ++t) {
        const int64_t row0 = t % row_blocks * height, col0 = t / row_blocks * kVnmMatmulCols;
        kernels().vnm_matmul(one, {row0, std::min(p.rows, row0 + height), col0, std::min(p.cols, col0 + kVnmMatmulCols)},
                             scratch);
      }
    });
  });
}

ffi::Error VnmSampled(ffi::ThreadPool pool, int64_t v, int64_t m, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer metadata,
                      ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> values) {
  const SampledCall c = SampledCall::of("s24_vnm_sampled", v, m, a, b, {*values, metadata, columns});
  if (c.error.failure()) return c.error;
  const SampledArgs& p = c.args;
  const int64_t height = std::min(v, kSampledRows), per_block = ceil_div(v, height), strips = p.rows / v * per_block;
  const int64_t groups = p.cols / m, tasks = strips * ceil_div(groups, kSampledGroups);
  if (tasks == 0) return ffi::Error::Success();
  return parallel_for_with_scratch(c.target, pool, c.batch.count() * tasks, [&](int64_t begin, int64_t end, void* scratch) {
    for_each_batch(begin, end, tasks, [&](int64_t n, int64_t task0, int64_t task1) {
      const SampledArgs one = c.at(n);
      for (int64_t t = task0; t < task1; ++t) {
        // Strips that follow each other need other rows of B, but of the same part of it.
        const int64_t strip = t % strips, block = strip / per_block * v, row0 = block + strip % per_block * height;
        const int64_t group0 = t / strips * kSampledGroups;
        kernels().sampled(one, row0, std::min(block + v, row0 + height), group0, std::min(groups, group0 + kSampledGroups),
                          scratch);
      }
    });
  });
}

#define S24_VNM_BINDING \
  ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<int64_t>("trailing").Attr<int64_t>("v").Attr<int64_t>("m")

XLA_FFI_DEFINE_HANDLER(kVnmMask, VnmMask, S24_VNM_BINDING.Attr<int64_t>("exact").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kVnmPack, VnmPack,
                       S24_VNM_BINDING.Attr<int64_t>("exact")
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kVnmPackMasked, VnmPackMasked,
                       S24_VNM_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kVnmGather, VnmGather,
                       S24_VNM_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kVnmUnpack, VnmUnpack,
                       S24_VNM_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kVnmMatmul, VnmMatmul,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Attr<int64_t>("v")
                           .Attr<int64_t>("m")
                           .Attr<int64_t>("dense_k_last")
                           .Attr<int64_t>("out_packed_last")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER(kVnmSampled, VnmSampled,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Attr<int64_t>("v")
                           .Attr<int64_t>("m")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

}  // namespace

const Target kVnmTargets[] = {{"s24_vnm_mask", kVnmMask},
                              {"s24_vnm_pack", kVnmPack},
                              {"s24_vnm_pack_masked", kVnmPackMasked},
                              {"s24_vnm_gather", kVnmGather},
                              {"s24_vnm_unpack", kVnmUnpack},
                              {"s24_vnm_matmul", kVnmMatmul},
                              {"s24_vnm_sampled", kVnmSampled},
                              {nullptr, nullptr}};

}  // namespace s24
