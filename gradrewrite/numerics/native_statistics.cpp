// Statistics of contiguous tensors in host memory, each read from memory once.
//
// Memory is read in blocks that fit into the first cache, and each statistic has a loop of its own over the block. Order, NaN
// and infinities are decided on the bits of IEEE numbers (without the sign they are ordered as whole numbers, with NaN above
// infinity), so no option of the compiler for floating point touches them. Sums are float64. bfloat16 and float16 become
// float32 block by block.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-loop-vectorize")  // Inductor's options switch it off, for loops of `omp simd` too (GCC 12)
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

// In the order of STATISTICS in statistics.py.
enum Statistic : int64_t {
  kMaxAbs, kMeanAbs, kNorm, kMin, kMax, kNan, kInf, kNonfinite, kZeros, kSaturatedTanh, kSaturatedSigmoid,
  kFingerprint0, kFingerprint1, kFingerprint2, kNumel
};

constexpr int64_t kBlock = 2048;
constexpr int64_t kMostThreads = 128;
constexpr int64_t kFewest = 32768;  // elements for a second thread

inline constexpr int64_t bit(Statistic statistic) { return int64_t{1} << statistic; }

constexpr int64_t kFingerprint = bit(kFingerprint0) | bit(kFingerprint1) | bit(kFingerprint2);

template <typename T> struct Format;
template <> struct Format<float> {
  using Unsigned = uint32_t __attribute__((may_alias));
  using Signed = int32_t __attribute__((may_alias));
  static constexpr Unsigned kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
  static constexpr int kShift = 31;
};
template <> struct Format<double> {
  using Unsigned = uint64_t __attribute__((may_alias));
  using Signed = int64_t __attribute__((may_alias));
  static constexpr Unsigned kMagnitude = 0x7fffffffffffffffull, kInfinity = 0x7ff0000000000000ull;
  static constexpr int kShift = 63;
};

template <typename To, typename From> inline To bits_as(From value) {
  To to;
  static_assert(sizeof(to) == sizeof(value), "same size");
  std::memcpy(&to, &value, sizeof(to));
  return to;
}

// Sums of a part of a tensor. Squares of float64 elements are scaled by powers of two, by the largest element of a block.
struct Sums {
  double small = 0, squares = 0, large = 0, magnitudes = 0;
  uint64_t largest = 0;  // bits of a magnitude
  int64_t lowest = INT64_MAX, highest = INT64_MIN;  // bits, negative numbers reversed, so that they are ordered
  int64_t nan = 0, inf = 0, nonfinite = 0, zeros = 0, saturated_tanh = 0, saturated_sigmoid = 0;
  uint64_t fingerprint = 0;

  void add(const Sums& other) {
    small += other.small;
    squares += other.squares;
    large += other.large;
    magnitudes += other.magnitudes;
    largest = largest < other.largest ? other.largest : largest;
    lowest = other.lowest < lowest ? other.lowest : lowest;
    highest = highest < other.highest ? other.highest : highest;
    nan += other.nan;
    inf += other.inf;
    nonfinite += other.nonfinite;
    zeros += other.zeros;
    saturated_tanh += other.saturated_tanh;
    saturated_sigmoid += other.saturated_sigmoid;
    fingerprint += other.fingerprint;
  }
};

constexpr double kUp = 0x1p600, kDown = 0x1p-600;

template <typename T> double sum_of_squares(const T* x, int64_t n, double scale) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) {
    double v = static_cast<double>(x[i]) * scale;
    sum += v * v;
  }
  return sum;
}

inline void add_squares(const float* x, int64_t n, uint32_t, Sums& sums) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) {
    double v = x[i];  // its square is neither too large nor too small for float64
    sum += v * v;
  }
  sums.squares += sum;
}

inline void add_squares(const double* x, int64_t n, uint64_t largest, Sums& sums) {
  if (largest > bits_as<uint64_t>(1e130)) {
    sums.large += sum_of_squares(x, n, kDown);
  } else if (largest >= bits_as<uint64_t>(1e-130)) {
    sums.squares += sum_of_squares(x, n, 1.0);
  } else {
    sums.small += sum_of_squares(x, n, kUp);
  }
}

