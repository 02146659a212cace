// The kernels that write metadata in the order of libraries, against the closed forms.
// Prints one line per check: its name, and how many bytes were wrong.
#include "../../ffi/cuda/sm90/metadata_layouts.h"

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/cuda/launch.h"

using namespace s24;

// Nibble by nibble; padding in rows beyond the last.
template <class Layout, class Launch>
static void check(const char* width, int64_t rows, int64_t depth, Layout layout, Launch launch) {
  std::mt19937 random_bits(24);
  const int64_t padded = ceil_div(rows, 64) * 64;
  std::vector<uint8_t> metadata(size_t(rows * depth / 8)), want(size_t(padded * depth / 8)), got(want.size());
  for (uint8_t& byte : metadata) byte = uint8_t(random_bits());
  for (int64_t m = 0; m < padded; ++m) {
    for (int64_t q = 0; q < depth / 4; ++q) {
      const int nibble = m < rows ? metadata[size_t(m * depth / 8 + q / 2)] >> (4 * (q % 2)) & 15 : kPaddingNibble;
      const int64_t at = layout(m, q, depth);
      want[size_t(at / 2)] = uint8_t(want[size_t(at / 2)] | nibble << (4 * (at % 2)));
    }
  }
  long wrong = launch(metadata.data(), got.data(), rows, depth, nullptr) != cudaSuccess;
  for (size_t i = 0; i < want.size(); ++i) wrong += got[i] != want[i];
  std::printf("cuSPARSELt metadata %s of %d x %d %ld\n", width, int(rows), int(depth), wrong);
}

int main() {
  // Parts of tiles of 64 rows and 512 columns, and whole ones.
  for (const auto& [rows, depth] : {std::pair{16, 64}, {80, 192}, {72, 576}, {192, 1024}}) {
    check("16 bit", rows, rows == 16 ? 32 : depth, cusparselt_sm90_16bit, cuda::launch_metadata_sm90_16bit);
    check("8 bit", rows, depth, cusparselt_sm90_8bit, cuda::launch_metadata_sm90_8bit);
  }
  return 0;
}
