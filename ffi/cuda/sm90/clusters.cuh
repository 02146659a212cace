// Kernels for Hopper whose blocks stay for several tiles: the order of stages and tiles, and clusters of blocks, which run at the
// same time and reach each other's shared memory.
#pragma once
#include "barriers.cuh"

namespace s24 {
namespace cuda {

// The stages in their order. Whoever fills them and whoever empties them each has such a place.
template <int kStages>
struct StagePlace {
  int stage = 0, round = 0;  // round: modulo 2
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, round ^= 1;
  }
  __device__ __forceinline__ int before() const { return (stage == 0 ? kStages : stage) - 1; }  // the stage
};

// The tiles of the result, S::kRows x S::kCols, in their order: bands of so many side by side, in each band row by row.
template <class S>
struct Tiles {
  int down, across, side_by_side;
  __host__ __device__ __forceinline__ int count() const { return down * across; }

  __device__ __forceinline__ void at(int tile, int64_t* row, int64_t* column) const {
    const int first = tile / (down * side_by_side) * side_by_side, width = min(across - first, side_by_side);
    const int rest = tile - first * down;
    *row = int64_t(rest / width) * S::kRows;
    *column = int64_t(first + rest % width) * S::kCols;
  }
};

// Begins the barriers of stages that the last S::kCopying warps of a block fill, lane by lane, and the S::kMultiplying warps
// before them empty, warp by warp. All threads of the block meet.
template <class S, class Stages>
__device__ __forceinline__ void begin_stages(Stages& shared) {
  if (threadIdx.x < S::kStages) {
    init_barrier(&shared.full[threadIdx.x], 32 * S::kCopying);
    init_barrier(&shared.empty[threadIdx.x], S::kMultiplying);
  }
  __syncthreads();
}

// How many multiprocessors the current device has.
inline cudaError_t count_multiprocessors(int* multiprocessors) {
  int device = 0;
  const cudaError_t e = cudaGetDevice(&device);
  return e != cudaSuccess ? e : cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device);
}

// Whether this device runs a kernel's machine code for sm_90a. Hopper does, but not if the driver compiles PTX in its place
// (CUDA_FORCE_PTX_JIT=1): that is of an older architecture, without wgmma.
template <class... P>
bool runs_on_sm90(void (*kernel)(P...)) {
  cudaFuncAttributes code;
  return compute_capability() / 10 == 9 && cudaFuncGetAttributes(&code, kernel) == cudaSuccess && code.ptxVersion >= 90;
}

#if defined(__CUDACC__)
// The number of this block in its cluster.
__device__ __forceinline__ int block_of_cluster() {
  int block;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
  return block;
}

// All threads of the cluster meet.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// Other blocks, and copies, see the barriers of this one as they are begun. Before sync_cluster.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives at the same barrier of a block of the cluster. Not `.cluster` scope, which would be a fence of all memory.
__device__ __forceinline__ void arrive_at(Barrier* b, int block) {
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(
                   shared_address(b)),
               "r"(block)
               : "memory");
}

inline cudaLaunchConfig_t cluster_launch(cudaLaunchAttribute* cluster, int blocks, int grid, int threads, size_t shared,
                                         cudaStream_t stream) {
  cluster->id = cudaLaunchAttributeClusterDimension;
  cluster->val.clusterDim = {unsigned(blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(grid)), config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = cluster, config.numAttrs = 1;
  return config;
}

// How many clusters of so many blocks run at a time.
template <class... P>
cudaError_t clusters_at_a_time(void (*kernel)(P...), int blocks, int threads, size_t shared, int* clusters) {
  cudaLaunchAttribute cluster;
  const cudaLaunchConfig_t config = cluster_launch(&cluster, blocks, blocks, threads, shared, nullptr);
  return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
}

// Launches so many clusters.
template <class... P, class... A>
cudaError_t start_clusters(void (*kernel)(P...), int clusters, int blocks, int threads, size_t shared, cudaStream_t stream,
                           const A&... args) {
  cudaLaunchAttribute cluster;
  const cudaLaunchConfig_t config = cluster_launch(&cluster, blocks, clusters * blocks, threads, shared, stream);
  return cudaLaunchKernelEx(&config, kernel, args...);
}
#else  // the tests give them a meaning on a CPU
int block_of_cluster();
void sync_cluster();
inline void publish_barriers() {}
void arrive_at(Barrier* b, int block);
template <class... P>
cudaError_t clusters_at_a_time(void (*kernel)(P...), int blocks, int threads, size_t shared, int* clusters);
template <class... P, class... A>
cudaError_t start_clusters(void (*kernel)(P...), int clusters, int blocks, int threads, size_t shared, cudaStream_t stream,
                           const A&... args);
#endif

// How many clusters of so many blocks a kernel has at a time, asked once for each device that a thread uses, because the answer
// takes longer than a launch.
template <auto kernel>
cudaError_t clusters_here(int blocks, int threads, size_t shared, int* clusters) {
  static thread_local int known_device = -1, known = 0;
  int device = 0;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess && device != known_device) {
    e = clusters_at_a_time(kernel, blocks, threads, shared, &known);
    if (e == cudaSuccess) known_device = device;
  }
  *clusters = known;
  return e == cudaSuccess && known == 0 ? cudaErrorInvalidConfiguration : e;
}

}  // namespace cuda
}  // namespace s24