inline double norm_of(const Sums& sums) {
  if (!(sums.large == 0)) return std::sqrt(sums.large + sums.squares * kDown * kDown) / kDown;
  if (!(sums.squares == 0)) return std::sqrt(sums.squares + sums.small * kDown * kDown);
  return std::sqrt(sums.small) / kUp;
}

template <typename T, typename Test> int64_t count(const T* x, int64_t n, Test test) {
  T found = 0;
#pragma omp simd reduction(+ : found)
  for (int64_t i = 0; i < n; i++) found += test(x[i]) ? T{1} : T{0};
  return static_cast<int64_t>(found);
}

// A block of at most kBlock elements; the bounds of saturation are those that 0.99 and 0.01 round to in the tensor's type.
template <typename T> void add_block(const T* x, int64_t n, int64_t wanted, T high, T low, Sums& sums) {
  using F = Format<T>;
  using Unsigned = typename F::Unsigned;
  using Signed = typename F::Signed;
  const Unsigned* bits = reinterpret_cast<const Unsigned*>(x);
  const Signed* ordered = reinterpret_cast<const Signed*>(x);
  Unsigned largest = 0;
  if (wanted & (bit(kMaxAbs) | bit(kMin) | bit(kMax) | (sizeof(T) == 8 ? bit(kNorm) : 0))) {
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; i++) {
      Unsigned v = bits[i] & F::kMagnitude;
      largest = largest < v ? v : largest;
    }
    sums.largest = sums.largest < largest ? largest : sums.largest;
  }
  if (wanted & bit(kNorm)) add_squares(x, n, largest, sums);
  if (wanted & bit(kMeanAbs)) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += std::fabs(static_cast<double>(x[i]));
    sums.magnitudes += sum;
  }
  if (wanted & (bit(kMin) | bit(kMax))) {
    Signed lowest = static_cast<Signed>(F::kMagnitude), highest = -lowest - 1;
#pragma omp simd reduction(min : lowest) reduction(max : highest)
    for (int64_t i = 0; i < n; i++) {
      Signed v = ordered[i];
      v ^= (v >> F::kShift) & static_cast<Signed>(F::kMagnitude);
      lowest = v < lowest ? v : lowest;
      highest = highest < v ? v : highest;
    }
    sums.lowest = lowest < sums.lowest ? lowest : sums.lowest;
    sums.highest = sums.highest < highest ? highest : sums.highest;
  }
  if (wanted & bit(kNan)) sums.nan += count(bits, n, [](Unsigned v) { return (v & F::kMagnitude) > F::kInfinity; });
  if (wanted & bit(kInf)) sums.inf += count(bits, n, [](Unsigned v) { return (v & F::kMagnitude) == F::kInfinity; });
  if (wanted & bit(kNonfinite)) {
    sums.nonfinite += count(bits, n, [](Unsigned v) { return (v & F::kMagnitude) >= F::kInfinity; });
  }
  if (wanted & bit(kZeros)) sums.zeros += count(bits, n, [](Unsigned v) { return (v & F::kMagnitude) == 0; });
  if (wanted & bit(kSaturatedTanh)) {
    sums.saturated_tanh += count(x, n, [=](T v) { return v >= high || v <= -high; });
  }
  if (wanted & bit(kSaturatedSigmoid)) {
    sums.saturated_sigmoid += count(x, n, [=](T v) { return v >= high || v <= low; });
  }
}

inline float widened_bfloat16(uint16_t v) { return bits_as<float>(static_cast<uint32_t>(v) << 16); }

