// S1 to S7 of docs/specification.md for many windows: optimized/emulation/ (pooling.py, rows.py,
// narrow.py) once more, compiled, for comparisons of millions of rows. Those modules define the
// bytes; the tests hold this file to them.
//
// Compiled with contraction off: an operation is one rounding, std::fma is the only fused one.
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr float kLog2e = 0x1.715476p+0f;
constexpr float kMagic = 12582912.0f;
constexpr float kExp[5] = {0x1.5bda54p-10f, 0x1.3ce8acp-7f, 0x1.c6b6d8p-5f, 0x1.ebf9c2p-3f,
                           0x1.62e42ap-1f};
constexpr float kHadamard = 0x1.6a09e6p-4f;
constexpr float kFloor = 0x1.a36e2ep-14f;
constexpr float kFloorFp4 = 0x1.8p-124f;
constexpr float kInverse448 = 0x1.24924ap-9f;
constexpr float kInverse6 = 0x1.555556p-3f;
constexpr int kGroup = 8;
constexpr int kRopeDims = 64;

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
float number(uint32_t x) { return std::bit_cast<float>(x); }
float larger(float a, float b) { return a > b ? a : b; }

float exp2_weight(float z, float m) {
  const float t = larger(z - m, -126.0f);
  const float r = t + kMagic;
  const float f = t - (r - kMagic);
  float p = std::fma(f, kExp[0], kExp[1]);
  p = std::fma(f, p, kExp[2]);
  p = std::fma(f, p, kExp[3]);
  p = std::fma(f, p, kExp[4]);
  p = std::fma(f, p, 1.0f);
  return number(bits(p) + (bits(r) << 23));
}

float widen(const float* source, int64_t i) { return source[i]; }
float widen(const uint16_t* source, int64_t i) { return number(uint32_t{source[i]} << 16); }

// Adjacent pairs of `count` rows of `width` numbers; the result is row 0.
void tree(float* x, int count, int width) {
  for (; count > 1; count /= 2) {
    for (int i = 0; i < count / 2; ++i) {
      for (int c = 0; c < width; ++c) {
        x[i * width + c] = x[2 * i * width + c] + x[(2 * i + 1) * width + c];
      }
    }
  }
}

struct Rows {
  int ratio, dim;
  int64_t stride;          // elements between tokens of kv and of score
  const int64_t* tokens;   // [windows, slots]: row of each slot, negative: masked
  const int64_t* entries;  // [windows]: number of the entry, which fixes its RoPE position
  const float* ape;        // prescaled
  const float* norm_weight;
  const float* rope;
  float eps;
};

template <class Element>
struct Pooler {
  const Rows& job;
  const Element *kv, *score;
  std::vector<float> z, m, sums, weighted;

  Pooler(const Rows& job, const Element* kv, const Element* score)
      : job(job), kv(kv), score(score) {
    const int slots = job.ratio == 4 ? 8 : job.ratio;
    z.resize(slots * job.dim);
    m.resize(job.dim);
    sums.resize(slots / kGroup * job.dim);
    weighted.resize(slots / kGroup * job.dim);
  }

