// The plans of cuSPARSELt as ffi/cuda/cusparselt.cc makes and uses them, with a library that watches, S24_FAKE_LIBRARY.
// Prints one line per check: its name, and how many cases were wrong.
#include "../../ffi/cuda/cusparselt.h"

#include <dlfcn.h>

#include <chrono>
#include <thread>
#include <vector>

#include "checks.h"

using namespace s24::cuda;

static void* fake(const char* what) { return dlsym(dlopen(S24_FAKE_LIBRARY, RTLD_NOW), what); }
static int seen(const char* what) { return reinterpret_cast<int (*)()>(fake(what))(); }

static PlanKey product(int64_t cols, int64_t algorithm = -1, const void* bias = nullptr) {
  PlanKey key;
  key.rows = 64, key.depth = 64, key.cols = cols, key.algorithm = algorithm, key.bias = bias;
  return key;
}

static std::string multiply(const PlanKey& key, int64_t workspace = 16) {
  char memory[16];
  return cusparselt_matmul(key, memory, 1 << 20, memory, memory, memory, workspace, nullptr);
}

static bool names(const std::string& error, const std::string& what) { return error.find(what) != std::string::npos; }

static long works, forbidden;  // of the library, and how often a capture would have forbidden it

int main() {
  if (!load_cusparselt(S24_FAKE_LIBRARY).empty()) return 1;

  // A bias at a new address is found as late as in a capture, which allows no memory to be allocated until the thread says
  // that this is no part of it. What the library does afterwards is.
  reinterpret_cast<void (*)(void (*)())>(fake("fake_when_at_work"))([] {
    ++works;
    forbidden += emulated::capture_mode != cudaStreamCaptureModeRelaxed;
  });
  long kept = 0;
  for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal}) {
    emulated::capture_mode = mode;
    char bias;
    kept += !multiply(product(56, -1, &bias + mode)).empty() + (emulated::capture_mode != mode);
    kept += cusparselt_needs(product(56, 99)).error.empty() + (emulated::capture_mode != mode);
    kept += (cusparselt_version() != 1000) + (emulated::capture_mode != mode);
  }
  report("plans made within a capture", kept + forbidden + (works != 3));

  // Numbers that a conversion to 32 bits would make others.
  report("algorithms there are", !cusparselt_needs(product(8, -1)).error.empty() + !cusparselt_needs(product(8, 6)).error.empty());
  long wrong = 0;
  for (const int64_t algorithm : {int64_t(-2), int64_t(8), int64_t(1) << 31, (int64_t(1) << 32) + 3, INT64_MIN})
    wrong += !names(cusparselt_needs(product(8, algorithm)).error, "algorithm=" + std::to_string(algorithm)) ||
             !names(multiply(product(8, algorithm)), "0 to 7");
  report("algorithms there are not", wrong + (seen("fake_chosen") != 6));

  wrong = 0;
  for (const int64_t activation : {int64_t(-1), int64_t(3), int64_t(1) << 32}) {
    PlanKey key = product(8);
    key.activation = Epilogue(activation);
    wrong += !names(cusparselt_needs(key).error, "activation=" + std::to_string(activation));
    wrong += !names(multiply(key), "activation=" + std::to_string(activation));
  }
  report("epilogues there are not", wrong);

  report("a workspace that is too small", !names(multiply(product(8), 15), "the workspace needs 16 bytes, got 15"));

  // A graph may hold the launch of the first for ever.
  wrong = 0;
  const int before = seen("fake_plans");
  char biases[3000];
  for (const char& bias : biases) wrong += !multiply(product(16, -1, &bias)).empty();
  for (const char& bias : biases) wrong += !multiply(product(16, -1, &bias)).empty();
  report("plans that stay", wrong + seen("fake_destroyed") + (seen("fake_plans") != before + 3000));

  // Two products of different plans are under way at once: else the first waits in vain.
  multiply(product(24));
  const auto start = std::chrono::steady_clock::now();
  const int known = seen("fake_products");
  std::thread first([] { multiply(product(32, 7)); });
  while (seen("fake_products") == known) std::this_thread::yield();
  std::thread second([] { multiply(product(24)); });
  second.join();
  first.join();
  report("products that wait for others", std::chrono::steady_clock::now() - start > std::chrono::seconds(4));

  // Of one plan, one at a time; and one plan of several threads that ask for it.
  const int made = seen("fake_plans");
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([] {
      for (int i = 0; i < 20; ++i) multiply(product(40));
    });
  for (std::thread& t : threads) t.join();
  // As where programs are traced by several threads: the library fails in one that has no context.
  bool context = false;
  std::thread([&] {
    cusparselt_needs(product(48));
    context = emulated::has_context;
  }).join();
  report("plans made without a context", !context);
  report("threads in one plan", seen("fake_together") + (seen("fake_plans") != made + 2));
  return 0;
}
