// A cuSPARSELt that multiplies nothing and watches how it is used: `fake_*` say what it saw.
//
// It has the functions of the real one that are called, with handles and structures that hold a number. A product of an
// algorithm kWaits waits, as long as a test's patience, until another product has begun.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace {

constexpr int kAlgorithms = 8, kWaits = 7, kUnsupported = 10;
constexpr size_t kWorkspace = 16;
constexpr int64_t kPadded = S24_PADDED_ROWS;  // to a multiple of which rows of metadata are padded

std::atomic<int> plans{0}, destroyed{0}, products{0}, together{0}, chosen{-1};
void (*at_work)() = [] {};

struct Structure {
  int64_t rows, cols;
  int algorithm;
  std::atomic<int> users;
};

Structure& at(const void* p) { return *static_cast<Structure*>(const_cast<void*>(p)); }

}  // namespace

#define S24_FAKE extern "C" __attribute__((visibility("default")))

S24_FAKE int fake_plans() { return plans; }
S24_FAKE int fake_destroyed() { return destroyed; }
S24_FAKE int fake_products() { return products; }
S24_FAKE int fake_together() { return together; }  // whether two threads were in one plan
S24_FAKE int fake_chosen() { return chosen; }      // the algorithm asked for last

S24_FAKE void fake_when_at_work(void (*f)()) { at_work = f; }  // is called where the real one may allocate memory

S24_FAKE int cusparseLtInit(void*) { return at_work(), 0; }
S24_FAKE int cusparseLtGetVersion(const void*, int* version) { return *version = 1000, 0; }
S24_FAKE int cusparseLtDenseDescriptorInit(const void*, void* d, int64_t rows, int64_t cols, int64_t, uint32_t, int, int) {
  at(d).rows = rows, at(d).cols = cols;
  return 0;
}
S24_FAKE int cusparseLtStructuredDescriptorInit(const void*, void* d, int64_t rows, int64_t cols, int64_t, uint32_t, int, int,
                                                int) {
  at(d).rows = rows, at(d).cols = cols;
  return rows % 16 == 0 && cols % 32 == 0 ? 0 : kUnsupported;
}
S24_FAKE int cusparseLtMatDescriptorDestroy(const void*) { return 0; }
S24_FAKE int cusparseLtMatmulDescriptorInit(const void*, void*, int, int, const void*, const void*, const void*, const void*, int) {
  return 0;
}
S24_FAKE int cusparseLtMatmulDescSetAttribute(const void*, void*, int, const void*, size_t) { return 0; }
S24_FAKE int cusparseLtMatmulAlgSelectionInit(const void*, void* s, const void*, int) { return at(s).algorithm = -1, 0; }
S24_FAKE int cusparseLtMatmulAlgSelectionDestroy(const void*) { return 0; }
S24_FAKE int cusparseLtMatmulAlgSetAttribute(const void*, void* s, int, const void* value, size_t) {
  at(s).algorithm = *static_cast<const int*>(value);
  chosen = at(s).algorithm;
  return 0;
}
S24_FAKE int cusparseLtMatmulAlgGetAttribute(const void*, const void*, int, void* value, size_t) {
  return *static_cast<int*>(value) = kAlgorithms, 0;
}
S24_FAKE int cusparseLtMatmulPlanInit(const void*, void* plan, const void*, const void* selection) {
  at_work();
  at(plan).algorithm = at(selection).algorithm;
  at(plan).users = 0;
  ++plans;
  return 0;
}
S24_FAKE int cusparseLtMatmulPlanDestroy(const void*) { return ++destroyed, 0; }
S24_FAKE int cusparseLtMatmulGetWorkspace(const void*, const void*, size_t* bytes) { return *bytes = kWorkspace, 0; }
S24_FAKE int cusparseLtSpMMACompressedSize2(const void*, const void* sparse, size_t* bytes, size_t* temporary) {
  const int64_t padded = (at(sparse).rows + kPadded - 1) / kPadded * kPadded;
  *bytes = size_t(at(sparse).rows * at(sparse).cols + padded * at(sparse).cols / 8);  // of 16-bit values
  return *temporary = 0, 0;
}
S24_FAKE int cusparseLtMatmul(const void*, const void* plan, const void*, const void*, const void*, const void*, const void*, void*,
                              void*, void*, int32_t) {
  Structure& p = at(plan);
  if (++p.users > 1) together = 1;
  const int before = products++;
  if (p.algorithm == kWaits) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (products == before + 1 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  --p.users;
  return 0;
}