  // S1 to S3 of one window into `out`.
  void run(int64_t window, float* out) {
    const int d = job.dim, slots = job.ratio == 4 ? 8 : job.ratio;
    const int width = job.ratio == 4 ? 2 * d : d;
    const int64_t* tokens = job.tokens + window * slots;
    for (int c = 0; c < d; ++c) m[c] = -INFINITY;
    for (int j = 0; j < slots; ++j) {
      if (tokens[j] < 0) continue;
      const int column = slots == 8 && j >= 4 ? d : 0;
      const Element* row = score + tokens[j] * job.stride + column;
      const float* ape = job.ape + j % job.ratio * width + column;
      float* target = &z[j * d];
      for (int c = 0; c < d; ++c) {
        target[c] = std::fma(widen(row, c), kLog2e, ape[c]);
        m[c] = larger(target[c], m[c]);
      }
    }
    for (int group = 0; group < slots / kGroup; ++group) {
      float *s = &sums[group * d], *v = &weighted[group * d];
      for (int c = 0; c < d; ++c) s[c] = v[c] = 0.0f;
      for (int j = group * kGroup; j < (group + 1) * kGroup; ++j) {
        if (tokens[j] < 0) continue;
        const Element* row = kv + tokens[j] * job.stride + (slots == 8 && j >= 4 ? d : 0);
        const float* source = &z[j * d];
        for (int c = 0; c < d; ++c) {
          const float e = exp2_weight(source[c], m[c]);
          s[c] = s[c] + e;
          v[c] = std::fma(e, widen(row, c), v[c]);
        }
      }
    }
    tree(sums.data(), slots / kGroup, d);
    tree(weighted.data(), slots / kGroup, d);
    for (int c = 0; c < d; ++c) out[c] = weighted[c] / sums[c];
  }
};

// S4 to S6 in place.
void finish(const Rows& job, int64_t entry, float* x) {
  const int d = job.dim;
  float h[256];
  for (int i = 0; i < d / 2; ++i) h[i] = std::fma(x[2 * i + 1], x[2 * i + 1], x[2 * i] * x[2 * i]);
  tree(h, d / 2, 1);
  const float root = std::sqrt(std::fma(h[0], 1.0f / static_cast<float>(d), job.eps));
  const float r = 1.0f / root;
  for (int c = 0; c < d; ++c) x[c] = (x[c] * r) * job.norm_weight[c];
  const float* table = job.rope + entry * job.ratio * kRopeDims;
  float* last = x + d - kRopeDims;
  for (int i = 0; i < kRopeDims / 2; ++i) {
    const float x0 = last[2 * i], x1 = last[2 * i + 1], c = table[2 * i], s = table[2 * i + 1];
    last[2 * i] = std::fma(-x1, s, x0 * c);
    last[2 * i + 1] = std::fma(x1, c, x0 * s);
  }
  if (d != 128) return;
  for (int stride = 1; stride < d; stride *= 2) {
    for (int base = 0; base < d; base += 2 * stride) {
      for (int i = base; i < base + stride; ++i) {
        const float a = x[i], b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
      }
    }
  }
  for (int c = 0; c < d; ++c) x[c] = x[c] * kHadamard;
}

template <class Element>
void compute(const Rows& job, const Element* kv, const Element* score, int64_t first, int64_t count,
             float* out) {
  Pooler<Element> pooler(job, kv, score);
  for (int64_t i = 0; i < count; ++i) {
    float* row = out + i * job.dim;
    pooler.run(first + i, row);
    finish(job, job.entries[first + i], row);
  }
}

uint32_t to_bf16(float x) {
  const uint32_t b = bits(x);
  return (b + (((b >> 16) & 1) + 0x7fff)) >> 16;
}

uint32_t to_e4m3(float x) {
  const float magnitude = std::fabs(x) < 448.0f ? std::fabs(x) : 448.0f;
  const uint32_t b = bits(magnitude);
  const uint32_t normal = ((b + (((b >> 20) & 1) + 0x7ffff)) >> 20) - ((127 - 7) << 3);
  const uint32_t subnormal = bits(magnitude + 16384.0f) & 0xf;
  return (magnitude < 0.015625f ? subnormal : normal) | ((bits(x) >> 24) & 0x80);
}

uint32_t to_e2m1(float x) {
  const float magnitude = std::fabs(x) < 6.0f ? std::fabs(x) : 6.0f;
  const uint32_t b = bits(magnitude);
  const uint32_t normal = ((b + (((b >> 22) & 1) + 0x1fffff)) >> 22) - ((127 - 1) << 1);
  const uint32_t subnormal = bits(magnitude + 4194304.0f) & 0x3;
  return (magnitude < 1.0f ? subnormal : normal) | ((bits(x) >> 28) & 8);
}

