// Top-k of few rows of up to 32,768 columns: a pair of blocks reads a row, each a half of it.
//
// Where k/2 numbers of each half reach a number, or k of one half, k of the row do: the blocks
// agree on the largest number that this says, so that neither half has many that reach it, also
// where scores rise along the row, as long as k is well below the maxima that a half holds. Each
// gathers what reaches it into the first block's list, the first half up to the middle of the list
// and the second from there on, so that together they are one list in order of columns without a
// copy; the first block selects. A half with more than its share has the row read again.
#pragma once

#include "topk/topk.cuh"

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

// The same for any store: a generic address.
template <class Word>
__device__ __forceinline__ Word* peer_pointer(Word* own, int peer) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(own)), "r"(peer));
  return reinterpret_cast<Word*>(address);
}

template <int kThreads, int kResident_, int kKeys_, int kHalf_>
struct PairTraits {
  using Select = BlockSelect<kThreads>;
  using Gather = needlepoint::Gather<Select>;
  static constexpr int kResident = kResident_;  // blocks a multiprocessor
  static constexpr int kColumns = 2 * Gather::kColumns;
  static constexpr int kKeys = kKeys_;  // that a thread holds to find the threshold
  static constexpr int kHalf = kHalf_;  // of the list

  struct Shared {
    typename Select::Shared select;
    typename Gather::Shared gather;
    uint32_t thresholds[2][2];  // of both halves: what k/2 numbers reach, what k do
    uint32_t step;
    int counts[2];
    uint2 list[2 * kHalf];
  };
  static constexpr int kSharedBytes = sizeof(Shared);
};

// k up to 1,024, rows up to 32,768.
using TopkFew = PairTraits<512, 2, 2, 2048>;

// A number that k of the row reach, the same in both blocks.
template <class T>
__device__ __forceinline__ float pair_threshold(const uint32_t (&keys)[T::kKeys], int k,
                                                typename T::Shared& shared) {
  const HeldKeys<T::kKeys> held{keys};
  const uint2 own =
      T::Select::find_two_roughly(held, (k + 1) / 2, (k + 3) / 4, k, shared.step, shared.select);
  cluster_wait();  // the other one runs
  if (threadIdx.x < 2) {
    const uint32_t both = peer_address(shared.thresholds, threadIdx.x) + 4 * cluster_rank();
    store_peer(both, own.x);
    store_peer(both + 8, own.y);
  }
  cluster_arrive();
  cluster_wait();
  const auto& halves = shared.thresholds[0];
  const auto& alone = shared.thresholds[1];
  return threshold_of(max(min(halves[0], halves[1]), max(alone[0], alone[1])));
}

template <class T>
__global__ __cluster_dims__(2, 1, 1)
    __launch_bounds__(T::Select::kThreads,
                      T::kResident) void topk_pair_kernel(const __grid_constant__ TopkParams p) {
  using Select = typename T::Select;
  using Gather = typename T::Gather;
  extern __shared__ __align__(16) uint8_t raw[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(raw);
  wait_for_predecessor();
  const TopkRow row(p, blockIdx.x / 2);
  const int rank = cluster_rank();
  if (row.columns <= p.k) {
    if (rank == 0) row.pick_all(Select::kThreads);
    return;
  }
  cluster_arrive();
  const int half = ((row.columns + 3) / 4 + 1) / 2 * 4;
  const int begin = rank * half;
  const int end = min(begin + half, row.columns);
  Numbers x;
  uint32_t keys[T::kKeys];
  Gather::load(row.numbers(), end, begin, x);
  group_keys(x, keys);
  const float threshold = pair_threshold<T>(keys, p.k, shared);
  const uint32_t wanted = Gather::wanted(x, end, begin, threshold);
  uint2* middle = (rank == 0 ? shared.list : peer_pointer(shared.list, 0)) + T::kHalf;
  const int count =
      rank == 0
          ? Gather::template append<true>(x, wanted, begin, middle, 0, T::kHalf, 0, shared.gather)
          : Gather::append(x, wanted, begin, middle, 0, T::kHalf, 0, shared.gather);
  release_successor();
  if (threadIdx.x == 0) *(peer_pointer(shared.counts, 0) + rank) = count;
  cluster_arrive();
  if (rank != 0) return;
  cluster_wait();
  const int first = shared.counts[0], second = shared.counts[1];
  const bool fits = max(first, second) <= T::kHalf;
  row.template pick<Select>(shared.list + T::kHalf - first,
                            fits ? first + second : 2 * T::kHalf + 1, 2 * T::kHalf, shared.select);
}

template <class T, class Arguments>
void run_topk_pair(const char* name, const Arguments& a) {
  const TopkParams p = topk_params(a);
  if (p.columns > T::kColumns) {
    TVM_FFI_THROW(ValueError) << name << ": " << p.columns << " columns, at most " << T::kColumns;
  }
  if (p.rows == 0 || p.k == 0) return;
  launch(Call{name, a.scores.device(), a.overlap}, topk_pair_kernel<T>, p,
         dim3(static_cast<unsigned>(p.rows) * 2), T::Select::kThreads, T::kSharedBytes);
}

}  // namespace needlepoint
