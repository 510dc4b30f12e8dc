// Top-k of few or long rows: a cluster of blocks reads a row, each a part of its columns.
//
// Every block gives all of them the keys that it found a threshold's candidates with, so that they
// agree on the threshold without a leader. Each gathers what reaches it; the first block then takes
// the lists of all, which in order of blocks are in order of columns, and selects.
#pragma once

#include "topk.cuh"

namespace needlepoint {

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where another block of the cluster has what this one has at a shared address.
__device__ __forceinline__ uint32_t peer_address(const void* own, int peer) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(peer));
  return address;
}

__device__ __forceinline__ void store_peer(uint32_t address, uint32_t word) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ uint32_t load_peer(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

__device__ __forceinline__ uint2 load_peer_pair(uint32_t address) {
  uint2 pair;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(pair.x), "=r"(pair.y)
               : "r"(address)
               : "memory");
  return pair;
}

template <int kThreads, int kResident_, int kBlocks_, int kKeys_, int kCapacity_>
struct ClusterTraits {
  using Select = BlockSelect<kThreads>;
  using Gather = needlepoint::Gather<Select>;
  static constexpr int kResident = kResident_;
  static constexpr int kBlocks = kBlocks_;  // of a cluster
  static constexpr int kColumns = kBlocks * Gather::kColumns;
  static constexpr int kKeys = kKeys_;  // of a thread
  static constexpr int kAllKeys = kBlocks * kThreads * kKeys;
  static constexpr int kCapacity = kCapacity_;
  static constexpr int kFetchers = kThreads / kBlocks;  // threads that fetch a block's list
  static_assert(kFetchers % 32 == 0, "whole warps");

  struct Shared {
    typename Select::Shared select;
    typename Gather::Shared gather;
    int count;
    union {  // the threshold is known before anything is gathered
      uint32_t keys[kAllKeys];
      uint2 list[kCapacity];
    };
  };
  static constexpr int kSharedBytes = sizeof(Shared);
};

// k up to 1,024, rows up to 32,768.
using TopkFew = ClusterTraits<512, 2, 2, 2, 4096>;

// The keys of all blocks of the cluster.
template <class T>
struct ClusterKeys {
  const uint32_t* keys;

  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
    for (int i = 0; i < T::kAllKeys; i += T::Select::kThreads) f(keys[i + threadIdx.x], i);
  }
};

// A threshold that k numbers of the row reach, the same in every block.
template <class T>
__device__ __forceinline__ float cluster_threshold(
    const uint32_t (&keys)[T::kKeys], int k, typename T::Shared& shared) {
  constexpr int kThreads = T::Select::kThreads;
  const int place = cluster_rank() * T::kKeys * kThreads + threadIdx.x;
  cluster_wait();  // the others run
#pragma unroll
  for (int peer = 0; peer < T::kBlocks; ++peer) {
    const uint32_t to = peer_address(shared.keys + place, peer);
#pragma unroll
    for (int i = 0; i < T::kKeys; ++i) store_peer(to + 4 * i * kThreads, keys[i]);
  }
  cluster_arrive();
  cluster_wait();
  const ClusterKeys<T> all{shared.keys};
  return threshold_of(T::Select::find_roughly(all, k, k / 2, shared.select));
}

// Appends the lists of the other blocks to the first block's; returns the count of all, more than
// the capacity if they do not fit.
template <class T>
__device__ __forceinline__ int fetch_lists(typename T::Shared& shared) {
  const int lane = threadIdx.x % 32, peer = threadIdx.x / T::kFetchers;
  int count = 0;
  if (lane < T::kBlocks) count = load_peer(peer_address(&shared.count, lane));
  const int total = __reduce_add_sync(0xffffffffu, count);
  if (total > T::kCapacity) return total;
  const int before = __reduce_add_sync(0xffffffffu, lane < peer ? count : 0);
  const int own = __shfl_sync(0xffffffffu, count, peer);
  if (peer == 0) return total;
  const uint32_t from = peer_address(shared.list, peer);
#pragma unroll 2
  for (int i = threadIdx.x % T::kFetchers; i < own; i += T::kFetchers) {
    shared.list[before + i] = load_peer_pair(from + 8 * i);
  }
  return total;
}

template <class T>
__global__ __cluster_dims__(T::kBlocks, 1, 1)
    __launch_bounds__(T::Select::kThreads, T::kResident) void topk_cluster_kernel(
        const __grid_constant__ TopkParams p) {
  using Select = typename T::Select;
  using Gather = typename T::Gather;
  extern __shared__ __align__(16) uint8_t raw[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(raw);
  wait_for_predecessor();
  const TopkRow row(p, blockIdx.x / T::kBlocks);
  if (row.columns <= p.k) {
    if (cluster_rank() == 0) row.pick_all(Select::kThreads);
    return;
  }
  cluster_arrive();
  const int part = ((row.columns + 3) / 4 + T::kBlocks - 1) / T::kBlocks * 4;
  const int begin = min(cluster_rank() * part, row.columns);
  const int end = min(begin + part, row.columns);
  Numbers x;
  uint32_t keys[T::kKeys];
  Gather::load(row.numbers(), end, begin, x);
  group_keys(x, keys);
  const float threshold = cluster_threshold<T>(keys, p.k, shared);
  const uint32_t wanted = Gather::wanted(x, end, begin, threshold);
  int count = Gather::append(x, wanted, begin, shared.list, 0, T::kCapacity, 0, shared.gather);
  release_successor();
  if (threadIdx.x == 0) shared.count = count;
  cluster_arrive();
  cluster_wait();
  if (cluster_rank() == 0) count = fetch_lists<T>(shared);
  cluster_arrive();  // nothing is read of the others any more
  cluster_wait();
  if (cluster_rank() != 0) return;
  row.template pick<Select>(shared.list, count, T::kCapacity, shared.select);
}

template <class T>
void run_topk_cluster(const char* name, const TopkParams& p, DLDevice device, bool overlap) {
  if (p.columns > T::kColumns) {
    TVM_FFI_THROW(ValueError) << name << ": " << p.columns << " columns, at most " << T::kColumns;
  }
  if (p.rows == 0 || p.k == 0) return;
  launch_shared(name, topk_cluster_kernel<T>, p, dim3(static_cast<unsigned>(p.rows) * T::kBlocks),
                T::Select::kThreads, T::kSharedBytes, device, overlap);
}

}  // namespace needlepoint