float amax_of(const float* x, int count) {
  float amax = 0.0f;
  for (int i = 0; i < count; ++i) amax = larger(std::fabs(x[i]), amax);
  return amax;
}

uint32_t ceil_exponent(float g) { return (bits(g) >> 23) + ((bits(g) & 0x7fffff) != 0); }

void put16(uint8_t* target, uint32_t x) {
  target[0] = static_cast<uint8_t>(x);
  target[1] = static_cast<uint8_t>(x >> 8);
}

void encode_fp8(const float* y, uint8_t* values, uint8_t* scales) {
  const float scale = larger(amax_of(y, 128), kFloor) / 448.0f;
  const float inverse = 1.0f / scale;
  for (int i = 0; i < 128; ++i) values[i] = static_cast<uint8_t>(to_e4m3(y[i] * inverse));
  put16(scales, bits(scale) & 0xffff);
  put16(scales + 2, bits(scale) >> 16);
}

void encode_fp4(const float* y, uint8_t* values, uint8_t* scales) {
  for (int block = 0; block < 4; ++block, y += 32, values += 16) {
    const uint32_t e = ceil_exponent(larger(amax_of(y, 32), kFloorFp4) * kInverse6);
    const float inverse = number((254 - e) << 23);
    for (int i = 0; i < 16; ++i) {
      values[i] = static_cast<uint8_t>(to_e2m1(y[2 * i] * inverse) |
                                       (to_e2m1(y[2 * i + 1] * inverse) << 4));
    }
    scales[block] = static_cast<uint8_t>(e);
  }
}

void encode_584(const float* y, uint8_t* values, uint8_t* scales) {
  for (int block = 0; block < 7; ++block) {
    float b[64];
    for (int i = 0; i < 64; ++i) b[i] = number(to_bf16(y[64 * block + i]) << 16);
    const uint32_t e = ceil_exponent(larger(amax_of(b, 64), kFloor) * kInverse448);
    const float inverse = number((254 - e) << 23);
    for (int i = 0; i < 64; ++i) {
      values[64 * block + i] = static_cast<uint8_t>(to_e4m3(b[i] * inverse));
    }
    scales[block] = static_cast<uint8_t>(e);
  }
  scales[7] = 0;
  for (int i = 0; i < kRopeDims; ++i) put16(values + 448 + 2 * i, to_bf16(y[448 + i]));
}

}  // namespace

extern "C" {

// Final rows [count, dim] of windows first .. first + count - 1.
void needlepoint_rows(int ratio, int dim, int is_bf16, const void* kv, const void* score,
                      int64_t stride, const int64_t* tokens, const int64_t* entries,
                      const float* ape, const float* norm_weight, const float* rope, float eps,
                      int64_t first, int64_t count, float* out) {
  const Rows job{ratio, dim, stride, tokens, entries, ape, norm_weight, rope, eps};
  if (is_bf16) {
    compute(job, static_cast<const uint16_t*>(kv), static_cast<const uint16_t*>(score), first,
            count, out);
  } else {
    compute(job, static_cast<const float*>(kv), static_cast<const float*>(score), first, count,
            out);
  }
}

// Bytes of rows: format 0 bf16, 1 fp8, 2 fp4, 3 the 584-byte row.
void needlepoint_encode(int format, int dim, int64_t count, const float* rows, uint8_t* values,
                        uint8_t* scales) {
  for (int64_t i = 0; i < count; ++i) {
    const float* y = rows + i * dim;
    if (format == 0) {
      for (int c = 0; c < dim; ++c) put16(values + 2 * (i * dim + c), to_bf16(y[c]));
    } else if (format == 1) {
      encode_fp8(y, values + i * 128, scales + i * 4);
    } else if (format == 2) {
      encode_fp4(y, values + i * 64, scales + i * 4);
    } else {
      encode_584(y, values + i * 576, scales + i * 8);
    }
  }
}
}
