// What a score launch is given; needlepoint.optimized.cuda.score_plan says how a plan is made.
#pragma once

#include <cstdint>

#include "common/row_formats.cuh"
#include "launch/launch.h"

namespace needlepoint {

// Up to eight warps' worth of query rows of one request: the rows that one block keeps.
struct alignas(16) ScoreGroup {
  int32_t row;      // first query row
  int32_t count;    // rows
  int32_t request;  // row of the page table
  int32_t unused;
};

struct ScoreParams {
  const uint8_t* queries;       // [rows, heads, bytes of a query row]
  const uint8_t* query_scales;  // fp4: UE8M0 [rows, heads, 4]
  const float* weights;         // [rows, heads]
  const int32_t* context_lens;  // [rows]: keys [0, context_len) of its request are seen
  const ScoreGroup* groups;     // [num_groups]
  const uint8_t* keys;          // pages, or rows when there is no table
  const uint8_t* key_scales;    // first scale of page 0; unused for bf16
  const int32_t* table;         // pages of each request, null: ragged keys
  const int64_t* starts;        // ragged: [requests], row of each request's first key
  int64_t page_stride;          // bytes between pages of values
  int64_t scale_stride;         // bytes between pages of scales
  int64_t table_stride;         // elements between rows of the table
  int32_t pages;                // pages of the pool
  int32_t page_shift;           // log2 of the rows of a page; a page has at least 8
  int32_t heads;
  int32_t num_groups;
  int32_t columns;     // keys of the widest request: columns of the output
  int32_t span;        // keys of one block
  float* out;          // [rows, columns]
  int64_t out_stride;  // elements between rows
};

// `keys` is a pool of pages if there is a table, else rows, which begin at `starts`. What is
// written differs: scores, or lists of the best of them.
template <class Arguments>
ScoreParams score_params(const Arguments& a, const TensorView& out) {
  ScoreParams p;
  p.queries = address<const uint8_t>(a.queries);
  p.query_scales = address<const uint8_t>(a.query_scales);
  p.weights = address<const float>(a.weights);
  p.context_lens = address<const int32_t>(a.context_lens);
  p.groups = address<const ScoreGroup>(a.groups);
  p.keys = address<const uint8_t>(a.keys);
  p.key_scales = address<const uint8_t>(a.key_scales);
  p.table = address<const int32_t>(a.table);
  p.starts = address<const int64_t>(a.starts);
  p.page_stride = a.keys.stride(0);
  p.scale_stride = a.key_scales.stride(0);
  p.table_stride = a.table.stride(0);
  p.pages = static_cast<int32_t>(a.keys.size(0));
  p.page_shift = static_cast<int32_t>(a.page_shift);
  p.heads = static_cast<int32_t>(a.weights.size(1));
  p.num_groups = static_cast<int32_t>(a.groups.size(0));
  p.columns = static_cast<int32_t>(a.columns);
  p.span = static_cast<int32_t>(a.span);
  p.out = address<float>(out);
  p.out_stride = out.stride(0);
  return p;
}

// Pieces of work: a group of rows and a span of columns.
inline int64_t pieces_of(const ScoreParams& p) {
  return (static_cast<int64_t>(p.columns) + p.span - 1) / p.span * p.num_groups;
}

}  // namespace needlepoint
