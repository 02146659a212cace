// Packing a matrix along its rows and along its columns.
#include "../call/packed24.h"

#include <algorithm>

namespace s24 {

// In bands of rows, which the second finds in a cache.
ffi::Error compute_both(Device& pool, const PackCall& rows, const PackCall& columns) {
  const Groups& g = columns.groups;
  const int64_t bands = ceil_div(g.len, 4 * kPackTileGroups);
  const bool single = columns.batch.count() == 1 && g.outer == 1 && g.inner % 8 == 0;
  if (rows.error.failure() || columns.error.failure() || !single || bands < 4 * pool.num_threads()) {
    const ffi::Error error = compute(pool, rows);
    return error.failure() ? error : compute(pool, columns);
  }
  const int64_t row_units = pack_units(rows.groups), column_units = pack_units(g) / bands;
  const int64_t row_units_of_band = 4 * kPackTileGroups * (g.inner / 4) / kPackGroups;
  const auto run = kOfUnits<PackArgs>[isa()];
  parallel_for(pool, bands, 1, [&](int64_t begin, int64_t end) {
    for (int64_t band = begin; band < end; ++band) {
      run(rows.at(0), band * row_units_of_band, std::min((band + 1) * row_units_of_band, row_units));
      run(columns.at(0), band * column_units, (band + 1) * column_units);
    }
  });
  return ffi::Error::Success();
}

}  // namespace s24
