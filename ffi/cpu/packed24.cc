// Handlers of packing to 2:4, unpacking and gathering.
#include <algorithm>

#include "../call/packed24.h"
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
      kernels().packed24(args, unit0, unit1);
    });
  });
  return ffi::Error::Success();
}

// One matrix along its rows and along its columns: in bands of rows, which the second finds in a cache.
ffi::Error run_both(ffi::ThreadPool& pool, const PackCall& rows, const PackCall& columns) {
  const Groups& g = columns.groups;
  const int64_t bands = ceil_div(g.len, 4 * kPackTileGroups);
  const bool single = columns.batch.count() == 1 && g.outer == 1 && g.inner % 8 == 0 && rows.rows + columns.rows == 0;
  if (rows.error.failure() || columns.error.failure() || !single || bands < 4 * pool.num_threads()) {
    const ffi::Error error = run(pool, rows);
    return error.failure() ? error : run(pool, columns);
  }
  const int64_t row_units = pack_units(rows.groups), column_units = pack_units(g) / bands;
  const int64_t row_units_of_band = 4 * kPackTileGroups * (g.inner / 4) / kPackGroups;
  parallel_for(pool, bands, 1, [&](int64_t begin, int64_t end) {
    for (int64_t band = begin; band < end; ++band) {
      kernels().packed24(rows.at(0), band * row_units_of_band, std::min((band + 1) * row_units_of_band, row_units));
      kernels().packed24(columns.at(0), band * column_units, (band + 1) * column_units);
    }
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

ffi::Error SquaredReluPackBoth(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> row_values,
                               ffi::Result<ffi::AnyBuffer> row_metadata, ffi::Result<ffi::AnyBuffer> values,
                               ffi::Result<ffi::AnyBuffer> metadata) {
  constexpr const char* kName = "s24_squared_relu_pack_both";
  return run_both(pool, PackCall::plain(kName, PackOp::kSquaredRelu, 0, x, *row_values, *row_metadata),
                  PackCall::plain(kName, PackOp::kSquaredRelu, 1, x, *values, *metadata));
}

ffi::Error PackMasked(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                      ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return run(pool, PackCall::masked("s24_pack_masked", trailing, x, mask, *values, *metadata));
}

ffi::Error PackMaskedBoth(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer mask,
                          ffi::Result<ffi::AnyBuffer> row_values, ffi::Result<ffi::AnyBuffer> row_metadata,
                          ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  constexpr const char* kName = "s24_pack_masked_both";
  return run_both(pool, PackCall::masked(kName, 0, x, mask, *row_values, *row_metadata),
                  PackCall::masked(kName, 1, x, mask, *values, *metadata));
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

S24_TARGET("s24_pack", Pack, on_pool(takes<1>, gives<2>, "trailing"));
S24_TARGET("s24_squared_relu_pack", SquaredReluPack, on_pool(takes<1>, gives<2>, "trailing"));
S24_TARGET("s24_squared_relu_pack_both", SquaredReluPackBoth, on_pool(takes<1>, gives<4>));
S24_TARGET("s24_pack_masked", PackMasked, on_pool(takes<2>, gives<2>, "trailing"));
S24_TARGET("s24_pack_masked_both", PackMaskedBoth, on_pool(takes<2>, gives<4>));
S24_TARGET("s24_mvue_pack", MvuePack, on_pool(takes<2>, gives<2>, "trailing", "exact"));
S24_TARGET("s24_gather", Gather, on_pool(takes<2>, gives<1>, "trailing"));
S24_TARGET("s24_unpack", Unpack, on_pool(takes<2>, gives<1>, "trailing"));

}  // namespace
}  // namespace s24
