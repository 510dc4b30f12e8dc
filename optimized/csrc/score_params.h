// What a score launch is given; needlepoint.optimized.cuda_score_plan says how a plan is made.
#pragma once

#include <cstdint>

#include "rows.cuh"

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
  const int32_t* limits;        // [rows]: keys [0, limit) of its request are seen
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
  int32_t columns;              // keys of the widest request: columns of the output
  int32_t span;                 // keys of one block
  float* out;                   // [rows, columns]
  int64_t out_stride;           // elements between rows
};

}  // namespace needlepoint