inline float widened_float16(uint16_t v) {
  uint32_t sign = static_cast<uint32_t>(v & 0x8000u) << 16, exponent = (v >> 10) & 0x1fu, mantissa = v & 0x3ffu;
  uint32_t normal = ((exponent + 112) << 23) | (mantissa << 13), special = 0x7f800000u | (mantissa << 13);
  uint32_t denormal = bits_as<uint32_t>(static_cast<float>(static_cast<int32_t>(mantissa)) * 5.9604644775390625e-08f);
  return bits_as<float>(sign | (exponent == 0 ? denormal : exponent == 31 ? special : normal));
}

// Element types, as in native_statistics.py.
enum Type : int64_t { kFloat32, kFloat64, kBfloat16, kFloat16 };

inline int64_t size_of(int64_t type) { return type == kFloat64 ? 8 : type == kFloat32 ? 4 : 2; }

void widen(const void* data, int64_t n, int64_t type, float* to) {
  const uint16_t* from = static_cast<const uint16_t*>(data);
  if (type == kBfloat16) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) to[i] = widened_bfloat16(from[i]);
    return;
  }
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#endif
  for (; i < n; i++) to[i] = widened_float16(from[i]);
}

// The sum of `fingerprint_of` in statistics.py over words of an element's size, signed.
template <typename Word> uint64_t fingerprint(const char* data, int64_t n) {
  using Aliased __attribute__((may_alias)) = Word;
  const Aliased* words = reinterpret_cast<const Aliased*>(data);
  uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) {
    int64_t word = words[i];
    uint64_t v = static_cast<uint64_t>(word);
    if (sizeof(Word) == 8) v += static_cast<uint64_t>(word >> 48) * 0x9E3779B97F4Bull;
    sum += v * (2 * v + 1);
  }
  return sum;
}

uint64_t fingerprint(const char* data, int64_t n, int64_t type) {
  if (type == kFloat64) return fingerprint<int64_t>(data, n);
  return type == kFloat32 ? fingerprint<int32_t>(data, n) : fingerprint<int16_t>(data, n);
}

void add_part(const char* data, int64_t n, int64_t type, int64_t wanted, Sums& sums) {
  float buffer[kBlock];
  for (int64_t at = 0; at < n; at += kBlock) {
    int64_t m = n - at < kBlock ? n - at : kBlock;
    const char* block = data + at * size_of(type);
    if (wanted & kFingerprint) sums.fingerprint += fingerprint(block, m, type);
    if (type == kFloat32) {
      add_block(reinterpret_cast<const float*>(block), m, wanted, 0.99f, 0.01f, sums);
    } else if (type == kFloat64) {
      add_block(reinterpret_cast<const double*>(block), m, wanted, 0.99, 0.01, sums);
    } else {
      widen(block, m, type, buffer);
      bool is_bfloat16 = type == kBfloat16;
      add_block<float>(
          buffer, m, wanted, is_bfloat16 ? 0.98828125f : 0.990234375f, is_bfloat16 ? 0.010009765625f : 0.01000213623046875f,
          sums);
    }
  }
}

Sums sums_of(const char* data, int64_t n, int64_t type, int64_t wanted, int64_t threads) {
  Sums sums;
  if (n < kFewest || threads < 2) {
    add_part(data, n, type, wanted, sums);
    return sums;
  }
  Sums parts[kMostThreads];
  threads = threads < kMostThreads ? threads : kMostThreads;
  int64_t blocks = (n + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads))
  for (int64_t part = 0; part < threads; part++) {
    int64_t begin = blocks * part / threads * kBlock, end = blocks * (part + 1) / threads * kBlock;
    end = end < n ? end : n;
    if (begin < end) add_part(data + begin * size_of(type), end - begin, type, wanted, parts[part]);
  }
  for (int64_t part = 0; part < threads; part++) sums.add(parts[part]);
  return sums;
}

template <typename T> double ordered_value(int64_t v) {
  using F = Format<T>;
  auto bits = static_cast<typename F::Signed>(v);
  bits ^= (bits >> F::kShift) & static_cast<typename F::Signed>(F::kMagnitude);
  return static_cast<double>(bits_as<T>(bits));
}

template <typename T> double figure_of(int64_t statistic, const Sums& sums, int64_t n) {
  using Unsigned = typename Format<T>::Unsigned;
  double size = static_cast<double>(n), share = n ? 1.0 / size : 0.0;
  double largest = static_cast<double>(bits_as<T>(static_cast<Unsigned>(sums.largest)));
  bool has_range = n && !std::isnan(largest);
  switch (statistic) {
    case kMaxAbs: return n ? largest : NAN;
    case kMeanAbs: return n ? sums.magnitudes / size : NAN;
    case kNorm: return norm_of(sums);
    case kMin: return has_range ? ordered_value<T>(sums.lowest) : NAN;
    case kMax: return has_range ? ordered_value<T>(sums.highest) : NAN;
    case kNan: return static_cast<double>(sums.nan);
    case kInf: return static_cast<double>(sums.inf);
    case kNonfinite: return static_cast<double>(sums.nonfinite);
    case kZeros: return static_cast<double>(sums.zeros) * share;
    case kSaturatedTanh: return static_cast<double>(sums.saturated_tanh) * share;
    case kNumel: return static_cast<double>(n);
    case kSaturatedSigmoid: return static_cast<double>(sums.saturated_sigmoid) * share;
    default: return static_cast<double>((sums.fingerprint >> (16 * (statistic - kFingerprint0))) & 0xffff);
  }
}

double element(const char* data, int64_t at, int64_t type) {
  if (type == kFloat32) return static_cast<double>(reinterpret_cast<const float*>(data)[at]);
  if (type == kFloat64) return reinterpret_cast<const double*>(data)[at];
  uint16_t half = reinterpret_cast<const uint16_t*>(data)[at];
  return static_cast<double>(type == kBfloat16 ? widened_bfloat16(half) : widened_float16(half));
}

// What is the same in all calls at one place; in the order of `given` in native_statistics.py.
struct Call {
  int64_t num_tensors;
  const int64_t *types, *positions, *statistics;
  int64_t num_checks;
  const int64_t* checks;
  int64_t is_wide;
};

template <typename Out>
void write_all(const Call& call, const int64_t* addresses, const int64_t* sizes, int64_t threads, Out* out) {
  Out* next = out;
  for (int64_t t = 0; t < call.num_tensors; t++) {
    const char* data = reinterpret_cast<const char*>(static_cast<intptr_t>(addresses[t]));
    int64_t n = sizes[t], type = call.types[t];
    const int64_t* own = call.statistics + call.positions[t];
    int64_t num_own = *own++;
    if (num_own < 0) {
      for (int64_t i = 0; i < n; i++) *next++ = static_cast<Out>(element(data, i, type));
      continue;
    }
    int64_t wanted = 0;
    for (int64_t i = 0; i < num_own; i++) wanted |= int64_t{1} << own[i];
    Sums sums = sums_of(data, n, type, wanted, threads);
    for (int64_t i = 0; i < num_own; i++) {
      *next++ = static_cast<Out>(
          type == kFloat64 ? figure_of<double>(own[i], sums, n) : figure_of<float>(own[i], sums, n));
    }
  }
  bool has_failed = false;
  for (int64_t i = 0; i < call.num_checks; i++) has_failed |= out[call.checks[i]] > 0;
  if (call.num_checks) *next = has_failed ? 1 : 0;
}

}  // namespace

// Write the figures of all tensors, one after the other, and then 1 or 0: whether one of the figures at `checks` is > 0.
//
// types, positions, addresses, sizes: for each tensor its type, the position of its statistics in `statistics`, its memory
//   and its number of elements.
// statistics: there, their number and then they; a number of -1: the elements themselves are the figures.
// out: float64 if `is_wide`, else float32.
extern "C" void gradrewrite_figures(
    const Call* call, const int64_t* addresses, const int64_t* sizes, int64_t threads, void* out) {
  if (call->is_wide) {
    write_all(*call, addresses, sizes, threads, static_cast<double*>(out));
  } else {
    write_all(*call, addresses, sizes, threads, static_cast<float*>(out));
  }
}
